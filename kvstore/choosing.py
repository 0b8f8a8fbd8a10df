"""Which blocks set out for the disk together, and which of them will never get there.

There may be no room for a block, ever (its prefix is larger than the disk) or now. What can never be
written is declined: it stays in memory only, as do those that stand on it, and the rest is written.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections import Counter, deque
from collections.abc import Callable, Sequence

from kvstore.arena import Arena
from kvstore.dirty import DirtyQueue, Lane
from kvstore.disk import DiskTier
from kvstore.host import HostTier
from kvstore.pipeline import Batch, Pipeline
from kvstore.prefix_index import PrefixIndex
from kvstore.room import Room

log = logging.getLogger(__name__)

REMEMBERED = 256  # blocks that could not be written, so that they are not tried again whenever they are hit
PATIENCE = 3  # times that a half-written document may find no room, while others wait behind it

# Counters of blocks that stay in memory only.
QUOTA, TOO_LARGE, UNWRITABLE = "quota_declined_blocks", "disk_declined_blocks", "unwritable_blocks"


class Choice:
    """Makes batches of what is dirty. Part of the writer; owned by the store's event loop."""

    def __init__(
        self,
        index: PrefixIndex,
        arena: Arena,
        host: HostTier,
        disk: DiskTier,
        dirty: DirtyQueue,
        room: Room,
        counters: Counter[str],
        drop: Callable[[int], None],
    ) -> None:
        """``drop`` is called on rows that stay in memory only, to take them from the queue."""
        self._index = index
        self._arena = arena
        self._host = host
        self._disk = disk
        self._dirty = dirty
        self._room = room
        self._counters = counters
        self._drop = drop
        self._said: set[str] = set()  # what of this was in the log
        self._unwritable: deque[bytes] = deque(maxlen=REMEMBERED)

    def full(self, lane: Lane) -> int:
        """Blocks of a full batch of this lane."""
        return min(self._disk.batch_blocks(lane.layout.block_bytes), lane.cap or sys.maxsize)

    def batch(self, lane: Lane, pipeline: Pipeline) -> Batch | None:
        """The next blocks of a lane, as many as there is room for beside those under way; None if for none.

        What is not in the batch is queued as it was, also if this raises.
        """
        rows = self._dirty.take(lane, self.full(lane))
        batch = None
        try:
            batch = self._prepare(lane, rows, pipeline)
        finally:
            self._dirty.put_back(lane, [row for row in rows if batch is None or row not in batch.rows])
        return batch

    def _prepare(self, lane: Lane, rows: Sequence[int], pipeline: Pipeline) -> Batch | None:
        rows = self._admissible(rows, pipeline)
        if not rows:
            return Batch({}, None, [], 0)
        rows = rows[: self._room.fitting(rows, pipeline.nbytes)]
        if not rows:
            return None
        slots = {row: self._index.slot[row] for row in rows}
        blocks = [self._host.new_block(row, slot) for row, slot in slots.items()]
        batch = Batch(slots, lane, blocks, self._room.need(rows))
        with contextlib.ExitStack() as undo:
            for slot in slots.values():
                self._arena.hold(slot)
                undo.callback(self._arena.unhold, slot)
            undo.pop_all()
        return batch

    def _admissible(self, rows: Sequence[int], pipeline: Pipeline) -> list[int]:
        """Those of a batch's rows for which there may be room. The others are declined."""
        beyond = set(self._room.beyond_quota(rows, pipeline.carried()))
        kept: list[int] = []
        why = QUOTA
        for row in rows:
            if row in beyond:
                self.decline(row, QUOTA)
            elif self._room.never_fits(row) or self._index.hashes[row] in self._unwritable:
                why = UNWRITABLE if self._index.hashes[row] in self._unwritable else TOO_LARGE
                self.decline(row, why)
            elif self._host.is_loose(self._index.parent[row]):
                self.decline(row, why)
            else:
                kept.append(row)
        return kept

    def make_way(self, lane: Lane) -> bool:
        """There is no room for the first block of a lane: give up what only keeps others waiting.

        Documents that are half written keep their own room, and so may leave none to end any of
        them: those that came last go. And one that has waited long for room that leases and pins hold
        goes when there are others behind it. False if there are none such.
        """
        first = next(iter(lane))
        crowd = self._dirty.in_the_way(first)
        if not crowd and lane.trouble.failures >= PATIENCE:
            own = self._dirty.keeping(lane, first)
            crowd = own if len(own) < len(self._dirty) else []
        for row in crowd:
            self.decline(row, TOO_LARGE)
        return bool(crowd)

    def condemn(self, rows: Sequence[int]) -> None:
        """The first of these blocks can never be written, and the others stand on it."""
        for row in rows[:1]:
            self._unwritable.append(self._index.hashes[row])
        for row in rows:
            self.decline(row, UNWRITABLE)

    def decline(self, row: int, why: str) -> None:
        """A block stays in memory only."""
        self._counters[why] += 1
        if why not in self._said and why != QUOTA:
            self._said.add(why)
            log.warning(
                "event=%s block=%s depth=%d disk_bytes=%d; it stays in memory only, as will others that"
                " this log does not name",
                why,
                self._index.hashes[row][:6].hex(),
                self._index.depth[row],
                self._disk.capacity_bytes,
            )
        self._arena.loosen(self._index.slot[row])
        self._drop(row)
