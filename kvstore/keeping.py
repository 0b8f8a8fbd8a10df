"""What stays in a store and what goes: expiry, pins, deletion, and the clock behind them."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable

from kvstore.admission import Admission
from kvstore.arena import Arena
from kvstore.catalog import Catalog
from kvstore.clock import WATCH_SECONDS, StoreTime
from kvstore.curation import Curator
from kvstore.disk import DiskTier
from kvstore.erasing import Eraser
from kvstore.errors import DiskError
from kvstore.expiry import Expiry
from kvstore.host import HostTier
from kvstore.leases import Lease, LeaseTable
from kvstore.pins import Pins
from kvstore.prefix_index import PrefixIndex
from kvstore.registry import Registry
from kvstore.settings import StoreSettings
from kvstore.spaces import SpaceTable
from kvstore.writeback import Writer


class Keeping:
    """Part of the store; owned by its event loop like the tables that it works on."""

    def __init__(
        self,
        settings: StoreSettings,
        disk: DiskTier,
        index: PrefixIndex,
        spaces: SpaceTable,
        leases: LeaseTable,
        host: HostTier,
        writer: Writer,
        admission: Admission,
        counters: Counter[str],
        time: StoreTime,
        arena: Arena,
        end_lease: Callable[[Lease], None],
    ) -> None:
        self._writer = writer
        self._disk = disk
        self._time = time
        self.registry = Registry(index, spaces, leases, arena, disk, writer, counters)
        self._expiry = Expiry(
            index, writer, counters, ttl=settings.ttl_seconds, max_age=settings.max_age_seconds
        )
        self._pins = Pins(index, spaces, disk, writer, admission, time, settings.pin_share)
        eraser = Eraser(index, spaces, leases, host, disk, writer, self._pins, counters, end_lease)
        self.curator = Curator(index, spaces, self._pins, eraser, time.to_wall)

    def restore(self, catalog: Catalog) -> None:
        """The index is filled: pins hold again. Raises ``DiskError``."""
        self._pins.restore(catalog)

    async def keep_uses(self) -> None:
        """Write down which units were used and end the pins that are over, for ever.

        Not in ``tend``, which waits for what leaves the disk.
        """
        while True:
            await asyncio.sleep(self._expiry.tick)
            self._writer.keep_uses()
            await self._end_pins(self._time.now())

    async def tend(self) -> None:
        """Drop what expires, for ever."""
        while True:
            await asyncio.sleep(self._expiry.tick)
            await self._expire(self._time.now())
            with contextlib.suppress(DiskError):  # tried again
                await self.registry.retire_idle()

    async def watch_clock(self) -> None:
        """Notice steps of the wall clock, for ever, and note how far the store's time is from it."""
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            await self.note_clock()

    async def note_clock(self) -> None:
        """Note how far the store's time is from the wall clock's, if that has changed."""
        if notes := self._time.due():
            with contextlib.suppress(DiskError):  # tried again
                await self._writer.record(self._disk.note, notes, ())
                self._time.wrote(notes)

    async def expire(self, now: float) -> int:
        """Drop what has expired when the wall clock shows ``now`` (unix seconds); how many blocks."""
        return await self._expire(self._time.of_wall(now))

    async def _expire(self, now: float) -> int:
        await self._end_pins(now)
        return await self._expiry.sweep(now)

    async def _end_pins(self, now: float) -> None:
        with contextlib.suppress(DiskError):  # tried again
            await self._pins.expire(now)

    def check(self) -> list[str]:
        """Violated invariants; empty when sound."""
        return self._pins.check()

    def close(self) -> None:
        """The store ends."""
        self.curator.close()
