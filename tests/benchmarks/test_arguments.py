import argparse
import json

import pytest

from benchmarks import arguments, data_path
from benchmarks.options import BenchmarkError


def test_sizes_are_read_as_the_daemon_reads_them():
    assert arguments.size("1GiB") == 1 << 30
    assert arguments.size("4096") == 4096


@pytest.mark.parametrize("text", ["much", "-1GiB", ""])
def test_no_size_is_refused(text):
    with pytest.raises(argparse.ArgumentTypeError, match="such as 1GiB"):
        arguments.size(text)


def test_numbers_have_commas_between():
    assert arguments.numbers("1,2, 8") == (1, 2, 8)
    with pytest.raises(argparse.ArgumentTypeError):
        arguments.numbers("1,0")


def test_a_workplace_is_gone_afterwards(tmp_path):
    with arguments.workplace(tmp_path, 0) as place:
        (place / "file").touch()
    assert not list(tmp_path.iterdir())


def test_too_little_room_is_said_before_anything_is_measured(tmp_path):
    with pytest.raises(BenchmarkError, match="needed"), arguments.workplace(tmp_path, 1 << 60):
        pass


def test_wrong_options_end_with_one_line_and_status_2(capsys):
    assert data_path.main(["--layout", "no-such"]) == 2
    assert data_path.main(["--blocks", "0"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert all(line.startswith("data_path: ") for line in lines)


def test_figures_go_where_they_are_wanted(tmp_path):
    arguments.write_json(tmp_path / "new" / "run.json", {"a": 1})
    assert json.loads((tmp_path / "new" / "run.json").read_text()) == {"a": 1}
    arguments.write_json(None, {})
