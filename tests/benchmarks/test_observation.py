"""The cost of watching is measured against a real daemon."""

from __future__ import annotations

from benchmarks.observation import measure


def test_both_costs_are_measured_for_a_match_and_a_warm_load() -> None:
    costs = measure(2, rounds=1)
    assert [cost.what for cost in costs] == ["match of 2 blocks", "warm load of 2 blocks"]
    assert all(cost.call > 0 and cost.observing > 0 for cost in costs)
