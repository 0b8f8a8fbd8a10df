"""Pins: units that somebody wants kept, for as long as asked, whatever else comes.

A pin holds the row of its unit's last block; a row that is held, and what it stands on, is neither
evicted nor expired. Pins are noted in the catalogue, so they hold after a restart too.

What is noted and what is held here change together: each change is one check, one write and what
follows from both, and no other change comes between them (``changing``).
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import struct
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace

from kvstore.admission import Admission
from kvstore.catalog import Catalog
from kvstore.clock import StoreTime
from kvstore.disk import DiskTier
from kvstore.errors import DiskError, InvalidArgument, PinLimit, PinUnknown, UnitUnknown
from kvstore.hashing import HASH_BYTES
from kvstore.prefix_index import NONE, BlockState, PrefixIndex
from kvstore.spaces import SpaceTable
from kvstore.writeback import Writer

log = logging.getLogger(__name__)

MAX_PINS = 65536
_PIN = b"pin/"
_RECORD = struct.Struct(f"<{HASH_BYTES}sIdd")


@dataclass(frozen=True, slots=True)
class Pin:
    """One pin, known by its handle. Times are the store's."""

    handle: str
    unit: bytes
    namespace: int
    created: float
    expires: float

    @property
    def key(self) -> bytes:
        """Under which it is noted."""
        return _PIN + self.handle.encode()

    def pack(self) -> bytes:
        """What is noted."""
        return _RECORD.pack(self.unit, self.namespace, self.created, self.expires)


class Pins:
    """All pins of a store, within ``share`` of its disk. Owned by the store's event loop."""

    def __init__(
        self,
        index: PrefixIndex,
        spaces: SpaceTable,
        disk: DiskTier,
        writer: Writer,
        admission: Admission,
        time: StoreTime,
        share: float,
    ) -> None:
        self._index = index
        self._spaces = spaces
        self._disk = disk
        self._writer = writer
        self._admission = admission
        self._time = time
        self._limit = int(share * disk.capacity_bytes)
        self._pins: dict[str, Pin] = {}
        self._rows: dict[str, int] = {}  # by handle
        self._coming: set[str] = set()  # held already, but not noted yet, so that nobody knows the handle
        self.changing = asyncio.Lock()  # held from the check on which a note stands until it took effect
        # How many pins, and rows that stand on it and are counted here, keep each row.
        self._kept: Counter[int] = Counter()
        self.nbytes = 0  # of disk that these rows may take

    def __iter__(self) -> Iterator[Pin]:
        return iter([pin for pin in self._pins.values() if pin.handle not in self._coming])

    def of(self, row: int) -> list[Pin]:
        """The pins of the unit that ends at a row."""
        return [self._pins[handle] for handle, at in self._rows.items() if at == row]

    def keeps(self, row: int) -> bool:
        """Whether a block belongs to a pinned unit."""
        return row in self._kept

    async def pin(self, row: int, seconds: float) -> Pin:
        """Pin the unit that ends at ``row`` for ``seconds``, once all of it is on disk.

        Raises ``InvalidArgument``, ``PinLimit``, ``UnitUnknown`` for a unit of which a block was
        lost or has still to come, and ``DiskError`` when it cannot be written.
        """
        index, now = self._index, self._time.now()
        pin = Pin(secrets.token_hex(8), index.hashes[row], index.namespace[row], now, _end(now, seconds))
        chain = self._chain(row)
        self._require_room(row)
        self._coming.add(pin.handle)
        self._hold(pin, row)
        try:
            await self._have_written(row, chain)
            async with self.changing:
                self._require_kept(pin, row)
                await self._writer.record(self._disk.note, {pin.key: pin.pack()}, ())
        except BaseException:
            self._release(pin.handle)
            raise
        finally:
            self._coming.discard(pin.handle)
        return pin

    async def _have_written(self, row: int, chain: list[int]) -> None:
        """Wait until a unit is on disk. Raises ``DiskError``."""
        self._admission.seen(chain)
        unwritten = [each for each in chain if self._index.place[each] == NONE]
        wanted = [*unwritten, *self._writer.awaited(row)]
        ticket = self._writer.tickets.give(wanted, self._index.namespace[row])
        self._writer.hurry()
        if not await self._writer.tickets.wait(ticket):
            raise DiskError("the unit could not be written to disk, so it is not pinned; try again later")

    def _require_kept(self, pin: Pin, row: int) -> None:
        """Raises ``UnitUnknown`` when the unit was deleted, or a block of it lost, while it was written."""
        if pin.handle not in self._pins or not self._index.kinds[row]:
            raise UnitUnknown(f"unit {pin.unit[:6].hex()} was deleted meanwhile; store it again, then pin it")
        self._chain(row)

    def _chain(self, row: int) -> list[int]:
        """The rows of a unit, last to first. Raises ``UnitUnknown`` if it is not whole."""
        index, chain = self._index, list[int]()
        name = index.hashes[row][:6].hex()
        while row != NONE and index.state[row] == BlockState.PRESENT:
            chain.append(row)
            row = index.parent[row]
        if row != NONE and index.state[row] == BlockState.FILLING:
            raise UnitUnknown(
                f"unit {name} is not whole: a worker is storing a block of it; pin it after that"
            )
        if not chain or index.depth[chain[-1]] != 1:
            raise UnitUnknown(
                f"unit {name} is not whole: a block of it was lost; store it again, then pin it"
            )
        return chain

    def _require_room(self, row: int) -> None:
        index, size = self._index, self._stored_bytes(row)
        more = 0
        while row != NONE and not self.keeps(row):
            more, row = more + size, index.parent[row]
        if self.nbytes + more > self._limit or len(self._pins) >= MAX_PINS:
            raise PinLimit(
                f"{more} bytes more than the {self.nbytes} that {len(self._pins)} pins keep are too much: the"
                f" limit is {self._limit} bytes, and {MAX_PINS} pins; unpin others, or raise pin_share"
            )

    def _stored_bytes(self, row: int) -> int:
        size = self._spaces.of(self._index.namespace[row]).block_bytes
        return self._disk.stored_bytes(size, size)

    async def extend(self, handle: str, seconds: float) -> Pin:
        """Let a pin live for ``seconds`` from now. Raises ``PinUnknown`` and ``DiskError``."""
        async with self.changing:
            pin = replace(self._get(handle), expires=_end(self._time.now(), seconds))
            await self._writer.record(self._disk.note, {pin.key: pin.pack()}, ())
            self._pins[handle] = pin
        return pin

    async def unpin(self, handle: str) -> None:
        """End a pin. Raises ``PinUnknown`` and ``DiskError``."""
        async with self.changing:
            pin = self._get(handle)
            await self._writer.record(self._disk.note, {}, (pin.key,))
            self._release(handle)

    def _get(self, handle: str) -> Pin:
        pin = self._pins.get(handle)
        if pin is None or handle in self._coming:
            raise PinUnknown(
                f"no pin has the handle {handle!r:.80}: it was dropped, or has expired; list the pins"
            )
        return pin

    async def expire(self, now: float) -> None:
        """End the pins whose time has come. Raises ``DiskError``."""
        async with self.changing:
            due = [pin for pin in self if pin.expires <= now]
            if due:
                await self._writer.record(self._disk.note, {}, [pin.key for pin in due])
            for pin in due:
                self._release(pin.handle)

    def keys_of(self, namespace: int) -> list[bytes]:
        """Under which the pins of a namespace are noted."""
        return [pin.key for pin in self if pin.namespace == namespace]

    def drop(self, namespace: int) -> None:
        """All of a namespace goes, its pins too; their notes are the caller's, who is ``changing`` them."""
        for pin in list(self._pins.values()):
            if pin.namespace == namespace:
                self._release(pin.handle)

    def restore(self, catalog: Catalog) -> None:
        """Hold again what is noted; pins whose unit is gone are dropped. Raises ``DiskError``."""
        stale = []
        for name, body in catalog.notes(_PIN):
            pin = _unpack(name, body)
            row = self._index.find(pin.unit) if pin else NONE
            if pin is None or row == NONE or self._index.state[row] != BlockState.PRESENT:
                stale.append(_PIN + name)
            else:
                self._hold(_not_before(pin, self._time.now()), row)
        if stale:
            log.warning("event=pins_dropped count=%d reason=unit_gone", len(stale))
            catalog.commit(drop_notes=stale)

    def _hold(self, pin: Pin, row: int) -> None:
        self._pins[pin.handle] = pin
        self._rows[pin.handle] = row
        self._index.hold(row)
        size = self._stored_bytes(row)
        while row != NONE:
            self._kept[row] += 1
            if self._kept[row] > 1:
                return
            self.nbytes += size
            row = self._index.parent[row]

    def _release(self, handle: str) -> None:
        if self._pins.pop(handle, None) is None:
            return
        last = row = self._rows.pop(handle)
        size = self._stored_bytes(row)
        while row in self._kept:
            self._kept[row] -= 1
            if self._kept[row]:
                break
            del self._kept[row]
            self.nbytes -= size
            row = self._index.parent[row]
        self._index.unhold(last)

    def check(self) -> list[str]:
        """Violated invariants; empty when sound."""
        index, rows = self._index, Counter(self._rows.values())
        faults = [
            f"row {row} has {count} pins and {index.holds[row]} holds"
            for row, count in rows.items()
            if index.holds[row] < count
        ]
        kept, below = set[int](), defaultdict[int, int](int)
        for row in rows:
            while row in self._kept and row not in kept:
                kept.add(row)
                row = index.parent[row]
                below[row] += row in self._kept
        if kept != set(self._kept):
            faults.append(f"{len(self._kept)} rows count as pinned, {len(kept)} are")
        faults += [
            f"row {row} counts {count} that keep it, not {rows[row] + below[row]}"
            for row, count in self._kept.items()
            if count != rows[row] + below[row]
        ]
        if self.nbytes != sum(map(self._stored_bytes, self._kept)):
            faults.append(f"pins count {self.nbytes} bytes")
        return faults


def _end(now: float, seconds: float) -> float:
    if not 0 < seconds < math.inf:
        raise InvalidArgument(f"a pin for {seconds} seconds: give a number above 0")
    return now + seconds


def _not_before(pin: Pin, now: float) -> Pin:
    """A pin that was made at a time that is still to come lasts as long as it was to."""
    ahead = max(pin.created - now, 0.0)
    return replace(pin, created=pin.created - ahead, expires=pin.expires - ahead)


def _unpack(name: bytes, body: bytes | None) -> Pin | None:
    if body is None or len(body) != _RECORD.size:
        return None
    return Pin(name.decode(errors="replace"), *_RECORD.unpack(body))
