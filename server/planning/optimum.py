"""Belady's optimum: what a cache of that size could hit at best, knowing the future."""

from __future__ import annotations

import heapq

from server.planning.replay import Outcome
from server.planning.trace import Trace

_NEVER = 1 << 62


def best(trace: Trace, capacity: int) -> Outcome:
    """Hits if the blocks that are needed latest leave first, and what is never needed is not kept.

    A block is needed no later than those behind it, so this never tears a prefix.
    """
    kept: dict[int, int] = {}  # block -> next use
    order: list[tuple[int, int, int]] = []  # a heap: the latest use, the deepest block first
    hits = asked = written = 0
    for now, (request, uses) in enumerate(zip(trace.requests, _next_uses(trace), strict=True)):
        asked += len(request.blocks)
        for block in request.blocks:
            if kept.get(block) != now:
                break
            hits += 1
        for depth, (block, use) in enumerate(zip(request.blocks, uses, strict=True)):
            if use == _NEVER:
                kept.pop(block, None)
                continue
            written += block not in kept
            kept[block] = use
            heapq.heappush(order, (-use, -depth, block))
        while len(kept) > capacity:
            use, _, block = heapq.heappop(order)
            if kept.get(block) == -use:  # else an older entry of a block that was used since
                del kept[block]
    return Outcome(asked, hits, written)


def _next_uses(trace: Trace) -> list[list[int]]:
    """For each block of each request, the number of the next request that has it."""
    following: dict[int, int] = {}
    uses: list[list[int]] = []
    for number in range(len(trace.requests) - 1, -1, -1):
        blocks = trace.requests[number].blocks
        uses.append([following.get(block, _NEVER) for block in blocks])
        following |= dict.fromkeys(blocks, number)
    return uses[::-1]
