"""Which tails leave a full disk: least recently used first, whole tails, leaves first.

A tail is a block nobody stands on and the blocks above it that only it needed. Under the
policy ``unit`` it reaches up to the next unit or fork, since nothing can hit the blocks
in between; under ``block`` each block is of use, so a tail is one block.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator

import numpy as np

from kvstore.prefix_index import NONE, BlockState, PrefixIndex
from kvstore.settings import Policy


class TailEvictor:
    """Chooses what to evict; the caller removes it from the tiers before asking for more."""

    def __init__(self, index: PrefixIndex, policy: Policy) -> None:
        self._index = index
        self._whole = policy == "unit"

    def evict(self, enough: Callable[[], bool], drop: Callable[[int], None]) -> bool:
        """Call ``drop`` on rows, leaves first, until ``enough()`` holds; False if it can't be had.

        ``drop`` takes the row out of its tiers and the index (``PrefixIndex.lose``).
        """
        if enough():
            return True
        leaves = self._leaves()
        while leaves:
            tail = list(self._tail(heapq.heappop(leaves)[1]))
            above = self._index.parent[tail[-1]]
            for row in tail:
                drop(row)
            if above != NONE and self._evictable(above):
                heapq.heappush(leaves, (self._index.used[above], above))
            if enough():
                return True
        return False

    def _leaves(self) -> list[tuple[float, int]]:
        index = self._index
        candidates = np.flatnonzero(
            (np.frombuffer(index.state, np.uint8) == BlockState.PRESENT)
            & (np.frombuffer(index.place, np.int64) != NONE)
            & (np.frombuffer(index.children, np.int32) == 0)
            & (np.frombuffer(index.holds, np.int32) == 0)
        )
        leaves = [(index.used[row], row) for row in candidates.tolist()]
        heapq.heapify(leaves)
        return leaves

    def _evictable(self, row: int) -> bool:
        index = self._index
        return (
            index.state[row] == BlockState.PRESENT
            and index.place[row] != NONE
            and not index.children[row]
            and not index.holds[row]
        )

    def _tail(self, row: int) -> Iterator[int]:
        index = self._index
        yield row
        while self._whole:
            row = index.parent[row]
            if row == NONE or index.children[row] != 1 or index.kinds[row] or index.holds[row]:
                return
            if index.state[row] != BlockState.PRESENT or index.place[row] == NONE:
                return
            yield row
