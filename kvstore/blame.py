"""What could not be written: whose fault it was, and when it is tried again.

A failure of one layout's blocks, of marks, or of what has to leave puts off just these. While blocks
cannot be written the store is HOST_ONLY: they may leave the arena unwritten.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from kvstore.choosing import Choice
from kvstore.dirty import DirtyQueue, Lane
from kvstore.host import HostTier
from kvstore.marks import UnitMarks
from kvstore.pipeline import Batch, TakenAlong
from kvstore.trouble import Trouble

log = logging.getLogger(__name__)


class Blame:
    """What fails now. Part of the writer; owned by the store's event loop."""

    def __init__(
        self,
        dirty: DirtyQueue,
        marks: UnitMarks,
        host: HostTier,
        choice: Choice,
        counters: Counter[str],
        settle_lost: Callable[[int], None],
        wake: Callable[[], None],
    ) -> None:
        """``settle_lost`` is called on rows that are not durable now, ``wake`` when it is time to go on."""
        self._dirty = dirty
        self._marks = marks
        self._host = host
        self._choice = choice
        self._counters = counters
        self._settle_lost = settle_lost
        self._wake = wake
        self._hurried = False
        self._host_only = False
        self._nothing_goes = False  # what was to leave could not, and nothing was written since
        self.of_marks = Trouble()
        self.of_leaving = Trouble()
        self.of_looking = Trouble()  # for payloads that are missing, which is no reason to be HOST_ONLY

    @property
    def failing(self) -> bool:
        """Whether something could not be written when it was last tried."""
        return bool(self._dirty.troubled or self.of_marks or self._nothing_goes)

    def failed(self, batch: Batch, error: Exception) -> None:
        """A batch failed, and all that it held is queued again."""
        lane = batch.lane
        if isinstance(error, TakenAlong):
            if lane is not None and lane.trouble:
                self.settle(batch.rows)
            return
        if lane is None or batch.stuck:
            self._counters["write_failures"] += 1
        if batch.stuck:
            self._nothing_goes = self._nothing_goes or not self.of_leaving
            self.pause(self.of_leaving)
            if lane is not None:
                self.pause(lane.trouble)
                self.settle(lane)
            return
        if batch.others:
            self.pause(self.of_marks)
            self.settle(self._marks.made())
        if lane is not None:
            self.lane_failed(lane, list(batch.rows))

    def lane_failed(self, lane: Lane, rows: Sequence[int]) -> None:
        """These blocks of a lane could not be written; none if it was for want of room."""
        self._counters["write_failures"] += 1
        unwritable, pause = lane.failed(rows) if rows else ([], True)
        self._choice.condemn(unwritable)
        if pause:
            self.pause(lane.trouble)
            self.settle(lane)

    def settle(self, rows: Iterable[int]) -> None:
        """Whoever waits for durability learns now that it can't be had."""
        for row in list(rows):
            self._settle_lost(row)

    def pause(self, trouble: Trouble) -> None:
        """It failed: it is tried again in a while."""
        delay = trouble.failed(asyncio.get_running_loop().time(), hurried=self._hurried)
        asyncio.get_running_loop().call_later(delay, self._wake)

    def succeeded(self, batch: Batch, limit: int) -> None:
        """A batch was written; ``limit`` blocks would have been a full one."""
        if batch.lane is not None or not self.of_leaving:
            self._nothing_goes = False
        if batch.lane is not None:
            batch.lane.succeeded(limit)
            self._dirty.tidy()
        if batch.others:
            self.of_marks.over()

    def show_mode(self, error: Exception | None) -> None:
        """Be HOST_ONLY, or no more."""
        # Some blocks wait for what cannot leave, though others are written: they must not fill the arena.
        self._host.dirty_evictable = self.failing or bool(self.of_leaving)
        if self.failing is self._host_only:
            return
        self._host_only = self.failing
        if self._host_only:
            log.error("event=host_only reason=%s", error)
        else:
            log.warning("event=disk_recovered")
        self._host.notify_room()

    def hurry(self) -> None:
        """The end is near: all is tried again at once, and then soon."""
        self._hurried = True
        for trouble in (self.of_marks, self.of_leaving, self.of_looking):
            trouble.hurry()
        for lane in self._dirty.lanes:
            lane.trouble.hurry()
