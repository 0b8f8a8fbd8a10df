"""A plan: for each size of the cache what it hits, writes, and saves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvstore.settings import Policy
from server.planning.optimum import best
from server.planning.replay import Replay
from server.planning.trace import Trace

SHARES = (0.01, 0.02, 0.05, 0.10, 0.20, 0.50, 1.0)  # of the distinct blocks
DAY = 86400.0


@dataclass(frozen=True, slots=True)
class Machine:
    """What a token costs: its bytes, and the rates of the GPU (tokens/s) and the disk (bytes/s)."""

    token_bytes: int
    prefill_rate: float
    disk_rate: float


@dataclass(frozen=True, slots=True)
class Row:
    """One size. Rates are shares of the asked blocks; the rest is for a day at the trace's pace."""

    share: float  # of the distinct blocks
    blocks: int
    nbytes: int
    unit: float  # hit rate of the policy ``unit``
    block: float  # hit rate of the policy ``block``
    optimum: float
    written_bytes_a_day: float
    prefill_seconds_a_day: float  # that the hits of ``unit`` would cost to compute
    load_seconds_a_day: float  # that they cost to load from disk


@dataclass(frozen=True, slots=True)
class Plan:
    """All sizes, smallest first. ``interval`` in tokens."""

    requests: int
    seconds: float
    distinct_blocks: int
    block_tokens: int
    interval: int
    rows: list[Row]


def plan(
    trace: Trace,
    capacities: Sequence[int],
    machine: Machine,
    interval: int,
    progress: Callable[[], None] = lambda: None,
) -> Plan:
    """Replay the trace for each capacity in blocks; ``progress`` is called after each replay."""
    distinct = trace.distinct_blocks
    rows = [_row(trace, capacity, distinct, machine, interval, progress) for capacity in sorted(capacities)]
    return Plan(len(trace.requests), trace.seconds, distinct, trace.block_tokens, interval, rows)


def capacities_of(trace: Trace, sizes: Sequence[int], token_bytes: int) -> list[int]:
    """Sizes in bytes as blocks of the trace; without sizes ``SHARES`` of its distinct blocks."""
    if sizes:
        return [max(size // (token_bytes * trace.block_tokens), 1) for size in sizes]
    distinct = trace.distinct_blocks
    return sorted({max(int(share * distinct), 1) for share in SHARES})


def _row(
    trace: Trace,
    capacity: int,
    distinct: int,
    machine: Machine,
    interval: int,
    progress: Callable[[], None],
) -> Row:
    marks = max(interval // trace.block_tokens, 1) if interval else 0

    def replay(policy: Policy) -> Replay:
        return Replay(capacity, policy, marks)

    unit = replay("unit").run(trace)
    progress()
    block = replay("block").run(trace)
    progress()
    optimum = best(trace, capacity)
    progress()
    a_day = DAY / trace.seconds if trace.seconds else 0.0
    block_bytes = machine.token_bytes * trace.block_tokens
    return Row(
        share=capacity / distinct,
        blocks=capacity,
        nbytes=capacity * block_bytes,
        unit=unit.hit_rate,
        block=block.hit_rate,
        optimum=optimum.hit_rate,
        written_bytes_a_day=unit.written * block_bytes * a_day,
        prefill_seconds_a_day=unit.hits * trace.block_tokens / machine.prefill_rate * a_day,
        load_seconds_a_day=unit.hits * block_bytes / machine.disk_rate * a_day,
    )
