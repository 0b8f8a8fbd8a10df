"""Commands beside ``serve``: their answers, their JSON, and how they fail."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvstore.layout import preset
from server.cli import app
from tests.server.conftest import DEADLINE, ROOT_DIR


def latentkv(*arguments: str, code: int = 0) -> str:
    """Run a command; its output, or its one line on stderr."""
    done = subprocess.run(
        [sys.executable, "-m", "server", *arguments],
        cwd=ROOT_DIR,
        capture_output=True,
        text=True,
        timeout=DEADLINE,
    )
    assert done.returncode == code, done.stderr
    if not code:
        return done.stdout
    assert done.stderr.startswith("latentkv: ")
    assert done.stderr.count("\n") == 1
    return done.stderr


def test_config_show_says_each_value_and_where_it_comes_from() -> None:
    flags = ("config", "show", "--data", "/d", "--listen", "127.0.0.1:5000", "--host-bytes", "1GiB")
    shown = json.loads(latentkv(*flags, "--json"))
    assert shown["host_bytes"] == {"value": 1 << 30, "source": "from --host-bytes"}
    assert shown["listen"] == {"value": "127.0.0.1:5000", "source": "from --listen"}
    assert shown["codec"] == {"value": "raw", "source": "by default"}
    assert "from --host-bytes" in latentkv(*flags)


def test_config_show_refuses_what_serve_refuses() -> None:
    assert "policy='lru' (from --policy)" in latentkv(
        "config", "show", "--data", "/d", "--policy", "lru", code=2
    )


def test_bench_measures_memory_disk_and_both_tiers_and_leaves_nothing(tmp_path: Path) -> None:
    ran = CliRunner().invoke(app, ["bench", str(tmp_path), "--size", "6MiB", "--model", "tiny", "--json"])
    if "no O_DIRECT there" in ran.stderr:
        pytest.skip("needs a disk that can be read past the page cache")
    assert ran.exit_code == 0, ran.stderr
    shown = json.loads(ran.stdout)
    steps = {step["step"]: step["bytes_a_second"] for step in shown["steps"]}
    assert len(steps) == 7
    assert all(rate > 0 for rate in steps.values())
    assert shown["tokens_a_second"]["load from DISK"] == steps["load from DISK"] / preset("tiny").token_bytes
    assert list(tmp_path.iterdir()) == []


def test_bench_tells_people_how_many_times_as_fast_as_prefill_a_load_is(tmp_path: Path) -> None:
    words = ["bench", str(tmp_path), "--size", "2MiB", "--model", "tiny", "--prefill-rate", "100"]
    ran = CliRunner().invoke(app, words)
    if "no O_DIRECT there" in ran.stderr:
        pytest.skip("needs a disk that can be read past the page cache")
    assert ran.exit_code == 0, ran.stderr
    told = re.findall(r"load from (\w+): ([\d,]+) tokens/s of tiny: ([\d.]+) times as fast", ran.stdout)
    assert [tier for tier, _, _ in told] == ["HOST", "DISK"]
    for _, rate, gain in told:
        assert float(gain) == pytest.approx(float(rate.replace(",", "")) / 100, abs=0.06)


def test_bench_refuses_what_it_cannot_measure(tmp_path: Path) -> None:
    for size, wrong in (("1EB", "bytes free"), ("much", "--size 'much'")):
        ran = CliRunner().invoke(app, ["bench", str(tmp_path), "--size", size])
        assert (ran.exit_code, ran.stderr.count("\n")) == (2, 1)
        assert wrong in ran.stderr
