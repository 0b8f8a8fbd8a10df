"""Which tails leave a full disk: least recently used first, whole tails, leaves first.

A tail is a block nobody stands on and the blocks above it that only it needed. Under the
policy ``unit`` it reaches up to the next unit or fork, since nothing can hit the blocks
in between; under ``block`` each block is of use, so a tail is one block.

Blocks that are in memory only may stand on some that are on disk. They keep nothing there: they go
with their tail, when it is its turn.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterator

import numpy as np

from kvstore.prefix_index import NONE, BlockState, PrefixIndex, view
from kvstore.settings import Policy


class TailEvictor:
    """Chooses what to evict; the caller removes it from the tiers before asking for more."""

    def __init__(
        self, index: PrefixIndex, policy: Policy, is_loose: Callable[[int], bool] = lambda row: False
    ) -> None:
        """``is_loose`` says which blocks are in memory only and not meant for the disk."""
        self._index = index
        self._is_loose = is_loose
        self._whole = policy == "unit"

    def evict(
        self,
        enough: Callable[[], bool],
        drop: Callable[[int], None],
        among: Collection[int] | None = None,
    ) -> bool:
        """Call ``drop`` on rows, leaves first, until ``enough()`` holds; False if it can't be had.

        ``drop`` takes the row out of its tiers and the index (``PrefixIndex.lose``). ``among`` names
        the namespaces whose rows may go; None is all.
        """
        if enough():
            return True
        leaves = self._leaves(among)
        bared: list[tuple[float, int]] = []  # a heap of rows that became leaves
        while leaves or bared:
            _, row = heapq.heappop(bared) if _first(bared, leaves) else leaves.pop()
            if not self._frees_disk(row):
                continue
            tail = list(self._tail(row))
            above = self._index.stored_above(tail[-1])
            for row in tail:
                drop(row)
            if above != NONE and self._evictable(above):
                heapq.heappush(bared, (self._index.used[above], above))
            if enough():
                return True
        return False

    def _leaves(self, among: Collection[int] | None) -> list[tuple[float, int]]:
        """All rows that may go, least recently used last."""
        index = self._index
        rows = np.flatnonzero(index.leaves())
        if among is not None:
            rows = rows[np.isin(view(index.namespace)[rows], list(among))]
        used = view(index.used)[rows]
        order = np.argsort(-used, kind="stable")
        return list(zip(used[order].tolist(), rows[order].tolist(), strict=True))

    def _evictable(self, row: int) -> bool:
        return not self._index.children[row] and self._may_go(row)

    def _may_go(self, row: int) -> bool:
        index = self._index
        there = index.state[row] == BlockState.PRESENT and not index.holds[row]
        return there and (index.place[row] != NONE or self._is_loose(row))

    def _frees_disk(self, row: int) -> bool:
        """Whether the block is on disk, or loose as are all that it stands on down to one that is."""
        while row != NONE and self._index.place[row] == NONE and self._is_loose(row):
            row = self._index.parent[row]
        return row != NONE and self._index.place[row] != NONE

    def _tail(self, row: int) -> Iterator[int]:
        index = self._index
        yield row
        while self._whole:
            row = index.parent[row]
            if row == NONE or index.children[row] != 1 or index.kinds[row] or not self._may_go(row):
                return
            yield row


def _first(bared: list[tuple[float, int]], leaves: list[tuple[float, int]]) -> bool:
    """Whether the oldest is among the bared ones."""
    return bool(bared) and (not leaves or bared[0][0] <= leaves[-1][0])
