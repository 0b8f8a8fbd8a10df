"""The benchmark of the scheduler's wait runs, and sees hits and misses for what they are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vllm is not in this environment: make test-engines")

from benchmarks import scheduler_wait


def test_the_schedulers_wait_is_measured_for_hits_misses_and_without_a_connector(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    options = ["--tokens", "4096", "--requests", "3", "--data", str(tmp_path), "--json", str(out)]
    assert scheduler_wait.main(options) == 0
    waits = json.loads(out.read_text())["waits"]
    assert {kind: [wait["loaded"] for wait in some] for kind, some in waits.items()} == {
        "never seen": [0] * 3,
        "stored": [4096] * 3,
        "no connector": [0] * 3,
    }
    assert all(wait["connector"] == 0 for wait in waits["no connector"])
    assert all(0 < wait["connector"] <= wait["scheduler"] for wait in waits["stored"])
