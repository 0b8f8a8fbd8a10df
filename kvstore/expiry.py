"""What has expired: not used for too long, or stored too long ago.

Looked for with numpy over the index's columns, a few milliseconds for a million blocks, and
dropped in short steps, between which the loop serves others.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from kvstore.observer import Departure
from kvstore.prefix_index import NONE, BlockState, PrefixIndex, view
from kvstore.writeback import Writer

STEP_BLOCKS = 256  # dropped before others have their turn
_LONGEST_TICK = 60.0  # seconds between looks, and so how precise the limits are


class Expiry:
    """Drops what has expired; what is held (leased, pinned, being written or read) has its turn later.

    ``ttl`` since the last use and ``max_age`` since it was stored, in seconds; 0 is off.
    """

    def __init__(
        self, index: PrefixIndex, writer: Writer, counters: Counter[str], *, ttl: float, max_age: float
    ) -> None:
        self._index = index
        self._writer = writer
        self._counters = counters
        self._ttl = ttl
        self._max_age = max_age

    @property
    def tick(self) -> float:
        """Seconds between two looks."""
        limits = (self._ttl, self._max_age)
        return min([_LONGEST_TICK, *(limit / 20 for limit in limits if limit)])

    async def sweep(self, now: float) -> int:
        """Drop what has expired at ``now`` (the store's time); how many blocks."""
        dropped = 0
        if self._ttl:
            dropped += await self._drop(self._idle_tails(now - self._ttl))
        if self._max_age:
            dropped += await self._drop(await self._aged(now - self._max_age))
        return dropped

    async def _drop(self, rows: Iterator[int]) -> int:
        dropped = 0
        while step := list(self._step(rows)):
            dropped += len(step)
            self._counters["expired_blocks"] += len(step)
            # No faster than they leave the disk, so that no transaction grows long.
            await self._writer.gone()
            await asyncio.sleep(0)
        return dropped

    def _step(self, rows: Iterator[int]) -> Iterator[int]:
        for row in islice(rows, STEP_BLOCKS):
            self._writer.free(row, Departure.EXPIRED)
            yield row

    def _idle_tails(self, limit: float) -> Iterator[int]:
        """Leaves that were last used before ``limit``, and what is bared by their going.

        The caller drops each before it asks for the next. A row may mean another block by then,
        so each is looked at when its turn comes.
        """
        index = self._index
        for row in np.flatnonzero(index.leaves() & (view(index.used) < limit)).tolist():
            while row != NONE and index.is_leaf(row) and index.used[row] < limit:
                above = index.stored_above(row)
                yield row
                row = above

    async def _aged(self, limit: float) -> Iterator[int]:
        """Rows stored before ``limit``, and all that stands on such; leaves first."""
        index = self._index
        if not ((view(index.created) < limit) & (view(index.state) == BlockState.PRESENT)).any():
            return iter(())
        # Copies, for the loop goes on: a row that means another block by then was created since.
        then = view(index.created).copy()
        others = (view(column).copy() for column in (index.parent, index.state, index.depth))
        rows = await asyncio.to_thread(_aged_rows, limit, then, *others)
        return (row for row in rows if index.is_leaf(row) and index.created[row] == then[row])


def _aged_rows(
    limit: float,
    created: NDArray[np.uint32],
    parent: NDArray[np.int32],
    state: NDArray[np.uint8],
    depth: NDArray[np.int32],
) -> list[int]:
    """PRESENT rows of which they, or one above them, were created before ``limit``; deepest first."""
    present = state == BlockState.PRESENT
    # A hole has no bytes, so its time does not count.
    oldest = np.where(present, created, np.iinfo(np.uint32).max)
    above = np.where(parent == NONE, np.arange(len(parent), dtype=np.int32), parent)
    while True:  # each turn looks twice as far up the chains
        oldest = np.minimum(oldest, oldest[above])
        further = above[above]
        if (further == above).all():
            break
        above = further
    rows = np.flatnonzero(present & (oldest < limit))
    found: list[int] = rows[np.argsort(-depth[rows], kind="stable")].tolist()
    return found
