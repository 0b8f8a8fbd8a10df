"""The tiers together: the five verbs over index, arena and disk.

One event loop owns all metadata here; threads only move bytes and run LMDB. A worker is
a ``Holder``; what it holds ends with ``release``, with its connection, or by the clock.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from kvstore.api import Match, ReserveState, Status, TierStatus
from kvstore.arena import Arena, SlotState
from kvstore.disk import DiskTier
from kvstore.errors import InvalidArgument, NamespaceMismatch, NotReserved, ParentMissing, Unavailable
from kvstore.ghosts import GhostList
from kvstore.hashing import HASH_BYTES, ROOT
from kvstore.host import HostTier
from kvstore.leases import Holder, Lease, LeaseTable
from kvstore.loading import LoadStream
from kvstore.matching import Matcher, Prompt
from kvstore.namespace import Namespace
from kvstore.prefix_index import NONE, BlockState, PrefixIndex
from kvstore.restore import restore
from kvstore.settings import StoreSettings
from kvstore.spaces import Space, SpaceTable
from kvstore.units import UnitKind, UnitMark
from kvstore.writeback import Writer, mark_of

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Reserved:
    """Answer of ``Store.reserve``: a state for each block, an arena offset for each FILL."""

    lease: int
    states: list[ReserveState]
    offsets: list[int]


class Store:
    """A store in the process that owns its data directory. Use it from its event loop only."""

    def __init__(self, settings: StoreSettings, disk: DiskTier, arena: Arena) -> None:
        self.settings = settings
        self.arena = arena
        self.counters: Counter[str] = Counter()
        self._disk = disk
        self._index = PrefixIndex()
        self._ghosts = GhostList(settings.ghost_bytes)
        self._spaces = SpaceTable(disk, arena)
        self._matcher = Matcher(self._index, self._ghosts, policy=settings.policy, interval=settings.interval)
        self._leases = LeaseTable(self._index, arena, seconds=settings.lease_seconds)
        self._host = HostTier(self._index, arena, disk, self._spaces, self.counters)
        self._writer = Writer(
            self._index, arena, self._host, disk, self._spaces, self.counters, policy=settings.policy
        )
        self._host.on_lost = self._writer.settle_lost
        self._clock: asyncio.Task[None] | None = None
        self._closing = False

    @classmethod
    async def open(cls, settings: StoreSettings) -> Store:
        """Open or create the store of a data directory.

        Raises ``DataDirInUse``, ``DataDirReadOnly``, ``FormatMismatch``, ``ArenaUnavailable``.
        """
        disk = await asyncio.to_thread(DiskTier, settings)
        try:
            arena = await asyncio.to_thread(Arena, settings.host_bytes)
        except BaseException:
            disk.close()
            raise
        store = cls(settings, disk, arena)
        store._spaces.restore()
        store._writer.used_bytes = await asyncio.to_thread(
            restore, store._index, disk, store._spaces, store.counters
        )
        store._writer.start()
        store._clock = asyncio.create_task(store._expire_leases())
        return store

    # --- workers

    def connect(self, token: bytes, *, mapped: bool) -> Holder:
        """A worker comes. ``mapped`` if it sees the arena itself."""
        return Holder(token, mapped)

    def disconnect(self, holder: Holder) -> None:
        """A worker is gone, and touches no slot any more: all that it held is free."""
        for lease in list(holder.leases.values()):
            self._end(lease)
        self._host.notify_room()

    # --- verbs

    async def open_namespace(self, namespace: Namespace) -> bytes:
        """Register a namespace; its digest is the key of its hash chains.

        Raises ``CapacityTooSmall``.
        """
        self._accepting()
        self._spaces.fit(namespace.layout)
        number, digest = await self._writer.in_thread(self._disk.add_namespace, namespace)
        return self._spaces.admit(number, namespace, digest).digest

    def match(
        self, namespace: bytes, hashes: Sequence[bytes], tokens: int, *, align: int, store: bool
    ) -> Match:
        """See ``kvstore.api.KVStore.match``. Touches no payload."""
        self._accepting()
        space = self._spaces.get(namespace)
        _check_hashes(hashes)
        block_tokens = space.layout.block_tokens
        if tokens < len(hashes) * block_tokens:
            raise InvalidArgument(f"tokens={tokens} is less than {len(hashes)} blocks of {block_tokens}")
        if align < block_tokens or align % block_tokens:
            raise InvalidArgument(f"align={align} is no positive multiple of {block_tokens} tokens")
        prompt = Prompt(space.id, hashes, tokens, block_tokens, align)
        walk = self._index.walk(space.id, hashes)
        match = self._matcher.match(prompt, walk)
        if store:
            if self._matcher.common_prefix(prompt, walk) == len(walk.rows) > 0:
                self._mark(walk.rows[-1], UnitKind.COMMON_PREFIX)
            self._ghosts.remember(hashes[len(walk.rows) :])
        self.counters["matches"] += 1
        return match

    def load(self, holder: Holder, namespace: bytes, hashes: Sequence[bytes], first: int) -> LoadStream:
        """Open a lease over ``hashes[first:]`` and start to read them, in order."""
        self._accepting()
        space = self._spaces.get(namespace)
        _check_hashes(hashes)
        if not 0 <= first <= len(hashes):
            raise InvalidArgument(f"first={first} is outside [0, {len(hashes)}]")
        rows = self._index.walk(space.id, hashes).rows
        now = time.time()
        self._index.touch(rows, now)
        lease = self._leases.open(holder, space.id, space.layout.block_bytes, time.monotonic())
        if rows:
            self._leases.keep_row(lease, rows[-1])
            self._note_use(rows, now)
        self.counters["loads"] += 1
        return LoadStream(
            lease,
            rows,
            min(first, len(rows)),
            asked=len(hashes),
            leases=self._leases,
            host=self._host,
            arena=self.arena,
            quota_bytes=self._quota_bytes,
            on_unreadable=self._writer.free,
            on_end=self._end,
        )

    def _note_use(self, rows: Sequence[int], now: float) -> None:
        unit = self._index.deepest_unit(rows)
        if unit:
            use = self._index.units[rows[unit - 1]]
            use.used, use.hits = now, use.hits + 1
            self._writer.unit_used(rows[unit - 1])

    def reserve(
        self, holder: Holder, namespace: bytes, parent: bytes, hashes: Sequence[bytes], lease: int
    ) -> Reserved:
        """Slots for the blocks of a chain that are not stored; see ``kvstore.api.KVStore``."""
        self._accepting()
        space = self._spaces.get(namespace)
        _check_hashes((parent, *hashes))
        held = self._leases.get(holder, lease) if lease else None
        if held is not None and held.namespace != space.id:
            raise NamespaceMismatch(f"lease {lease} belongs to another namespace; reserve without it")
        above = self._parent_row(space, parent)
        now = time.monotonic()
        held = held or self._leases.open(holder, space.id, space.layout.block_bytes, now)
        self._leases.renew(held, now)
        return self._reserve_chain(space, held, above, hashes)

    def _parent_row(self, space: Space, parent: bytes) -> int:
        if parent == ROOT:
            return NONE
        row = self._index.find(parent)
        known = row != NONE and self._index.namespace[row] == space.id
        if not known or self._index.state[row] == BlockState.ABSENT:
            raise ParentMissing(f"block {parent[:6].hex()} is not stored; reserve from the first block on")
        return row

    def _reserve_chain(self, space: Space, lease: Lease, above: int, hashes: Sequence[bytes]) -> Reserved:
        index, now = self._index, time.time()
        states: list[ReserveState] = []
        offsets: list[int] = []
        present = NONE
        for block in hashes:
            row = index.find(block)
            if row == NONE:
                row = index.add(block, above, space.id, 1 + (index.depth[above] if above != NONE else 0), now)
            else:
                index.adopt(row, above)
            state = self._reserve_block(space, lease, row, block)
            if state is ReserveState.RETRY:
                break
            if state is ReserveState.FILL:
                offsets.append(self.arena.offset(index.slot[row]))
            elif state is ReserveState.PRESENT:
                present = row
            index.used[row] = now
            states.append(state)
            above = row
        if present != NONE:
            self._leases.keep_row(lease, present)
        states += [ReserveState.RETRY] * (len(hashes) - len(states))
        return Reserved(lease.id, states, offsets)

    def _reserve_block(self, space: Space, lease: Lease, row: int, block: bytes) -> ReserveState:
        state = self._index.state[row]
        if state == BlockState.PRESENT:
            return ReserveState.PRESENT
        if state == BlockState.FILLING:
            return ReserveState.FILL if block in lease.filling else ReserveState.PENDING
        # The hold keeps the new row, a hole so far, while a slot is looked for.
        self._leases.keep_row(lease, row)
        size = space.layout.block_bytes
        held = lease.holder.held_bytes
        slot = self._host.take(row) if not held or held + size <= self._quota_bytes else None
        if slot is None:
            lease.rows.remove(row)
            self._index.unhold(row)
            return ReserveState.RETRY
        self._index.state[row] = BlockState.FILLING
        self._index.slot[row] = slot
        self._leases.keep_slot(lease, slot, held=True)
        lease.filling[block] = row
        return ReserveState.FILL

    def slot_for_upload(self, holder: Holder, lease: int, block: bytes) -> memoryview:
        """The bytes of a slot being filled, for a worker that cannot map the arena."""
        held = self._leases.get(holder, lease)
        self._leases.renew(held, time.monotonic())
        return self.arena.view(self._index.slot[self._filling_row(held, block)])

    def _filling_row(self, lease: Lease, block: bytes) -> int:
        row = lease.filling.get(block)
        if row is None:
            raise NotReserved(
                f"block {block[:6].hex()} is not reserved by lease {lease.id}, or is committed already;"
                " reserve it first"
            )
        return row

    def commit(self, holder: Holder, lease: int, hashes: Sequence[bytes], units: Sequence[UnitMark]) -> int:
        """Seal filled blocks and mark units, all or nothing; returns a ticket."""
        self._accepting()
        held = self._leases.get(holder, lease)
        _check_hashes((*hashes, *(unit.hash for unit in units)))
        rows = [self._filling_row(held, block) for block in hashes]
        if len(set(rows)) != len(rows):
            raise NotReserved("a block is named twice in one commit; name each block once")
        marks = [(self._unit_row(held, unit), unit.kinds) for unit in units]
        self._leases.renew(held, time.monotonic())
        for block, row in zip(hashes, rows, strict=True):
            self._seal(held, block, row)
        waits = rows + [row for row, _ in marks if self._is_dirty(row)]
        waits += [mark_of(row) for row, kinds in marks if self._mark(row, kinds)]
        self._host.notify_room()
        return self._writer.tickets.give(waits)

    def _unit_row(self, lease: Lease, unit: UnitMark) -> int:
        if not 0 < unit.kinds <= UnitKind.REQUEST_END | UnitKind.COMMON_PREFIX | UnitKind.INTERVAL:
            raise InvalidArgument(f"unit kinds {int(unit.kinds)} are no set of UnitKind")
        row = self._index.find(unit.hash)
        known = row != NONE and self._index.namespace[row] == lease.namespace
        if not known or self._index.state[row] == BlockState.ABSENT:
            raise NotReserved(f"a unit cannot end at {unit.hash[:6].hex()}: that block is not stored")
        return row

    def _is_dirty(self, row: int) -> bool:
        return self._index.state[row] == BlockState.PRESENT and self._index.place[row] == NONE

    def _seal(self, lease: Lease, block: bytes, row: int) -> None:
        index = self._index
        index.state[row] = BlockState.PRESENT
        self.arena.seal(index.slot[row])
        del lease.filling[block]
        self._leases.drop_slot(lease, index.slot[row])
        self._ghosts.forget(block)
        self._writer.block(row)
        self.counters["stored_blocks"] += 1
        above = index.parent[row]
        # Two chains part here: the prefix that they share is worth a unit of its own.
        if above != NONE and index.forks(above) and not index.kinds[above]:
            self._mark(above, UnitKind.COMMON_PREFIX)

    def _mark(self, row: int, kinds: UnitKind) -> bool:
        news = self._index.mark(row, kinds, time.time())
        if news:
            self._writer.unit(row)
        return news

    async def durable(self, ticket: int) -> bool:
        """Whether a commit is on disk, once that is known. Raises ``TicketUnknown``."""
        return await self._writer.tickets.wait(ticket)

    def release(self, holder: Holder, lease: int) -> None:
        """End a lease of this worker, expired or not; others are ignored."""
        held = holder.leases.get(lease)
        if held is not None:
            self._end(held)
            self._host.notify_room()

    # --- ends

    def _end(self, lease: Lease) -> None:
        for row in reversed(lease.filling.values()):
            self._host.drop_filling(row)
        lease.filling.clear()
        self._leases.drop_slots(lease)
        self._leases.drop_rows(lease)
        self._leases.forget(lease)

    async def _expire_leases(self) -> None:
        while True:
            await asyncio.sleep(self.settings.lease_seconds / 4)
            for lease in self._leases.due(time.monotonic()):
                self._expire(lease)

    def _expire(self, lease: Lease) -> None:
        lease.expired = True
        self.counters["expired_leases"] += 1
        for row in reversed(lease.filling.values()):
            self._host.drop_filling(row)
        lease.filling.clear()
        if not lease.holder.mapped:
            self._leases.drop_slots(lease)
        self._leases.drop_rows(lease)
        self._host.notify_room()

    def _accepting(self) -> None:
        if self._closing:
            raise Unavailable("the store is shutting down; try again when it is back")

    @property
    def _quota_bytes(self) -> int:
        return self.arena.nbytes // 2

    def status(self) -> Status:
        """Sizes, mode and counters."""
        slots = sum(self.arena.count(state) for state in SlotState if state is not SlotState.FREE)
        on_disk = sum(self._index.place[row] != NONE for row in self._index)
        return Status(
            host=TierStatus(self.arena.used_bytes, self.arena.nbytes, slots),
            disk=TierStatus(self._writer.used_bytes, self.settings.disk_bytes, on_disk),
            mode="host_only" if self._writer.failing else "ok",
            pinned=self.arena.pinned,
            dirty_blocks=self._writer.dirty_blocks,
            units=len(self._index.units),
            leases=len(self._leases),
            namespaces=len(self._spaces),
            counters=dict(self.counters),
        )

    def check(self) -> list[str]:
        """Violated invariants of index, arena and leases; empty when sound. For tests."""
        return self._index.check() + self.arena.check()

    async def close(self) -> bool:
        """Drain: refuse new work, make dirty blocks durable, close. True if all became durable."""
        self._closing = True
        if self._clock is not None:
            self._clock.cancel()
        for lease in self._leases:
            self._end(lease)
        durable = await self._writer.close(self.settings.drain_seconds)
        await self._host.close()
        self.arena.close()
        await asyncio.to_thread(self._disk.close)
        return durable


def _check_hashes(hashes: Sequence[bytes]) -> None:
    for block in hashes:
        if len(block) != HASH_BYTES:
            raise InvalidArgument(f"a block hash of {len(block)} bytes; it needs {HASH_BYTES}")
