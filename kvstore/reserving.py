"""Reserve and Commit: new blocks enter the store through slots that a worker fills.

Part of the store; owned by its event loop like the tables that it works on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from time import monotonic

from kvstore.admission import Admission
from kvstore.api import ReserveState
from kvstore.arena import Arena
from kvstore.clock import StoreTime
from kvstore.errors import InvalidArgument, NamespaceMismatch, NotReserved, ParentMissing
from kvstore.ghosts import GhostList, Gone, Setback
from kvstore.hashing import ROOT
from kvstore.host import HostTier
from kvstore.leases import Holder, Lease, LeaseTable
from kvstore.prefix_index import NONE, BlockState, PrefixIndex
from kvstore.spaces import Space
from kvstore.units import UnitKind, UnitMark
from kvstore.writeback import Writer

ALL_KINDS = UnitKind.REQUEST_END | UnitKind.COMMON_PREFIX | UnitKind.INTERVAL


@dataclass(frozen=True, slots=True)
class Reserved:
    """Answer of ``Store.reserve``: a state for each block, an arena offset for each FILL."""

    lease: int
    states: list[ReserveState]
    offsets: list[int]


class Reserver:
    """The writing verbs over the store's tables."""

    def __init__(
        self,
        index: PrefixIndex,
        ghosts: GhostList,
        arena: Arena,
        leases: LeaseTable,
        host: HostTier,
        writer: Writer,
        admission: Admission,
        counters: Counter[str],
        time: StoreTime,
        *,
        quota_bytes: int,
    ) -> None:
        self._index = index
        self._ghosts = ghosts
        self._arena = arena
        self._leases = leases
        self._host = host
        self._writer = writer
        self._admission = admission
        self._counters = counters
        self._time = time
        self._quota = quota_bytes

    def reserve(
        self, holder: Holder, space: Space, parent: bytes, hashes: Sequence[bytes], lease_id: int
    ) -> Reserved:
        """Slots for the blocks behind ``parent`` that are not stored. Changes nothing if it raises."""
        lease = self._leases.get(holder, lease_id) if lease_id else None
        if lease is not None and lease.namespace != space.id:
            raise NamespaceMismatch(f"lease {lease_id} belongs to another namespace; reserve without it")
        above = self._parent_row(space, parent)
        self._check_chain(space, above, hashes)
        now = monotonic()
        lease = lease or self._leases.open(holder, space.id, space.block_bytes, now)
        self._leases.renew(lease, now)
        if above != NONE and above not in lease.stored:
            self._admission.seen([above])
        return self._reserve_chain(space, lease, above, hashes)

    def put_off(self, holder: Holder, space: Space, count: int, lease_id: int) -> Reserved:
        """No slots for so many blocks now, for their namespace is being erased: come back."""
        now = monotonic()
        lease = self._leases.get(holder, lease_id) if lease_id else None
        lease = lease or self._leases.open(holder, space.id, space.block_bytes, now)
        self._leases.renew(lease, now)
        return Reserved(lease.id, [ReserveState.RETRY] * count, [])

    def _parent_row(self, space: Space, parent: bytes) -> int:
        if parent == ROOT:
            return NONE
        row = self._index.find(parent)
        known = row != NONE and self._index.namespace[row] == space.id
        if not known or self._index.state[row] == BlockState.ABSENT:
            raise ParentMissing(f"block {parent[:6].hex()} is not stored; reserve from the first block on")
        return row

    def _depth_below(self, above: int) -> int:
        return 1 + (self._index.depth[above] if above != NONE else 0)

    def _check_chain(self, space: Space, above: int, hashes: Sequence[bytes]) -> None:
        """The blocks that are known must be where this call says.

        Honest hashes always are; but a wrong call must neither reach into another
        namespace's blocks nor tie chains into knots.
        """
        if len(set(hashes)) != len(hashes):
            raise InvalidArgument("a block is named twice in one reservation; name each block once")
        index = self._index
        for depth, block in enumerate(hashes, self._depth_below(above)):
            row = index.find(block)
            if row != NONE and index.namespace[row] != space.id:
                raise NamespaceMismatch(f"block {block[:6].hex()} belongs to another namespace; hash it anew")
            if row != NONE and (
                index.depth[row] != depth or (index.parent[row] != above and index.parent[row] != NONE)
            ):
                raise InvalidArgument(
                    f"block {block[:6].hex()} is block {index.depth[row]} of another chain, not {depth} of"
                    " this one; name consecutive blocks behind their parent"
                )
            above = row

    def _reserve_chain(self, space: Space, lease: Lease, above: int, hashes: Sequence[bytes]) -> Reserved:
        index, now = self._index, self._time.now()
        states: list[ReserveState] = []
        offsets: list[int] = []
        present = NONE
        for block in hashes:
            row = index.find(block)
            if row == NONE:
                row = index.add(block, above, space.id, self._depth_below(above), now)
            else:
                index.adopt(row, above)
            state = self._reserve_block(lease, row, block)
            if state is ReserveState.RETRY:
                break
            if state is ReserveState.FILL:
                offsets.append(self._arena.offset(index.slot[row]))
            elif state is ReserveState.PRESENT:
                present = row
                if row not in lease.stored:
                    self._admission.seen([row])
            index.used[row] = now
            states.append(state)
            above = row
        # While HOST_ONLY, the search for a slot may have cost the store this very block.
        if present != NONE and index.state[present] == BlockState.PRESENT:
            self._leases.keep_row(lease, present)
        if len(states) < len(hashes):
            # The first tells enough: Match stops there. Forgotten once it is stored after all.
            self._ghosts.leave(hashes[len(states)], Gone(Setback.REFUSED, now))
        states += [ReserveState.RETRY] * (len(hashes) - len(states))
        return Reserved(lease.id, states, offsets)

    def _reserve_block(self, lease: Lease, row: int, block: bytes) -> ReserveState:
        state = self._index.state[row]
        if state == BlockState.PRESENT:
            return ReserveState.PRESENT
        if state == BlockState.FILLING:
            return ReserveState.FILL if block in lease.filling else ReserveState.PENDING
        # The hold keeps the new row, a hole so far, while a slot is looked for.
        self._index.hold(row)
        held = lease.holder.held_bytes
        slot = self._host.take(row) if not held or held + lease.block_bytes <= self._quota else None
        if slot is None:
            self._index.unhold(row)
            return ReserveState.RETRY
        self._index.state[row] = BlockState.FILLING
        self._index.slot[row] = slot
        self._leases.keep_row(lease, row)
        self._index.unhold(row)
        self._leases.keep_slot(lease, slot)
        lease.filling[block] = row
        return ReserveState.FILL

    def slot_for_upload(self, holder: Holder, lease_id: int, block: bytes) -> memoryview:
        """The bytes of a slot being filled; good until the loop runs on."""
        lease = self._leases.get(holder, lease_id)
        row = self._filling_row(lease, block)
        self._leases.renew(lease, monotonic())
        return self._arena.view(self._index.slot[row])

    def _filling_row(self, lease: Lease, block: bytes) -> int:
        row = lease.filling.get(block)
        if row is None:
            raise NotReserved(
                f"block {block[:6].hex()} is not reserved by lease {lease.id}, or is committed already;"
                " reserve it first"
            )
        return row

    def commit(
        self, holder: Holder, lease_id: int, hashes: Sequence[bytes], units: Sequence[UnitMark]
    ) -> int:
        """Seal filled blocks and mark units, all or nothing; returns a ticket."""
        lease = self._leases.get(holder, lease_id)
        rows = [self._filling_row(lease, block) for block in hashes]
        if len(set(rows)) != len(rows):
            raise NotReserved("a block is named twice in one commit; name each block once")
        marks = [(self._unit_row(lease, unit, hashes), unit.kinds) for unit in units]
        self._leases.renew(lease, monotonic())
        for block, row in zip(hashes, rows, strict=True):
            self._seal(lease, block, row)
        for row, kinds in marks:
            self.mark(row, kinds)
        for row in rows:
            self._mark_forks(row)
        waits = rows + [key for row, _ in marks for key in self._writer.awaited(row)]
        self._host.notify_room()
        ticket = self._writer.tickets.give(waits, lease.namespace)
        self._admission.settle([*rows, *(row for row, _ in marks)])
        return ticket

    def _unit_row(self, lease: Lease, unit: UnitMark, hashes: Sequence[bytes]) -> int:
        if not 0 < unit.kinds <= ALL_KINDS:
            raise InvalidArgument(f"unit kinds {int(unit.kinds)} are no set of UnitKind")
        index, row = self._index, self._index.find(unit.hash)
        known = row != NONE and index.namespace[row] == lease.namespace
        # A block that another worker is filling may bear a mark: it counts once that commits.
        if (
            not known
            or index.state[row] == BlockState.ABSENT
            or (unit.hash in lease.filling and unit.hash not in hashes)
        ):
            raise NotReserved(f"a unit cannot end at {unit.hash[:6].hex()}: that block is not stored")
        return row

    def _seal(self, lease: Lease, block: bytes, row: int) -> None:
        index = self._index
        index.state[row] = BlockState.PRESENT
        index.created[row] = int(self._time.now())
        self._arena.seal(index.slot[row])
        del lease.filling[block]
        self._leases.drop_slot(lease, index.slot[row])
        lease.stored.add(row)
        self._admission.stored(row)
        self._counters["stored_blocks"] += 1

    def _mark_forks(self, row: int) -> None:
        """Where chains part, the prefix that they share is worth a unit of its own."""
        for at in (row, self._index.parent[row]):
            if at != NONE and self._index.forks(at):
                self.mark(at, UnitKind.COMMON_PREFIX)

    def mark(self, row: int, kinds: UnitKind) -> None:
        """Make a unit end at a row; to ask for one that is there is a use of it."""
        now = self._time.now()
        if self._index.mark(row, kinds, now):
            self._writer.unit(row)
        self._index.units[row].used = now
        self._writer.unit_used(row)
