"""Write-behind: sealed blocks and unit marks go to disk in groups, behind the acknowledgement.

What goes is decided on the store's loop; the pipeline's threads take it to the disk. While the
disk fails or has no room the store is HOST_ONLY: blocks may leave the arena unwritten, and the
writer tries again until the disk is back.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter, deque
from collections.abc import Callable

from kvstore.arena import Arena
from kvstore.disk import DiskTier, Freed, Stored
from kvstore.errors import DiskError
from kvstore.host import HostTier
from kvstore.leaving import Leaving
from kvstore.lull import Lull
from kvstore.marks import UnitMarks, mark_of
from kvstore.observer import Departure
from kvstore.pipeline import Args, Batch, Pipeline, Result
from kvstore.prefix_index import NONE, BlockState, PrefixIndex
from kvstore.room import Room
from kvstore.settings import StoreSettings
from kvstore.slots import SlotState
from kvstore.spaces import Space, SpaceTable
from kvstore.suspects import Suspects
from kvstore.tickets import TicketDesk

log = logging.getLogger(__name__)

RETRY_SECONDS = (0.5, 1.0, 2.0, 5.0)


class Writer:
    """Moves DIRTY blocks to disk and keeps the disk within its capacity."""

    def __init__(
        self,
        index: PrefixIndex,
        arena: Arena,
        host: HostTier,
        disk: DiskTier,
        spaces: SpaceTable,
        counters: Counter[str],
        *,
        settings: StoreSettings,
    ) -> None:
        self._index = index
        self._arena = arena
        self._host = host
        self._disk = disk
        self._spaces = spaces
        self._counters = counters
        self._pipeline = Pipeline(disk, self._wake)
        self._lull = Lull(arena.nbytes * 3 // 8, self._wake)
        # A dirty block's row is in one of three places, held: queued, under way, or returned.
        self._dirty: deque[int] = deque()  # parents before children
        # Those of batches that failed are queued again, in order, once none is under way.
        self._returned: list[int] = []
        self._marks = UnitMarks(index, spaces)
        self._leaving = Leaving()  # gone from the index, not yet from the disk
        self._suspects = Suspects(
            index, host, spaces, self._pipeline, counters, lambda row: self.free(row, Departure.LOST)
        )
        self._work = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._closing = asyncio.Event()  # no more work comes
        self._stop = asyncio.Event()  # end, done or not
        self._error: Exception | None = None  # of a batch; nothing new begins until it is dealt with
        self._failures = 0
        self._carriers: set[asyncio.Task[None]] = set()  # one for each batch under way
        self._ended = asyncio.Event()  # set, and replaced, with the end of each batch
        self._task: asyncio.Task[None] | None = None
        self.tickets = TicketDesk()
        self.room = Room(index, disk, spaces, settings, self._evict)
        self.on_left: Callable[[int, Departure], None] = lambda row, why: None  # a block leaves the store

    @property
    def failing(self) -> bool:
        """Whether the last write failed, so that the store is HOST_ONLY."""
        return self._failures > 0

    @property
    def dirty_blocks(self) -> int:
        """Blocks that are readable and not on disk yet."""
        return len(self._dirty) + self._pipeline.rows + len(self._returned)

    def start(self) -> None:
        """Begin to write. What is too much goes first."""
        self.room.keep_within()
        self._task = asyncio.create_task(self._run())

    def block(self, row: int) -> None:
        """A block was sealed: write it."""
        # The hold keeps the row from being given to another block while it is queued.
        self._index.hold(row)
        self._dirty.append(row)
        self._lull.note()
        self._wake()

    def hurry(self) -> None:
        """Somebody waits for what is dirty to be on disk."""
        self._lull.hurry()

    def unit(self, row: int) -> None:
        """A unit was marked. A block that is still to be written takes its mark along."""
        if self._index.place[row] != NONE or self._pipeline.carries(row):
            self._marks.make(row)
            self._wake()

    def awaited(self, row: int) -> list[int]:
        """What a ticket for the unit that ends at this row has to wait for."""
        if self._index.place[row] == NONE:
            return [row, mark_of(row)]
        return [mark_of(row)] if self._marks.pending(row) else []

    def unit_used(self, row: int) -> None:
        """A unit was hit; its record follows with the next batch."""
        if self._index.place[row] != NONE:
            self._marks.use(row)

    def keep_uses(self) -> None:
        """Write down which units were used since they were last on disk."""
        if self._marks.hurry_uses():
            self._wake()

    def free(self, row: int, why: Departure) -> None:
        """Drop a block from index and tiers; its place on disk is freed behind."""
        index = self._index
        if index.state[row] == BlockState.PRESENT:
            self.on_left(row, why)
        if index.place[row] != NONE:
            block_bytes = self._space(row).block_bytes
            self._leaving.freed.append(Freed(index.hashes[row], block_bytes, index.place[row]))
            self.room.leave(row)
            self._wake()
        self._marks.drop(row)
        self._host.discard(row)
        index.lose(row)
        self.settle_lost(row)

    def unmark(self, row: int) -> None:
        """No unit ends at this row any more; its record leaves the disk behind."""
        index = self._index
        self._leaving.freed.append(Freed(index.hashes[row], self._space(row).block_bytes, None))
        self._marks.drop(row)
        index.unmark(row)
        self.tickets.settle(mark_of(row), durable=False)
        self._wake()

    def gone(self) -> asyncio.Future[None]:
        """Done once all that was freed so far has left the disk; cancelled if the store closes before."""
        return self._leaving.gone()

    def under_way(self) -> list[Batch]:
        """The batches that are on their way to the disk."""
        return list(self._pipeline.batches)

    def carries(self, row: int) -> bool:
        """Whether this row's block or mark is on its way to the disk right now."""
        return self._pipeline.carries(row) or self._marks.writing(row)

    async def batch_ended(self) -> None:
        """Wait until one of the batches that are under way has ended."""
        if self._pipeline.batches:
            await self._ended.wait()

    def corrupt(self, row: int) -> None:
        """A block on disk did not verify: it leaves, and those that are missing altogether will."""
        self._suspects.add(self._space(row).block_bytes)
        self.free(row, Departure.CORRUPT)
        self._wake()

    def settle_lost(self, row: int) -> None:
        """A block or a mark will not become durable."""
        self.tickets.settle(row, durable=False)
        self.tickets.settle(mark_of(row), durable=False)

    def _space(self, row: int) -> Space:
        return self._spaces.of(self._index.namespace[row])

    def _wake(self) -> None:
        self._idle.clear()
        self._work.set()

    async def record(self, work: Callable[[*Args], Result], *args: *Args) -> Result:
        """Run some work on the catalogue in the one thread that touches it. Raises what it raises."""
        return await self._pipeline.record(work, *args)

    @property
    def _due(self) -> bool:
        return bool(self._dirty or self._marks or self._leaving or self._suspects)

    @property
    def _may_begin(self) -> bool:
        """Whether the next batch should set out now.

        While one is being written only a full one does: what comes meanwhile makes it larger. And
        marks alone do not, for they go along with a batch that is on its way.
        """
        if not self._due or self._error or self._stop.is_set() or self._pipeline.full:
            return False
        if not self._lull.come(len(self._dirty) * self._next_bytes):
            return False
        if self._pipeline.writing:
            return bool(self._dirty) and len(self._dirty) >= self._disk.batch_blocks(self._next_bytes)
        return bool(self._dirty or self._leaving or self._suspects or not self._pipeline.batches)

    @property
    def _next_bytes(self) -> int:
        """Size of the block that is first in the queue; 0 if there is none."""
        return self._space(self._dirty[0]).block_bytes if self._dirty else 0

    async def _run(self) -> None:
        while not (self._stop.is_set() and not self._pipeline.batches):
            await self._work.wait()
            self._work.clear()
            while self._may_begin and self._begin():
                pass
            if not self._pipeline.batches:
                await self._settle_failure()
                if not self._due:
                    self._idle.set()

    async def _settle_failure(self) -> None:
        self._dirty.extendleft(reversed(self._returned))
        self._returned.clear()
        if self._error is not None:
            self._failed(self._error)
            await self._pause()
            self._error = None
            self._wake()

    def _begin(self) -> bool:
        """Send the next batch on its way; False if that has to wait for those under way."""
        rows = self._within_quota(self._take_batch())
        need = self.room.need(rows)
        if rows and not self.room.make(
            self._space(next(iter(rows))).block_bytes, self._pipeline.nbytes + need
        ):
            self._release(rows, again=True)
            self._dirty.extendleft(reversed(rows))
            if not self._pipeline.batches:
                self._error = DiskError(
                    f"disk: {need} more bytes do not fit beside {self.room.used_bytes} that are held by"
                    " leases and pins; raise disk_bytes"
                )
            return False
        layout = self._space(next(iter(rows))).layout if rows else None
        blocks = [self._host.new_block(row, slot) for row, slot in rows.items()]
        batch = Batch(rows, layout, blocks, need, self._leaving.take())
        self._pipeline.enter(batch)
        carrier = asyncio.create_task(self._carry(batch))
        self._carriers.add(carrier)
        carrier.add_done_callback(self._carriers.discard)
        return True

    def _within_quota(self, rows: dict[int, int]) -> dict[int, int]:
        """Those of a batch's rows for which their tenants have room. The rest stay in memory only."""
        beyond = set(self.room.beyond_quota(rows, self._pipeline.carried()))
        for row in rows:
            if row in beyond or self._host.is_loose(self._index.parent[row]):
                self._decline(row, rows[row])
        return {row: slot for row, slot in rows.items() if self._arena.state(slot) is SlotState.DIRTY}

    def _decline(self, row: int, slot: int) -> None:
        self._counters["quota_declined_blocks"] += 1
        self._arena.loosen(slot)
        self._release({row: slot}, again=False)
        self.settle_lost(row)

    async def _carry(self, batch: Batch) -> None:
        """Take a batch to the disk. Whatever fails, it ends and what it held is queued again."""
        error: Exception | None = None
        try:
            if await self._write(batch):
                self._recovered()
        except DiskError as failure:
            error = failure
        except Exception as failure:  # a defect below must not end the writing for ever
            log.exception("event=write_failed")
            error = failure
        self._release(batch.rows, again=error is not None)
        if error is not None:
            self._error = self._error or error
            self._returned += batch.rows
            self._leaving.put_back(batch.leaving)
        self._pipeline.leave(batch, failed=error is not None)
        self._ended.set()
        self._ended = asyncio.Event()
        self._host.notify_room()
        self._wake()

    def _release(self, rows: dict[int, int], *, again: bool) -> None:
        for row, slot in rows.items():
            self._arena.unhold(slot)
            if not again:
                self._index.unhold(row)

    async def _write(self, batch: Batch) -> bool:
        """True if the disk did something."""
        busy = bool(batch.rows or batch.leaving)
        await self._suspects.look()
        stored = await self._pipeline.place(batch)
        units = self._marks.take(batch.rows)
        durable = False
        try:
            await self._pipeline.name(batch, stored, units)
            durable = True
            for (row, slot), at in zip(batch.rows.items(), stored, strict=True):
                self._written(row, slot, at)
        finally:
            for row in self._marks.end(batch.rows, durable=durable):
                self.tickets.settle(mark_of(row), durable=True)
        self._counters["written_blocks"] += len(batch.rows)
        return busy or bool(units)

    async def _pause(self) -> None:
        delay, cut_short = RETRY_SECONDS[min(self._failures, len(RETRY_SECONDS)) - 1], self._closing
        if self._closing.is_set():
            delay, cut_short = RETRY_SECONDS[0], self._stop
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(cut_short.wait(), delay)

    def _recovered(self) -> None:
        if self._failures:
            self._failures = 0
            self._host.dirty_evictable = False
            log.warning("event=disk_recovered")

    def _failed(self, error: Exception) -> None:
        if not self._failures:
            log.error("event=host_only reason=%s", error)
        self._failures += 1
        self._counters["write_failures"] += 1
        self._host.dirty_evictable = True
        for row in (*self._dirty, *self._marks.made()):
            self.settle_lost(row)
        self._host.notify_room()

    def _is_dirty(self, row: int) -> bool:
        present = self._index.state[row] == BlockState.PRESENT
        return present and self._arena.state(self._index.slot[row]) is SlotState.DIRTY

    def _take_batch(self) -> dict[int, int]:
        """The next dirty blocks of one layout, in order of commit: row -> slot, both held."""
        batch: dict[int, int] = {}
        layout = None
        while self._dirty:
            row = self._dirty[0]
            taken = row in batch or self._pipeline.carries(row)
            if taken or not self._is_dirty(row):
                self._dirty.popleft()  # it left the arena while HOST_ONLY, and may have been sealed again
                if not taken:
                    self.settle_lost(row)
                self._index.unhold(row)
                continue
            layout = layout or self._space(row).layout
            if layout != self._space(row).layout or len(batch) >= self._disk.batch_blocks(layout.block_bytes):
                break
            self._dirty.popleft()
            batch[row] = self._index.slot[row]
            self._arena.hold(batch[row])
        return batch

    def _evict(self, row: int) -> None:
        self._counters["disk_evicted_blocks"] += 1
        self.free(row, Departure.CAPACITY)

    def _written(self, row: int, slot: int, at: Stored) -> None:
        index = self._index
        index.place[row], index.page[row] = at.place
        index.length[row] = at.length
        index.codec[row], index.checksum[row] = at.codec, at.checksum
        self.room.enter(row)
        self._arena.clean(slot)
        self.tickets.settle(row, durable=True)

    async def close(self, seconds: float) -> bool:
        """Write what is dirty, at most for ``seconds``; True if all of it is durable."""
        self.keep_uses()
        self._closing.set()
        self._lull.close()
        try:
            await asyncio.wait_for(self._idle.wait(), seconds)
        except TimeoutError:
            log.error("event=drain_incomplete dirty_blocks=%d", self.dirty_blocks)
        self._stop.set()
        self._wake()
        if self._task is not None:
            await self._task  # not cancelled: a thread may be reading the slots of a batch
        await self._pipeline.close()
        self.tickets.settle_all()
        self._leaving.cancel()
        return not self._due
