"""A Load: blocks of a chain, announced in order as they become readable.

A window of reads runs ahead of the announcements. Slots that were announced count
against the worker's quota until it gives them back, so a document passes through an
arena smaller than itself.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence

import xxhash

from kvstore.arena import Arena
from kvstore.errors import CorruptBlock, DiskError, InvalidArgument
from kvstore.host import HostTier
from kvstore.leases import Lease, LeaseTable

WINDOW = 16  # blocks read ahead of the announcements
BATCH = 64  # blocks in one announcement


class LoadStream:
    """One lease over ``hashes[first:]``. ``next`` and ``close`` must not run at the same time.

    ``short`` is None, or the number of leading hashes that are usable when it is less
    than was asked for; the stream ends there.
    """

    def __init__(
        self,
        lease: Lease,
        rows: Sequence[int],
        first: int,
        *,
        asked: int,
        leases: LeaseTable,
        host: HostTier,
        arena: Arena,
        quota_bytes: int,
        on_unreadable: Callable[[int], None],
        on_end: Callable[[Lease], None],
    ) -> None:
        self._lease = lease
        self._rows = rows
        self._next = first  # the next block to be read
        self._leases = leases
        self._host = host
        self._arena = arena
        self._quota = quota_bytes
        self._on_unreadable = on_unreadable
        self._on_end = on_end
        self._ahead: deque[tuple[int, int | asyncio.Task[int]]] = deque()  # in order of index
        self._slots: dict[int, int] = {}  # index -> slot, announced and not given back
        self._closed = False
        self.short: int | None = len(rows) if len(rows) < asked else None

    @property
    def lease(self) -> int:
        """Id of the lease, for ``release`` after a broken stream."""
        return self._lease.id

    @property
    def block_bytes(self) -> int:
        """Bytes of each block."""
        return self._lease.block_bytes

    async def next(self) -> list[tuple[int, int]]:
        """The next readable blocks as (index, offset in the arena); empty at the end.

        Waits for the disk, and for credits while the worker's quota is used up.
        """
        self._top_up()
        while not self._ahead:
            if self._closed or self._lease.expired or self._next >= len(self._rows):
                return self._finish()
            await self._host.room()
            self._top_up()
        index, item = self._ahead[0]
        if isinstance(item, asyncio.Task):
            await asyncio.wait({item})
        return self._announce() or self._fail(index)

    def _finish(self) -> list[tuple[int, int]]:
        if self._next < len(self._rows):
            self.short = self._next
        return []

    def _top_up(self) -> None:
        while len(self._ahead) < WINDOW and self._next < len(self._rows) and self._may_hold_more():
            row = self._rows[self._next]
            slot = self._host.hold(row)
            self._ahead.append(
                (self._next, asyncio.create_task(self._host.fetch(row)) if slot is None else slot)
            )
            self._next += 1

    def _may_hold_more(self) -> bool:
        if self._closed or self._lease.expired:
            return False
        held = self._lease.holder.held_bytes + len(self._ahead) * self._lease.block_bytes
        # One block is always allowed, however small the arena is.
        return not held or held + self._lease.block_bytes <= self._quota

    def _announce(self) -> list[tuple[int, int]]:
        batch: list[tuple[int, int]] = []
        while self._ahead and len(batch) < BATCH:
            index, item = self._ahead[0]
            slot = _ready_slot(item)
            if slot is None:
                break
            self._ahead.popleft()
            self._leases.keep_slot(self._lease, slot, held=True)
            self._slots[index] = slot
            batch.append((index, self._arena.offset(slot)))
        if batch:
            self._leases.renew(self._lease, time.monotonic())
        return batch

    def _fail(self, index: int) -> list[tuple[int, int]]:
        """The head of the window is unreadable: the hit ends before it."""
        _, item = self._ahead.popleft()
        if isinstance(item, asyncio.Task) and not item.cancelled():
            error = item.exception()
            if isinstance(error, CorruptBlock):
                self._on_unreadable(self._rows[index])
            elif error is not None and not isinstance(error, DiskError):
                raise error
        self._drop_window()
        self._next = len(self._rows)
        self.short = index
        return []

    def give_back(self, indices: Sequence[int]) -> None:
        """The worker is done with these announced blocks. Raises ``InvalidArgument`` for others."""
        for index in indices:
            slot = self._slots.pop(index, None)
            if slot is None:
                raise InvalidArgument(f"block {index} was not announced by this load, or is returned already")
            self._leases.drop_slot(self._lease, slot)
        self._leases.renew(self._lease, time.monotonic())
        self._host.notify_room()

    def view(self, index: int) -> memoryview:
        """Bytes of an announced block that was not given back."""
        return self._arena.view(self._slots[index])

    def checksum(self, index: int) -> int:
        """xxh3-64 of an announced block."""
        return xxhash.xxh3_64_intdigest(self.view(index))

    def _drop_window(self) -> None:
        window, self._ahead = self._ahead, deque()
        for _, item in window:
            if isinstance(item, asyncio.Task):
                item.cancel()
                item.add_done_callback(self._drop_late)
            else:
                self._arena.unhold(item)

    def _drop_late(self, task: asyncio.Task[int]) -> None:
        slot = _ready_slot(task)
        if slot is not None:
            self._arena.unhold(slot)
        self._host.notify_room()

    def close(self, *, returned: bool) -> None:
        """End the lease.

        ``returned`` says that the worker touches no slot any more. If the stream broke
        instead, a worker that maps the arena keeps what was announced to it until it
        releases the lease or dies.
        """
        if self._closed:
            return
        self._closed = True
        self._drop_window()
        if returned or not self._lease.holder.mapped or not self._slots:
            self._on_end(self._lease)
        else:
            self._leases.drop_rows(self._lease)
        self._slots.clear()
        self._host.notify_room()


def _ready_slot(item: int | asyncio.Task[int]) -> int | None:
    if not isinstance(item, asyncio.Task):
        return item
    if not item.done() or item.cancelled() or item.exception() is not None:
        return None
    return item.result()
