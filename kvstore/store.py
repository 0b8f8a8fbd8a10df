"""The tiers together: the five verbs over index, arena and disk.

One event loop owns all metadata here; threads only move bytes and run LMDB. A worker is
a ``Holder``; what it holds ends with ``release``, with its connection, or by the clock.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from time import monotonic

import numpy as np
from numpy.typing import NDArray

from kvstore.admission import Admission
from kvstore.allowance import Allowances
from kvstore.api import Match, MissReason, Readers, Status, TierStatus
from kvstore.arena import Arena
from kvstore.audit import Held, audit, held
from kvstore.clock import Clock, StoreTime
from kvstore.departures import Departures
from kvstore.disk import DiskTier
from kvstore.errors import InvalidArgument, Unavailable
from kvstore.ghosts import GhostList
from kvstore.hashing import check_hashes
from kvstore.host import HostTier
from kvstore.keeping import Keeping
from kvstore.leases import Holder, Lease, LeaseTable
from kvstore.loading import LoadStream
from kvstore.matching import Matcher, checked_prompt
from kvstore.namespace import Namespace
from kvstore.observer import Observer, Unobserved
from kvstore.payloads import OpenPayloads
from kvstore.prefix_index import NONE, PrefixIndex, Walk
from kvstore.readers import ReaderGroups
from kvstore.reserving import Reserved, Reserver
from kvstore.restore import restore, used_bytes
from kvstore.settings import StoreSettings
from kvstore.slots import SlotState
from kvstore.spaces import Space, SpaceTable
from kvstore.supervision import Supervisor, Work
from kvstore.survey import Survey, survey
from kvstore.tickets import unknown_ticket
from kvstore.trail import Trail, trail
from kvstore.units import UnitKind, UnitMark, check_interval
from kvstore.writeback import Writer

__all__ = ["Reserved", "Store"]


class Store:
    """A store in the process that owns its data directory. Use it from its event loop only."""

    def __init__(
        self,
        settings: StoreSettings,
        disk: DiskTier,
        arena: Arena,
        observer: Observer,
        clock: Clock | None = None,
    ) -> None:
        self.settings = settings
        self.arena = arena
        self.counters: Counter[str] = Counter()
        self._disk = disk
        self.time = StoreTime(clock or Clock(), self.counters)
        self._index = PrefixIndex()
        self._ghosts = GhostList(settings.ghost_bytes)
        self._spaces = SpaceTable(disk, arena, Allowances.of(settings))
        self._matcher = Matcher(self._index, self._ghosts, policy=settings.policy, interval=settings.interval)
        self._leases = LeaseTable(self._index, arena, seconds=settings.lease_seconds)
        self._host = HostTier(self._index, arena, disk, self._spaces, self.counters)
        self.supervisor = Supervisor(self.counters)
        self._writer = Writer(
            self._index, arena, self._host, disk, self._spaces, self.counters, settings, self.supervisor
        )
        departures = Departures(self._index, self._ghosts, observer, self.time)
        self._writer.on_left = departures.left
        self._host.on_lost = self._writer.lost
        self._host.on_setback = departures.set_back
        self._host.on_corrupt = self._writer.corrupt
        self._admission = Admission(
            self._index, arena, self._host, self._ghosts, self._writer, self.counters, settings.admit
        )
        tiers = self._host, self._writer, self._admission, self.counters, self.time
        self._reserver = Reserver(
            self._index, self._ghosts, arena, self._leases, *tiers, quota_bytes=self._quota_bytes
        )
        # Readers hold half of the arena; half of the rest is what they may be apart.
        self._readers = ReaderGroups(self._quota_bytes // 2, self._host.notify_room, self.counters)
        tables = self._index, self._spaces, self._leases, *tiers
        self.keeping = Keeping(settings, disk, *tables, arena, self._expire)
        self._closing = False

    @classmethod
    async def open(
        cls,
        settings: StoreSettings,
        open_payloads: OpenPayloads | None = None,
        observer: Observer | None = None,
        clock: Clock | None = None,
    ) -> Store:
        """Open or create the store of a data directory; ``observer`` hears of what happens in it.

        Raises ``DataDirInUse``, ``DataDirReadOnly``, ``FormatMismatch`` and other kinds of
        ``DataDirError``, ``ArenaUnavailable``, and ``DiskError`` if the disk fails already.
        """
        disk = await asyncio.to_thread(DiskTier, settings, open_payloads, observer)
        with contextlib.ExitStack() as undo:
            undo.callback(disk.close)
            arena = Arena(settings.host_bytes, lead=disk.lead)
            undo.callback(arena.close)
            store = cls(settings, disk, arena, observer or Unobserved(), clock)
            # Side by side: one waits for the kernel to find memory, the other one computes.
            backing = asyncio.to_thread(arena.back, settings.numa_node)
            restoring = asyncio.to_thread(store._restore)
            for failure in await asyncio.gather(backing, restoring, return_exceptions=True):
                if failure is not None:
                    raise failure
            undo.pop_all()
        store._writer.start()
        for name, work in store._clocks().items():
            store.supervisor.start(name, work)
        return store

    def _clocks(self) -> dict[str, Work]:
        """What runs beside the writer as long as the store, by name."""
        return {
            "leases": self._expire_leases,
            "uses": self.keeping.keep_uses,
            "expiry": self.keeping.tend,
            "clock": self.keeping.watch_clock,
        }

    def _restore(self) -> None:
        self._spaces.restore()
        self._writer.room.used = restore(self._index, self._disk, self._spaces, self.counters)
        self.time.restore(self._disk.catalog, self._index.latest_use())
        self.keeping.restore(self._disk.catalog)

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

    async def open_namespace(self, namespace: Namespace, opener: str | None = None) -> bytes:
        """Register a namespace; its digest is the key of its hash chains.

        It counts for its tenant's share, and that of the caller named ``opener``. Raises ``DiskError``,
        ``CapacityTooSmall``, ``NamespaceLimit``, and ``InvalidArgument`` for what does not fit its blocks or
        has a name that is not seen as it is.
        """
        self._accepting()
        if self._spaces.find(namespace) is None:
            namespace.require_showable()  # those of an older catalogue stay as they are
        check_interval(self.settings.interval, namespace.layout.block_tokens)
        return (await self.keeping.registry.open(namespace, opener)).digest

    def space(self, namespace: bytes) -> Space:
        """The open namespace with this digest. Raises ``NamespaceUnknown``."""
        return self._spaces.get(namespace)

    def match(
        self, namespace: bytes, hashes: Sequence[bytes], tokens: int, *, align: int, store: bool
    ) -> Match:
        """See ``kvstore.api.KVStore.match``. Touches no payload. That they are hashes the caller checks."""
        self._accepting()
        space = self._spaces.get(namespace)
        prompt = checked_prompt(hashes, tokens, space.layout.block_tokens, align)
        walk = self._walk(space.id, hashes)
        common = self._matcher.common_prefix(prompt, walk)
        match = replace(self._matcher.match(prompt, walk, common), epoch=self._spaces.epochs.of(space.id))
        if store:
            if common == len(walk.rows) > 0:
                self._reserver.mark(walk.last, UnitKind.COMMON_PREFIX)
            if len(walk.rows) < len(hashes):
                # With the last stored block, so that it is known how the chain went on.
                self._ghosts.remember(hashes[max(len(walk.rows) - 1, 0) :])
        self.counters["matches"] += 1
        if match.reason is not MissReason.NONE:
            self.counters[f"miss_{match.reason}"] += 1
        return match

    def _walk(self, namespace: int, hashes: Sequence[bytes]) -> Walk:
        if namespace in self._spaces.epochs.erasing:
            return Walk(np.empty(0, np.int64), NONE)
        return self._index.walk(namespace, hashes)

    def trail(self, namespace: bytes, hashes: Sequence[bytes], tokens: int, *, align: int) -> Trail:
        """What ``match`` would answer, and what is known of the place where it stops. Counts nothing."""
        space = self._spaces.get(namespace)
        prompt = checked_prompt(hashes, tokens, space.layout.block_tokens, align)
        walk = self._walk(space.id, hashes)
        return trail(self._index, self._ghosts, self._matcher, prompt, walk, self.time.to_wall)

    def load(
        self,
        holder: Holder,
        namespace: bytes,
        hashes: Sequence[bytes],
        first: int,
        readers: Readers | None = None,
    ) -> LoadStream:
        """Open a lease over ``hashes[first:]`` and start to read them, in order."""
        self._accepting()
        space = self._spaces.get(namespace)
        check_hashes(hashes)
        if not 0 <= first <= len(hashes):
            raise InvalidArgument(f"first={first} is outside [0, {len(hashes)}]")
        walked = self._walk(space.id, hashes).rows
        reader = self._readers.join(space.id, readers, first, space.block_bytes) if readers else None
        now = self.time.now()
        self._index.touch(walked, now)
        rows: list[int] = walked.tolist()
        lease = self._leases.open(holder, space.id, space.block_bytes, monotonic())
        if rows:
            self._leases.keep_row(lease, rows[-1])
            self._note_use(walked, now)
            self._admission.seen(rows)
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
            reader=reader,
            on_end=self._end,
        )

    def _note_use(self, walked: NDArray[np.int64], now: float) -> None:
        unit = self._index.deepest_unit(walked)
        if unit:
            row = int(walked[unit - 1])
            use = self._index.units[row]
            use.used, use.hits = now, use.hits + 1
            self._writer.unit_used(row)

    def reserve(
        self,
        holder: Holder,
        namespace: bytes,
        parent: bytes,
        hashes: Sequence[bytes],
        lease: int,
        epoch: int | None = None,
    ) -> Reserved:
        """Slots for the blocks of a chain that are not stored; see ``kvstore.api.KVStore``."""
        self._accepting()
        check_hashes((parent, *hashes))
        space = self._spaces.get(namespace)
        self._spaces.epochs.require(space.id, epoch)
        if space.id in self._spaces.epochs.erasing:
            return self._reserver.put_off(holder, space, len(hashes), lease)
        return self._reserver.reserve(holder, space, parent, hashes, lease)

    def slot_for_upload(self, holder: Holder, lease: int, block: bytes) -> memoryview:
        """The bytes of a slot being filled, for a worker that cannot map the arena.

        Good until the loop runs on: ask anew for each piece. Raises ``LeaseUnknown`` and ``NotReserved``.
        """
        self._accepting()
        return self._reserver.slot_for_upload(holder, lease, block)

    def commit(self, holder: Holder, lease: int, hashes: Sequence[bytes], units: Sequence[UnitMark]) -> int:
        """Seal filled blocks and mark units, all or nothing; returns a ticket."""
        self._accepting()
        check_hashes((*hashes, *(unit.hash for unit in units)))
        return self._reserver.commit(holder, lease, hashes, units)

    async def durable(self, ticket: int) -> bool:
        """Whether a commit is on disk, once that is known. Raises ``TicketUnknown``."""
        self._writer.hurry()
        return await self._writer.tickets.wait(ticket)

    def tenant_of_ticket(self, ticket: int) -> str:
        """Whose blocks a commit was about. Raises ``TicketUnknown``."""
        if (space := self._spaces.known(self._writer.tickets.namespace(ticket))) is None:
            raise unknown_ticket(ticket)
        return space.namespace.tenant

    def release(self, holder: Holder, lease: int) -> None:
        """End a lease of this worker, expired or not; others are ignored."""
        held = holder.leases.get(lease)
        if held is not None:
            self._end(held)
            self._host.notify_room()

    # --- ends

    def _end(self, lease: Lease) -> None:
        self._stop_filling(lease)
        self._leases.drop_slots(lease)
        self._leases.drop_rows(lease)
        self._leases.forget(lease)

    def _stop_filling(self, lease: Lease) -> None:
        for row in reversed(lease.filling.values()):
            self._host.drop_filling(row)
        lease.filling.clear()

    async def _expire_leases(self) -> None:
        while True:
            await asyncio.sleep(self.settings.lease_seconds / 4)
            for lease in self._leases.due(monotonic()):
                self.counters["expired_leases"] += 1
                self._expire(lease)

    def _expire(self, lease: Lease) -> None:
        lease.expired = True
        if lease.holder.mapped:
            # The worker may wake up late and still touch its slots: they stay until it is heard of.
            self._stop_filling(lease)
            self._leases.drop_rows(lease)
        else:
            self._end(lease)
        self._host.notify_room()

    def _accepting(self) -> None:
        if self._closing:
            raise Unavailable("the store is shutting down; try again when it is back")
        if self.supervisor.why is not None:
            raise Unavailable(f"the store has failed and must be opened again: {self.supervisor.why}")

    @property
    def _quota_bytes(self) -> int:
        return self.arena.nbytes // 2

    def status(self) -> Status:
        """Sizes, mode and counters."""
        aside = self._disk.set_aside()
        slots = sum(self.arena.count(state) for state in SlotState if state is not SlotState.FREE)
        return Status(
            host=TierStatus(self.arena.used_bytes, self.arena.nbytes, slots),
            disk=TierStatus(self._writer.room.used_bytes, self.settings.disk_bytes, self._index.on_disk()),
            mode="degraded" if self.supervisor.restarting else self._writer.mode,
            pinned=self.arena.pinned,
            dirty_blocks=self._writer.dirty_blocks,
            units=len(self._index.units),
            leases=len(self._leases),
            namespaces=len(self._spaces),
            counters=self.counters | {"bad_places": aside.places, "unopened_files": aside.files},
        )

    def survey(self, top: int) -> Survey:
        """Namespaces, and the ``top`` units by weight and by what they saved."""
        return survey(self._index, self._spaces, top, self.time.to_wall)

    def check(self) -> list[str]:
        """Violated invariants over all tables; empty when sound. For tests."""
        faults = audit(self._index, self.arena, self._leases, reading=self._host.reading())
        faults += self.keeping.check()
        counted = used_bytes(self._index, self._disk, self._spaces)
        if +counted != +self._writer.room.used:
            faults.append(f"{counted} bytes are on disk by namespace, {self._writer.room.used} counted")
        return faults

    def held(self) -> Held:
        """What is kept for somebody. For tests."""
        return held(self._index, self.arena, self._leases)

    async def close(self) -> bool:
        """Drain: refuse new work, make dirty blocks durable, close. True if all became durable."""
        self._closing = True
        await self.supervisor.stop(*self._clocks())
        self.keeping.close()
        await self.keeping.note_clock()
        # Not ended: a worker may still touch the slots that it holds.
        for lease in self._leases:
            self._expire(lease)
        async with contextlib.AsyncExitStack() as ends:  # each is ended, whatever those before it raise
            ends.push_async_callback(asyncio.to_thread, self._disk.close)
            ends.callback(self.arena.close)
            ends.push_async_callback(self._host.close)
            durable = await self._writer.close(self.settings.drain_seconds)
        return durable  # noqa: RET504  (a stack could swallow what is raised, mypy says)
