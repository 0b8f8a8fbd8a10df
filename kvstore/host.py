"""The HOST tier: which blocks lie in the arena, and bringing them there from DISK.

Owned by the store's event loop; only the bytes of a read move in a thread, into a slot
that is FILLING and so belongs to that read alone.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from kvstore.arena import Arena
from kvstore.disk import DiskTier, NewBlock, Stored
from kvstore.errors import BadPlace, CorruptBlock, DiskError
from kvstore.ghosts import Setback
from kvstore.hashing import ROOT
from kvstore.payloads import Place
from kvstore.prefix_index import NONE, BlockState, PrefixIndex
from kvstore.slots import SlotState
from kvstore.spaces import SpaceTable

log = logging.getLogger(__name__)


@dataclass(eq=False)
class _Read:
    """A read in flight. Each waiter's result is the slot, with a hold of its own."""

    waiters: list[asyncio.Future[int]] = field(default_factory=list)
    forsaken: bool = False  # its block was deleted: nobody gets what it brings


class HostTier:
    """Slots of the arena as a tier over the index and the disk."""

    def __init__(
        self, index: PrefixIndex, arena: Arena, disk: DiskTier, spaces: SpaceTable, counters: Counter[str]
    ) -> None:
        self._index = index
        self._arena = arena
        self._disk = disk
        self._spaces = spaces
        self._counters = counters
        self._reads: dict[int, _Read] = {}
        self._forsaken = 0  # reads in flight that are no longer among those
        self._wanted: Counter[int] = Counter()  # row -> loads that have yet to come to it
        self._tasks: set[asyncio.Task[None]] = set()
        self._queues: defaultdict[int, deque[tuple[int, asyncio.Future[int]]]] = defaultdict(deque)
        self._room: list[asyncio.Future[None]] = []
        self._threads = ThreadPoolExecutor(disk.readers, thread_name_prefix="latentkv-read")
        self.on_lost: Callable[[int], None] = lambda row: None  # a block left the store unwritten
        self.on_setback: Callable[[bytes, Setback], None] = lambda block, why: None  # before that
        self.on_corrupt: Callable[[int], None] = lambda row: None  # a block on disk must leave the store
        self.dirty_evictable = False  # HOST_ONLY: blocks may leave the arena unwritten

    @property
    def starved(self) -> bool:
        """Whether reads wait for a slot."""
        return any(self._queues.values())

    def take(self, row: int) -> int | None:
        """A FILLING slot with one hold, or None while the arena is full of blocks that must stay.

        Reads that wait for a slot go first.
        """
        return None if self._queues[self._slot_class(row)] else self._take(row)

    def _slot_class(self, row: int) -> int:
        return self._spaces.of(self._index.namespace[row]).slot_class

    def _take(self, row: int) -> int | None:
        taken = self._arena.take(
            self._slot_class(row), row, dirty=self.dirty_evictable, wanted=self._wanted.__contains__
        )
        if taken is None:
            return None
        for owner in taken.evicted:
            self._evicted(owner)
        return taken.slot

    def _evicted(self, row: int) -> None:
        self._counters["host_evicted_blocks"] += 1
        self._index.slot[row] = NONE
        if self._index.place[row] == NONE:
            if self.dirty_evictable:
                self._counters["host_lost_blocks"] += 1
                self.on_setback(self._index.hashes[row], Setback.UNWRITTEN)
            self._index.lose(row)
            self.on_lost(row)

    def notify_room(self) -> None:
        """A slot may have become free or evictable: serve the reads that wait, in their order.

        The order matters: if a later block of a load took the last slot, the load's next
        block would wait for it for ever.
        """
        for queue in self._queues.values():
            while queue:
                row, turn = queue[0]
                slot = None if turn.done() else self._take(row)
                if slot is None and not turn.done():
                    break
                queue.popleft()
                if slot is not None:
                    turn.set_result(slot)
        waiting, self._room = self._room, []
        for future in waiting:
            if not future.done():
                future.set_result(None)

    async def room(self) -> None:
        """Wait until holds or slots were given back."""
        future = asyncio.get_running_loop().create_future()
        self._room.append(future)
        await future

    def want(self, rows: Iterable[int]) -> None:
        """A load will come to these blocks: as far as they lie in the arena, others leave it first.

        So a load that follows another one, or comes back to a document, finds what is there.
        """
        self._wanted.update(rows)

    def unwant(self, rows: Iterable[int]) -> None:
        """Undo one ``want`` of each."""
        for row in rows:
            self._wanted[row] -= 1
            if not self._wanted[row]:
                del self._wanted[row]

    def hold(self, row: int) -> int | None:
        """The slot of a readable block in the arena, with a hold for the caller; None if it isn't there."""
        slot = self._index.slot[row]
        if slot == NONE or self._index.state[row] != BlockState.PRESENT:
            return None
        self._arena.hold(slot)
        self._arena.touch(slot)
        return slot

    def request(self, row: int) -> asyncio.Future[int]:
        """Read a block that is not in the arena: its slot, with a hold for the caller, once verified.

        Loads that ask for one block at the same time read it once. Fails with ``CorruptBlock``
        or ``DiskError``. A caller that does not want it any more hands it to ``give_up``.
        """
        waiter: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        if self._index.state[row] != BlockState.PRESENT:
            _fail(waiter, CorruptBlock("the block has left the store meanwhile"))
            return waiter
        read = self._reads.get(row)
        if read is None:
            read = self._reads[row] = _Read()
            self._start(row, read)
        read.waiters.append(waiter)
        return waiter

    def give_up(self, waiter: asyncio.Future[int]) -> None:
        """Undo a ``request``, whatever has become of it."""
        if not waiter.cancel() and not waiter.cancelled() and waiter.exception() is None:
            self._arena.unhold(waiter.result())

    def _start(self, row: int, read: _Read) -> None:
        # The row must stay while it is read, whatever becomes of the leases that asked.
        self._index.hold(row)
        # Taken here and not in the task, so that slots go to blocks in the order of the requests.
        slot = self.take(row)
        turn: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        if slot is None:
            self._queues[self._slot_class(row)].append((row, turn))
        else:
            turn.set_result(slot)
        task = asyncio.create_task(self._read(row, read, turn))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _read(self, row: int, read: _Read, turn: asyncio.Future[int]) -> None:
        try:
            slot = await turn
            error = None if read.forsaken else await self._read_into(row, slot)
            if read.forsaken:
                self._put_back(slot)
            elif error is None:
                self._filled(row, slot, read)
            else:
                self._failed(row, slot, read, error)
        finally:
            for waiter in read.waiters:
                waiter.cancel()  # unsettled only if the store closes
            if read.forsaken:
                self._forsaken -= 1
            else:
                del self._reads[row]
            self._index.unhold(row)
            self.notify_room()

    async def _read_into(self, row: int, slot: int) -> CorruptBlock | DiskError | None:
        index = self._index
        layout = self._spaces.of(index.namespace[row]).layout
        stored = Stored(
            Place(index.place[row], index.page[row]), index.length[row], index.codec[row], index.checksum[row]
        )
        try:
            await asyncio.get_running_loop().run_in_executor(
                self._threads, self._disk.read, layout, stored, self._arena.run(slot)
            )
        except (CorruptBlock, DiskError) as error:
            return error
        except Exception as error:  # a defect below costs a miss, and the slot is not lost
            log.exception("event=read_failed")
            return DiskError(f"unexpected {type(error).__name__}: {error}")
        return None

    def _filled(self, row: int, slot: int, read: _Read) -> None:
        self._index.slot[row] = slot
        self._arena.clean(slot)
        for waiter in read.waiters:
            if not waiter.done():
                self._arena.hold(slot)
                waiter.set_result(slot)
        self._arena.unhold(slot)
        self._counters["disk_read_blocks"] += 1

    def _failed(self, row: int, slot: int, read: _Read, error: CorruptBlock | DiskError) -> None:
        corrupt = isinstance(error, CorruptBlock)
        kind = "checksum_failures" if corrupt and not isinstance(error, BadPlace) else "read_errors"
        block = self._index.hashes[row][:6].hex()
        self._counters[kind] += 1
        log.warning("event=block_unreadable kind=%s block=%s reason=%s", kind, block, error)
        self._put_back(slot)
        if corrupt:
            # Here, once, while the read still keeps the row: a load that learns of it later
            # may find the row healed, or filled by another worker.
            self.on_corrupt(row)
        for waiter in read.waiters:
            if not waiter.done():
                _fail(waiter, error)

    def _put_back(self, slot: int) -> None:
        self._arena.abandon(slot)
        self._arena.unhold(slot)

    def forsake(self, row: int) -> None:
        """Nobody gets this block any more, though it may be being read: it is deleted."""
        read = self._reads.pop(row, None)
        if read is None:
            return
        read.forsaken = True
        self._forsaken += 1
        for waiter in read.waiters:
            if not waiter.done():
                _fail(waiter, CorruptBlock("the block was deleted meanwhile"))

    def new_block(self, row: int, slot: int) -> NewBlock:
        """A block of the arena as the disk takes it."""
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

    def drop_filling(self, row: int) -> None:
        """A block that was being filled will not come: its slot is free once nobody holds it."""
        slot = self._index.slot[row]
        self.on_setback(self._index.hashes[row], Setback.GIVEN_UP)
        self._index.lose(row)
        self._arena.abandon(slot)
        self.on_lost(row)

    def discard(self, row: int) -> None:
        """Take a block out of the arena because it leaves the store."""
        slot = self._index.slot[row]
        if slot != NONE and self._index.state[row] == BlockState.PRESENT:
            self._index.slot[row] = NONE
            self._arena.disown(slot)

    def is_loose(self, row: int) -> bool:
        """Whether a block is in memory only, and not meant for the disk; not if ``row`` is NONE."""
        return row != NONE and self._arena.state(self._index.slot[row]) is SlotState.LOOSE

    def reading(self) -> int:
        """Reads in flight or waiting for a slot."""
        return len(self._reads) + self._forsaken

    def is_reading(self, row: int) -> bool:
        """Whether this block is being read."""
        return row in self._reads

    async def close(self) -> None:
        """End the reads in flight and the threads. Slots that were being read are not used again."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.to_thread(self._threads.shutdown)


def _fail(waiter: asyncio.Future[int], error: CorruptBlock | DiskError) -> None:
    waiter.set_exception(error)
    waiter.exception()  # seen, even if nobody asks
