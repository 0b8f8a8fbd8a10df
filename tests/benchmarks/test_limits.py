import os
from pathlib import Path

import pytest

from benchmarks.limits import DEPTHS, Memcpy, RawDisk
from benchmarks.options import BenchmarkError

BLOCK = 100_000  # no multiple of a page


@pytest.mark.parametrize("depth", DEPTHS)
def test_raw_reads_and_writes_move_every_block_at_every_depth(tmp_path, depth):
    with RawDisk(tmp_path / "raw", BLOCK, 5) as disk:
        assert disk.write(depth) > 0
        assert disk.read(depth, disk.places([tmp_path / "raw"])) > 0
    assert os.stat(tmp_path / "raw").st_size == 5 * 25 * 4096
    content = (tmp_path / "raw").read_bytes()
    assert all(any(content[at : at + 4096]) for at in range(0, len(content), 4096))


def test_raw_reads_keep_to_what_was_written_of_a_file(tmp_path):
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(100 * 4096)
        file.seek(50 * 4096)
        file.write(bytes(60 * 4096))
    with RawDisk(tmp_path / "raw", BLOCK, 2) as disk:
        assert [at for _, at in disk.places([tmp_path / "sparse"])] == [50 * 4096, 75 * 4096]
    with RawDisk(tmp_path / "raw", BLOCK, 3) as disk, pytest.raises(BenchmarkError, match="only 2 of 3"):
        disk.places([tmp_path / "sparse"])


def test_raw_limits_need_direct_io():
    with pytest.raises(BenchmarkError, match="O_DIRECT"):
        RawDisk(Path("/proc/latentkv-raw"), BLOCK, 1)


def test_memcpy_copies_all_blocks():
    memcpy = Memcpy(BLOCK, 3)
    assert memcpy.copy() > 0
    assert memcpy.copied
