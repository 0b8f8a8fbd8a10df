"""What stays in a store and what goes: expiry, pins, deletion, and the clock behind them."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Callable

from kvstore.admission import Admission
from kvstore.catalog import Catalog
from kvstore.curation import Curator
from kvstore.disk import DiskTier
from kvstore.erasing import Eraser
from kvstore.errors import DiskError
from kvstore.expiry import Expiry
from kvstore.host import HostTier
from kvstore.leases import Lease, LeaseTable
from kvstore.pins import Pins
from kvstore.prefix_index import PrefixIndex
from kvstore.settings import StoreSettings
from kvstore.spaces import SpaceTable
from kvstore.writeback import Writer


class Keeping:
    """Part of the store; owned by its event loop like the tables that it works on."""

    def __init__(
        self,
        settings: StoreSettings,
        index: PrefixIndex,
        spaces: SpaceTable,
        leases: LeaseTable,
        host: HostTier,
        disk: DiskTier,
        writer: Writer,
        admission: Admission,
        counters: Counter[str],
        end_lease: Callable[[Lease], None],
    ) -> None:
        self._writer = writer
        self._expiry = Expiry(
            index, writer, counters, ttl=settings.ttl_seconds, max_age=settings.max_age_seconds
        )
        self._pins = Pins(index, spaces, disk, writer, admission, settings.pin_share)
        eraser = Eraser(index, spaces, leases, host, disk, writer, self._pins, counters, end_lease)
        self.curator = Curator(index, spaces, self._pins, eraser)

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
            await self._end_pins(time.time())

    async def tend(self) -> None:
        """Drop what expires, for ever."""
        while True:
            await asyncio.sleep(self._expiry.tick)
            await self.expire(time.time())

    async def expire(self, now: float) -> int:
        """Drop what has expired at ``now`` (unix seconds); how many blocks."""
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
