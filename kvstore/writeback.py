"""Write-behind: sealed blocks and unit marks go to disk in groups, behind the acknowledgement.

One task on the store's loop; the writing itself happens in one thread. While the disk
fails or has no room the store is HOST_ONLY: blocks may leave the arena unwritten, and
the writer tries again until the disk is back.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar, TypeVarTuple

from kvstore.arena import Arena, SlotState
from kvstore.catalog import UnitRecord
from kvstore.disk import DiskTier, Freed, NewBlock, Stored
from kvstore.errors import DiskError
from kvstore.eviction import TailEvictor
from kvstore.hashing import ROOT
from kvstore.host import HostTier
from kvstore.prefix_index import NONE, BlockState, PrefixIndex
from kvstore.settings import Policy
from kvstore.spaces import Space, SpaceTable
from kvstore.tickets import TicketDesk

log = logging.getLogger(__name__)

Args = TypeVarTuple("Args")
Result = TypeVar("Result")

RETRY_SECONDS = (0.5, 1.0, 2.0, 5.0)


def mark_of(row: int) -> int:
    """The key under which a ticket waits for a row's unit mark, beside the row for its block."""
    return ~row


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
        self._dirty: deque[int] = deque()
        self._marks: set[int] = set()  # rows on disk whose unit record is not
        self._uses: set[int] = set()  # rows whose unit record lacks a use; goes along with the next batch
        self._marking: set[int] = set()  # rows whose unit record is being written; each held
        self._freed: list[Freed] = []  # gone from the index, not yet from the disk
        self._suspect: set[int] = set()  # block sizes of which a payload was found damaged
        self._writing: dict[int, int] = {}  # row -> slot of the batch at work, both held
        self._work = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._closing = asyncio.Event()  # no more work comes
        self._stop = asyncio.Event()  # end, done or not
        self._failures = 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="latentkv-write")
        self._task: asyncio.Task[None] | None = None
        self.tickets = TicketDesk()
        self.used_bytes = 0

    @property
    def failing(self) -> bool:
        """Whether the last write failed, so that the store is HOST_ONLY."""
        return self._failures > 0

    @property
    def dirty_blocks(self) -> int:
        """Blocks that are readable and not on disk yet."""
        return len(self._dirty) + len(self._writing)

    def start(self) -> None:
        """Begin to write. What is too much goes first: the disk may have been given fewer bytes."""
        self._evict(lambda: self.used_bytes <= self._disk.capacity_bytes)
        self._task = asyncio.create_task(self._run())

    def block(self, row: int) -> None:
        """A block was sealed: write it."""
        # The hold keeps the row from being given to another block while it is queued.
        self._index.hold(row)
        self._dirty.append(row)
        self._wake()

    def unit(self, row: int) -> None:
        """A unit was marked. A block that is still to be written takes its mark along."""
        if self._index.place[row] != NONE or row in self._writing:
            self._marks.add(row)
            self._wake()

    def awaited(self, row: int) -> list[int]:
        """What a ticket for the unit that ends at this row has to wait for."""
        if self._index.place[row] == NONE:
            return [row, mark_of(row)]
        return [mark_of(row)] if row in self._marks or row in self._marking else []

    def unit_used(self, row: int) -> None:
        """A unit was hit; its record follows with the next batch."""
        if self._index.place[row] != NONE:
            self._uses.add(row)

    def free(self, row: int) -> None:
        """Drop a block from index and tiers; its place on disk is freed behind."""
        index = self._index
        if index.place[row] != NONE:
            block_bytes = self._space(row).block_bytes
            self._freed.append(Freed(index.hashes[row], block_bytes, index.place[row]))
            self.used_bytes -= self._disk.stored_bytes(block_bytes, index.length[row])
            self._wake()
        self._marks.discard(row)
        self._uses.discard(row)
        self._host.discard(row)
        index.lose(row)
        self.settle_lost(row)

    def corrupt(self, row: int) -> None:
        """A block on disk did not verify: it leaves, and those that are missing altogether will."""
        self._suspect.add(self._space(row).block_bytes)
        self.free(row)
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

    @property
    def _due(self) -> bool:
        return bool(self._dirty or self._marks or self._freed or self._suspect)

    async def _run(self) -> None:
        while not self._stop.is_set():
            await self._work.wait()
            self._work.clear()
            while self._due and not self._stop.is_set():
                await self._try_cycle()
            if not self._due:
                self._idle.set()

    async def _try_cycle(self) -> None:
        try:
            if await self._cycle():
                self._recovered()
            return
        except DiskError as error:
            self._failed(error)
        except Exception as error:  # a defect below must not end the writing for ever
            log.exception("event=write_failed")
            self._failed(error)
        await self._pause()

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
        for row in (*self._dirty, *self._marks):
            self.settle_lost(row)
        self._host.notify_room()

    async def _cycle(self) -> bool:
        """Free what left, then write one batch and the marks that are due; True if the disk did something."""
        batch = self._writing = self._take_batch()
        try:
            if batch:
                self._make_room(batch)
            dropped = await self._drop_freed()
            await self._drop_missing()
            return await self._write(batch) or dropped
        except BaseException:
            self._dirty.extendleft(reversed(batch))
            for row in batch:
                self._index.hold(row)
            raise
        finally:
            self._writing = {}
            for row, slot in batch.items():
                self._arena.unhold(slot)
                self._index.unhold(row)
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
            if row in batch or not self._is_dirty(row):
                # It left the arena while HOST_ONLY, and may have been sealed again since.
                self._dirty.popleft()
                if row not in batch:
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

    def _make_room(self, batch: dict[int, int]) -> None:
        block_bytes = self._space(next(iter(batch))).block_bytes
        need = len(batch) * self._disk.stored_bytes(block_bytes, block_bytes)
        limit = self._disk.limit_bytes(block_bytes)

        def enough() -> bool:
            return self.used_bytes + need <= limit

        if not self._evict(enough):
            raise DiskError(
                f"disk: {need} bytes do not fit into {limit} of which {self.used_bytes} are held by leases;"
                " raise disk_bytes"
            )

    def _evict(self, enough: Callable[[], bool]) -> bool:
        def drop(row: int) -> None:
            self._counters["disk_evicted_blocks"] += 1
            self.free(row)

        return self._evictor.evict(enough, drop)

    async def _drop_freed(self) -> bool:
        freed, self._freed = self._freed, []
        if not freed:
            return False
        try:
            await self.in_thread(self._disk.drop, freed)
        except BaseException:
            self._freed = freed + self._freed
            raise
        return True

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
                missing = await self.in_thread(self._disk.missing, size, list(rows))
            except BaseException:
                self._suspect.add(size)
                raise
            # A row may mean another block by now; and what is being read says itself how that ends.
            lost = [rows[place] for place in missing if index.place[rows[place]] == place]
            lost = [row for row in lost if self._space(row).block_bytes == size]
            lost = [row for row in lost if not self._host.is_reading(row)]
            for row in lost:
                self.free(row)
            if lost:
                self._counters["lost_payloads"] += len(lost)
                log.error("event=payloads_lost count=%d block_bytes=%d", len(lost), size)

    async def _write(self, batch: dict[int, int]) -> bool:
        marking = self._marking = self._take_marks(batch)
        if not batch and not marking:
            return False
        # Held, so that a row whose block is lost meanwhile is not given to another block.
        for row in marking:
            self._index.hold(row)
        try:
            layout = self._space(next(iter((*batch, *marking)))).layout
            blocks = [self._new_block(row, slot) for row, slot in batch.items()]
            units = [self._unit_record(row) for row in marking]
            stored = await self.in_thread(self._disk.write, layout, blocks, units)
            for (row, slot), at in zip(batch.items(), stored, strict=True):
                self._written(row, slot, at)
            for row in marking - self._marks:  # those that are there got another kind meanwhile
                self.tickets.settle(mark_of(row), durable=True)
        except BaseException:
            self._marks |= {row for row in marking if row not in batch and self._index.kinds[row]}
            raise
        finally:
            self._marking = set()
            for row in marking:
                self._index.unhold(row)
        self._counters["written_blocks"] += len(batch)
        return True

    def _take_marks(self, batch: dict[int, int]) -> set[int]:
        """Rows whose unit record can be written now: with its block, or because that is on disk."""
        rows = {*batch, *self._marks, *self._uses}
        self._marks.clear()
        self._uses.clear()
        index = self._index
        return {row for row in rows if index.kinds[row] and (row in batch or index.place[row] != NONE)}

    def _written(self, row: int, slot: int, at: Stored) -> None:
        index = self._index
        index.place[row], index.page[row] = at.place
        index.length[row] = at.length
        index.codec[row], index.checksum[row] = at.codec, at.checksum
        self.used_bytes += self._disk.stored_bytes(self._space(row).block_bytes, at.length)
        self._arena.clean(slot)
        self.tickets.settle(row, durable=True)

    def _new_block(self, row: int, slot: int) -> NewBlock:
        index = self._index
        parent = index.parent[row]
        return NewBlock(
            hash=index.hashes[row],
            parent=ROOT if parent == NONE else index.hashes[parent],
            namespace=index.namespace[row],
            depth=index.depth[row],
            used=index.used[row],
            data=self._arena.run(slot),
        )

    def _unit_record(self, row: int) -> UnitRecord:
        index = self._index
        use = index.units[row]
        return UnitRecord(
            hash=index.hashes[row],
            namespace=index.namespace[row],
            tokens=index.depth[row] * self._space(row).layout.block_tokens,
            kinds=index.kinds[row],
            created=use.created,
            used=use.used,
            hits=use.hits,
        )

    async def in_thread(self, work: Callable[[*Args], Result], *args: *Args) -> Result:
        """Run blocking work on the disk in the one thread that writes."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *args)

    async def close(self, seconds: float) -> bool:
        """Write what is dirty, at most for ``seconds``; True if all of it is durable."""
        if self._uses:
            self._marks |= self._uses
            self._wake()
        self._closing.set()
        try:
            await asyncio.wait_for(self._idle.wait(), seconds)
        except TimeoutError:
            log.error("event=drain_incomplete dirty_blocks=%d", self.dirty_blocks)
        self._stop.set()
        self._wake()
        if self._task is not None:
            await self._task  # not cancelled: a thread may be reading the slots of a batch
        await asyncio.to_thread(self._thread.shutdown)
        self.tickets.settle_all()
        return not self._due
