"""Counts of answered calls, shown beside the store's own counters."""

from __future__ import annotations

from collections import Counter


class RequestCounters:
    """How many calls of each verb ended with which status."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def count(self, verb: str, status: str) -> None:
        """One call of ``verb`` ended with the gRPC status named ``status``."""
        self._counts[f"rpc_{verb.lower()}_{status.lower()}"] += 1

    def snapshot(self) -> dict[str, int]:
        """All counts so far, by name: ``rpc_match_ok`` and the like."""
        return dict(self._counts)
