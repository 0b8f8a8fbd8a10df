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
from dataclasses import dataclass

import xxhash

from kvstore.arena import Arena
from kvstore.errors import InvalidArgument, LeaseUnknown
from kvstore.host import HostTier
from kvstore.leases import Lease, LeaseTable
from kvstore.readers import Counting, Reader

WINDOW = 16  # blocks read ahead of the announcements
BATCH = 64  # blocks in one announcement


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a Load brought, in blocks: all that this worker got, and of these what came from the disk.

    ``fresh`` and ``fresh_disk`` are those, and ``missing`` those that were asked for and did not come, that
    were not counted for the request yet: by another reader of its group, or by an earlier Load.
    """

    delivered: int
    disk: int
    fresh: int
    fresh_disk: int
    missing: int


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
        reader: Reader | None,
        on_end: Callable[[Lease], None],
    ) -> None:
        self._lease = lease
        self._asked = asked
        self._rows = rows  # mean these blocks only while the lease is live
        self._first = first
        self._next = first  # the next block to be read
        self._leases = leases
        self._host = host
        self._arena = arena
        self._quota = quota_bytes
        self._reader = reader
        self._on_end = on_end
        self._wanted = deque(rows[first:])  # not yet held or asked for
        host.want(self._wanted)
        self._ahead: deque[int | asyncio.Future[int]] = deque()  # slots of the blocks before _next
        self._slots: dict[int, int] = {}  # index -> slot, announced and not given back
        self._closed = False
        self.read_blocks = 0  # announced blocks that came from the disk
        self.returned_blocks = 0  # that the worker gave back, and so has had
        self.short: int | None = len(rows) if len(rows) < asked else None

    @property
    def lease(self) -> int:
        """Id of the lease, for ``release`` after a broken stream."""
        return self._lease.id

    @property
    def block_bytes(self) -> int:
        """Bytes of each block."""
        return self._lease.block_bytes

    def outcome(self, counted: int) -> Outcome:
        """What has come of it, once it has ended. ``counted`` leading blocks were for an earlier Load."""
        reached = self._first + self.returned_blocks
        missing = 0
        if self.short is not None and self._unannounced >= len(self._rows):
            missing = max(self._asked - max(reached, counted), 0)
        counting = self._reader.counting if self._reader is not None else Counting()
        fresh = counting.came(max(self._first, counted), reached)
        disk = min(self.read_blocks, self.returned_blocks)
        return Outcome(self.returned_blocks, disk, fresh, min(disk, fresh), counting.fell_short(missing))

    @property
    def _live(self) -> bool:
        return self._lease.live and not self._closed

    @property
    def _unannounced(self) -> int:
        return self._next - len(self._ahead)

    async def next(self) -> list[tuple[int, int]]:
        """The next readable blocks as (index, offset in the arena); empty at the end.

        Waits for the disk, and for credits while the worker's quota is used up.
        """
        self._leases.renew(self._lease, time.monotonic())
        self._top_up()
        while not self._ahead and self._live and self._next < len(self._rows):
            await self._host.room()
            self._top_up()
        if self._ahead and isinstance(self._ahead[0], asyncio.Future):
            await asyncio.wait({self._ahead[0]})
        if self._unannounced >= len(self._rows):
            return []
        return self._announce() if self._live and _ready(self._ahead[0]) else self._fall_short()

    def _top_up(self) -> None:
        while len(self._ahead) < WINDOW and self._next < len(self._rows) and self._may_hold_more():
            row = self._rows[self._next]
            slot = self._host.hold(row)
            self._ahead.append(self._host.request(row) if slot is None else slot)
            self._host.unwant([self._wanted.popleft()])
            self._next += 1
            if self._reader is not None:
                self._reader.advance(self._next)
        if self._reader is not None and self._next >= len(self._rows):
            self._reader.leave()

    def _may_hold_more(self) -> bool:
        # Holding later blocks while the next one waits for a slot could leave all loads waiting.
        if not self._live or (self._ahead and self._host.starved):
            return False
        if self._reader is not None and self._reader.must_wait():
            return False
        # One block is always allowed, however small the arena is and whatever else the worker holds.
        if not self._ahead and not self._slots:
            return True
        ours = (len(self._ahead) + 1) * self._lease.block_bytes
        return self._lease.holder.held_bytes + ours <= self._quota

    def _announce(self) -> list[tuple[int, int]]:
        batch: list[tuple[int, int]] = []
        while self._ahead and len(batch) < BATCH and _ready(self._ahead[0]):
            index = self._unannounced
            item = self._ahead.popleft()
            if isinstance(item, asyncio.Future):
                item = item.result()
                self.read_blocks += 1
            slot = item
            self._leases.keep_slot(self._lease, slot)
            self._slots[index] = slot
            batch.append((index, self._arena.offset(slot)))
        self._leases.renew(self._lease, time.monotonic())
        return batch

    def _fall_short(self) -> list[tuple[int, int]]:
        """The next block is unreadable, or the lease is over: the hit ends before it."""
        self.short = self._unannounced
        self._drop_window()
        self._rows = self._rows[: self.short]
        return []

    def give_back(self, indices: Sequence[int]) -> None:
        """The worker is done with these announced blocks. Raises ``InvalidArgument`` for others."""
        for index in indices:
            slot = self._slots.pop(index, None)
            if slot is None:
                raise InvalidArgument(f"block {index} was not announced by this load, or is returned already")
            self._leases.drop_slot(self._lease, slot)
            self.returned_blocks += 1
        self._leases.renew(self._lease, time.monotonic())
        self._host.notify_room()

    def announced(self) -> list[int]:
        """Indices of the blocks that the worker has and did not give back."""
        return list(self._slots)

    def view(self, index: int) -> memoryview:
        """Bytes of an announced block that was not given back; good until the loop runs on.

        Raises ``LeaseUnknown`` when the slot was taken back, since it may hold another block.
        """
        slot = self._slots.get(index)
        if slot is None or not self._lease.slots[slot]:
            raise LeaseUnknown(f"block {index} is no longer held by lease {self._lease.id}; load it again")
        return self._arena.view(slot)

    def checksum(self, index: int) -> int:
        """xxh3-64 of an announced block. Raises ``LeaseUnknown`` as ``view`` does."""
        return xxhash.xxh3_64_intdigest(self.view(index))

    def _drop_window(self) -> None:
        """Give up the blocks that were not announced: none more will be."""
        if self._reader is not None:
            self._reader.leave()
        self._host.unwant(self._wanted)
        self._wanted.clear()
        window, self._ahead = self._ahead, deque()
        self._next -= len(window)
        for item in window:
            if isinstance(item, asyncio.Future):
                self._host.give_up(item)
            else:
                self._arena.unhold(item)
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
        if returned or not self._lease.holder.mapped or not self._slots or self._lease.ended:
            self._on_end(self._lease)
        else:
            self._leases.drop_rows(self._lease)
        self._slots.clear()
        self._host.notify_room()


def _ready(item: int | asyncio.Future[int]) -> bool:
    if not isinstance(item, asyncio.Future):
        return True
    return item.done() and not item.cancelled() and item.exception() is None
