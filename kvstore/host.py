"""The HOST tier: which blocks lie in the arena, and bringing them there from DISK.

Owned by the store's event loop; only the bytes of a read move in a thread, into a slot
that is FILLING and so belongs to that read alone.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from kvstore.arena import Arena
from kvstore.disk import DiskTier, Stored
from kvstore.errors import CorruptBlock, DiskError
from kvstore.prefix_index import NONE, BlockState, PrefixIndex
from kvstore.spaces import SpaceTable

log = logging.getLogger(__name__)


@dataclass(eq=False)
class _Read:
    """A read in flight that several loads may wait for; each waiter gets a hold of the slot."""

    done: asyncio.Future[int]
    waiters: int = 0


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
        self._tasks: set[asyncio.Task[None]] = set()
        self._queues: defaultdict[int, deque[tuple[int, asyncio.Future[int]]]] = defaultdict(deque)
        self._room: list[asyncio.Future[None]] = []
        self._threads = ThreadPoolExecutor(disk.readers, thread_name_prefix="latentkv-read")
        self.on_lost: Callable[[int], None] = lambda row: None  # a block left the store unwritten
        self.dirty_evictable = False  # HOST_ONLY: blocks may leave the arena unwritten

    def take(self, row: int) -> int | None:
        """A FILLING slot with one hold, or None while the arena is full of blocks that must stay.

        Reads that wait for a slot go first.
        """
        return None if self._queues[self._slot_class(row)] else self._take(row)

    def _slot_class(self, row: int) -> int:
        return self._spaces.of(self._index.namespace[row]).slot_class

    def _take(self, row: int) -> int | None:
        taken = self._arena.take(self._slot_class(row), row, dirty=self.dirty_evictable)
        if taken is None:
            return None
        for owner in taken.evicted:
            self._evicted(owner)
        return taken.slot

    def _evicted(self, row: int) -> None:
        self._counters["host_evicted_blocks"] += 1
        self._index.slot[row] = NONE
        if self._index.place[row] == NONE:
            self._counters["host_lost_blocks"] += 1
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

    async def _take_when_free(self, row: int) -> int:
        slot = self.take(row)
        if slot is not None:
            return slot
        turn: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._queues[self._slot_class(row)].append((row, turn))
        return await turn

    def hold(self, row: int) -> int | None:
        """The slot of a block in the arena, with a hold for the caller; None if it isn't there."""
        slot = self._index.slot[row]
        if slot == NONE:
            return None
        self._arena.hold(slot)
        self._arena.touch(slot)
        return slot

    async def fetch(self, row: int) -> int:
        """A slot that has the block's verified bytes, with a hold for the caller.

        Loads that ask for one block at the same time read it once. Raises ``CorruptBlock``
        or ``DiskError``. Cancelling a fetch gives its hold back.
        """
        slot = self.hold(row)
        if slot is not None:
            return slot
        read = self._reads.get(row) or self._start(row)
        read.waiters += 1
        try:
            return await asyncio.shield(read.done)
        except asyncio.CancelledError:
            if read.done.done() and not read.done.cancelled() and read.done.exception() is None:
                self._arena.unhold(read.done.result())
            else:
                read.waiters -= 1
            raise

    def _start(self, row: int) -> _Read:
        read = self._reads[row] = _Read(asyncio.get_running_loop().create_future())
        # The row must stay while it is read, whatever becomes of the leases that asked.
        self._index.hold(row)
        task = asyncio.create_task(self._read(row, read))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return read

    async def _read(self, row: int, read: _Read) -> None:
        try:
            slot = await self._take_when_free(row)
            try:
                await self._read_into(row, slot)
            except (CorruptBlock, DiskError) as error:
                self._arena.abandon(slot)
                self._arena.unhold(slot)
                self._failed(row, error)
                raise
            self._filled(row, slot, read.waiters)
            read.done.set_result(slot)
        except (CorruptBlock, DiskError) as error:
            read.done.set_exception(error)
            read.done.exception()  # seen, even when every waiter has gone
        finally:
            read.done.cancel()
            del self._reads[row]
            self._index.unhold(row)
            self.notify_room()

    async def _read_into(self, row: int, slot: int) -> None:
        index = self._index
        layout = self._spaces.of(index.namespace[row]).layout
        stored = Stored(index.place[row], index.length[row], index.codec[row], index.checksum[row])
        await asyncio.get_running_loop().run_in_executor(
            self._threads, self._disk.read, layout, stored, self._arena.view(slot)
        )

    def _filled(self, row: int, slot: int, waiters: int) -> None:
        self._index.slot[row] = slot
        self._arena.clean(slot)
        for _ in range(waiters):
            self._arena.hold(slot)
        self._arena.unhold(slot)
        self._counters["disk_read_blocks"] += 1

    def _failed(self, row: int, error: CorruptBlock | DiskError) -> None:
        kind = "checksum_failures" if isinstance(error, CorruptBlock) else "read_errors"
        self._counters[kind] += 1
        log.warning(
            "event=block_unreadable kind=%s block=%s reason=%s",
            kind,
            self._index.hashes[row][:6].hex(),
            error,
        )

    def drop_filling(self, row: int) -> None:
        """A block that was being filled will not come: its slot is free once nobody holds it."""
        slot = self._index.slot[row]
        self._index.lose(row)
        self._arena.abandon(slot)
        self.on_lost(row)

    def discard(self, row: int) -> None:
        """Take a block out of the arena because it leaves the store."""
        slot = self._index.slot[row]
        if slot != NONE and self._index.state[row] == BlockState.PRESENT:
            self._index.slot[row] = NONE
            self._arena.disown(slot)

    async def close(self) -> None:
        """Wait for reads in flight and end the threads."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._threads.shutdown(wait=True)
