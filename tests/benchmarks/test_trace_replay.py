"""The store hits what the plan says."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.trace_replay import main

TRACE = Path(__file__).parents[1] / "server" / "trace.jsonl"


def test_the_store_and_the_plan_hit_the_same_on_a_small_trace(tmp_path: Path) -> None:
    main([str(TRACE), "--shares", "100", "--json", str(tmp_path / "run.json")])
    (found,) = json.loads((tmp_path / "run.json").read_text())
    assert (found["blocks"], found["store"], found["plan"]) == (8, 7 / 15, 7 / 15)
