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
from collections.abc import Callable, Collection

from kvstore.arena import Arena, SlotState
from kvstore.disk import DiskTier, Freed, Stored
from kvstore.errors import DiskError
from kvstore.eviction import TailEvictor
from kvstore.host import HostTier
from kvstore.lull import Lull
from kvstore.marks import UnitMarks, mark_of
from kvstore.namespace import Namespace
from kvstore.observer import Departure
from kvstore.pipeline import Batch, Pipeline
from kvstore.prefix_index import NONE, BlockState, PrefixIndex
from kvstore.settings import Policy
from kvstore.spaces import Space, SpaceTable
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
        policy: Policy,
    ) -> None:
        self._index = index
        self._arena = arena
        self._host = host
        self._disk = disk
        self._spaces = spaces
        self._counters = counters
        self._evictor = TailEvictor(index, policy)
        self._pipeline = Pipeline(disk, self._wake)
        self._lull = Lull(arena.nbytes // 2, self._wake)
        # A dirty block's row is in one of three places, held: queued, under way, or returned.
        self._dirty: deque[int] = deque()  # parents before children
        # Those of batches that failed are queued again, in order, once none is under way.
        self._returned: list[int] = []
        self._marks = UnitMarks(index, spaces)
        self._freed: list[Freed] = []  # gone from the index, not yet from the disk
        self._suspect: set[int] = set()  # block sizes of which a payload was found damaged
        self._work = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._closing = asyncio.Event()  # no more work comes
        self._stop = asyncio.Event()  # end, done or not
        self._error: Exception | None = None  # of a batch; nothing new begins until it is dealt with
        self._failures = 0
        self._carriers: set[asyncio.Task[None]] = set()  # one for each batch under way
        self._task: asyncio.Task[None] | None = None
        self.tickets = TicketDesk()
        self.used_bytes = 0
        self.on_left: Callable[[int, Departure], None] = lambda row, why: None  # a block leaves the disk

    @property
    def failing(self) -> bool:
        """Whether the last write failed, so that the store is HOST_ONLY."""
        return self._failures > 0

    @property
    def dirty_blocks(self) -> int:
        """Blocks that are readable and not on disk yet."""
        return len(self._dirty) + self._pipeline.rows + len(self._returned)

    def start(self) -> None:
        """Begin to write. What is too much goes first: the disk may have been given fewer bytes."""
        self._evict(lambda: self.used_bytes <= self._disk.capacity_bytes)
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

    def free(self, row: int, why: Departure) -> None:
        """Drop a block from index and tiers; its place on disk is freed behind."""
        index = self._index
        if index.place[row] != NONE:
            block_bytes = self._space(row).block_bytes
            self.on_left(row, why)
            self._freed.append(Freed(index.hashes[row], block_bytes, index.place[row]))
            self.used_bytes -= self._disk.stored_bytes(block_bytes, index.length[row])
            self._wake()
        self._marks.drop(row)
        self._host.discard(row)
        index.lose(row)
        self.settle_lost(row)

    def corrupt(self, row: int) -> None:
        """A block on disk did not verify: it leaves, and those that are missing altogether will."""
        self._suspect.add(self._space(row).block_bytes)
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

    async def add_namespace(self, namespace: Namespace) -> tuple[int, bytes]:
        """Id and digest of a namespace, catalogued. Raises ``DiskError``."""
        return await self._pipeline.add_namespace(namespace)

    @property
    def _due(self) -> bool:
        return bool(self._dirty or self._marks or self._freed or self._suspect)

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
        return bool(self._dirty or self._freed or self._suspect or not self._pipeline.batches)

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
        rows = self._take_batch()
        need = self._disk_bytes(rows)
        if not self._make_room(rows, need):
            self._release(rows, again=True)
            self._dirty.extendleft(reversed(rows))
            if not self._pipeline.batches:
                self._error = DiskError(
                    f"disk: {need} more bytes do not fit beside {self.used_bytes} that are held by leases;"
                    " raise disk_bytes"
                )
            return False
        layout = self._space(next(iter(rows))).layout if rows else None
        blocks = [self._host.new_block(row, slot) for row, slot in rows.items()]
        batch = Batch(rows, layout, blocks, need, self._freed)
        self._freed = []
        self._pipeline.enter(batch)
        carrier = asyncio.create_task(self._carry(batch))
        self._carriers.add(carrier)
        carrier.add_done_callback(self._carriers.discard)
        return True

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
            self._freed = batch.freed + self._freed
        self._pipeline.leave(batch, failed=error is not None)
        self._host.notify_room()
        self._wake()

    def _release(self, rows: dict[int, int], *, again: bool) -> None:
        for row, slot in rows.items():
            self._arena.unhold(slot)
            if not again:
                self._index.unhold(row)

    async def _write(self, batch: Batch) -> bool:
        """True if the disk did something."""
        busy = bool(batch.rows or batch.freed)
        await self._drop_missing()
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
        # Whoever waits for durability learns now that it can't be had.
        for row in (*self._dirty, *self._marks.made()):
            self.settle_lost(row)
        self._host.notify_room()

    def _is_dirty(self, row: int) -> bool:
        slot = self._index.slot[row]
        return (
            self._index.state[row] == BlockState.PRESENT
            and slot != NONE
            and self._arena.state(slot) == SlotState.DIRTY
        )

    def _take_batch(self) -> dict[int, int]:
        """The next dirty blocks of one layout, in order of commit: row -> slot, both held."""
        batch: dict[int, int] = {}
        layout = None
        while self._dirty:
            row = self._dirty[0]
            taken = row in batch or self._pipeline.carries(row)
            if taken or not self._is_dirty(row):
                # It left the arena while HOST_ONLY, and may have been sealed again since.
                self._dirty.popleft()
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

    def _disk_bytes(self, rows: Collection[int]) -> int:
        """What a batch's blocks take of the disk at most."""
        return sum(
            self._disk.stored_bytes(size, size) for size in (self._space(row).block_bytes for row in rows)
        )

    def _make_room(self, rows: dict[int, int], need: int) -> bool:
        if not rows:
            return True
        limit = self._disk.limit_bytes(self._space(next(iter(rows))).block_bytes)
        return self._evict(lambda: self.used_bytes + self._pipeline.nbytes + need <= limit)

    def _evict(self, enough: Callable[[], bool]) -> bool:
        def drop(row: int) -> None:
            self._counters["disk_evicted_blocks"] += 1
            self.free(row, Departure.CAPACITY)

        return self._evictor.evict(enough, drop)

    async def _drop_missing(self) -> None:
        """With one payload its whole file may be gone: better known now than block by block."""
        while self._suspect:
            size = self._suspect.pop()
            index = self._index
            rows = {
                index.place[row]: row
                for row in index
                if index.place[row] != NONE and self._space(row).block_bytes == size
            }
            try:
                missing = await self._pipeline.missing(size, list(rows))
            except BaseException:
                self._suspect.add(size)
                raise
            # A row may mean another block by now; and what is being read says itself how that ends.
            lost = [rows[place] for place in missing if index.place[rows[place]] == place]
            lost = [row for row in lost if self._space(row).block_bytes == size]
            lost = [row for row in lost if not self._host.is_reading(row)]
            for row in lost:
                self.free(row, Departure.LOST)
            if lost:
                self._counters["lost_payloads"] += len(lost)
                log.error("event=payloads_lost count=%d block_bytes=%d", len(lost), size)

    def _written(self, row: int, slot: int, at: Stored) -> None:
        index = self._index
        index.place[row], index.page[row] = at.place
        index.length[row] = at.length
        index.codec[row], index.checksum[row] = at.codec, at.checksum
        self.used_bytes += self._disk.stored_bytes(self._space(row).block_bytes, at.length)
        self._arena.clean(slot)
        self.tickets.settle(row, durable=True)

    async def close(self, seconds: float) -> bool:
        """Write what is dirty, at most for ``seconds``; True if all of it is durable."""
        if self._marks.hurry_uses():
            self._wake()
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
        return not self._due
