"""Who holds what, and until when. Owned by the store's event loop.

A lease keeps rows of the index (their blocks are not evicted) and slots of the arena.
Rows are given up when the clock says so; slots that a worker has mapped only when that
worker returns them or dies, for a stopped worker that wakes up late must not touch a
slot that holds another block.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from kvstore.arena import Arena
from kvstore.errors import LeaseUnknown
from kvstore.prefix_index import PrefixIndex

ID_BITS = 63  # of a lease: nobody guesses one


@dataclass(eq=False)
class Holder:
    """One worker connection. ``mapped`` workers see the arena; the others get bytes."""

    token: bytes
    mapped: bool
    held_bytes: int = 0
    leases: dict[int, Lease] = field(default_factory=dict)


@dataclass(eq=False)
class Lease:
    """Rows and slots that one Load or one series of Reserves keeps."""

    id: int
    holder: Holder
    namespace: int
    block_bytes: int  # all slots of a lease are of one size
    expires: float  # monotonic seconds
    expired: bool = False  # by the clock
    ended: bool = False  # forgotten by the table
    rows: list[int] = field(default_factory=list)
    slots: Counter[int] = field(default_factory=Counter)
    filling: dict[bytes, int] = field(default_factory=dict)  # block hash -> row
    stored: set[int] = field(default_factory=set)  # rows that it filled and sealed

    @property
    def live(self) -> bool:
        """Whether its rows are kept; after that their numbers may mean other blocks."""
        return not (self.expired or self.ended)


class LeaseTable:
    """All leases. Holds and unholds go through here so that none is forgotten."""

    def __init__(self, index: PrefixIndex, arena: Arena, *, seconds: float) -> None:
        self._index = index
        self._arena = arena
        self._seconds = seconds
        self._leases: dict[int, Lease] = {}
        self._of_namespace: Counter[int] = Counter()

    def __len__(self) -> int:
        return len(self._leases)

    def __iter__(self) -> Iterator[Lease]:
        return iter(list(self._leases.values()))

    def open(self, holder: Holder, namespace: int, block_bytes: int, now: float) -> Lease:
        """A new lease of a worker."""
        lease = Lease(self._fresh_id(), holder, namespace, block_bytes, now + self._seconds)
        self._leases[lease.id] = holder.leases[lease.id] = lease
        self._of_namespace[namespace] += 1
        return lease

    def _fresh_id(self) -> int:
        """An id that tells nothing, neither of other leases nor of how many there are; 0 stands for none.

        So it is not taken for one from before a restart, either.
        """
        while True:
            number = secrets.randbits(ID_BITS)
            if number and number not in self._leases:
                return number

    def any_in(self, namespace: int) -> bool:
        """Whether somebody has a lease in a namespace."""
        return self._of_namespace[namespace] > 0

    def get(self, holder: Holder, lease_id: int) -> Lease:
        """A live lease of this worker; ``LeaseUnknown`` if foreign, released or expired."""
        lease = holder.leases.get(lease_id)
        if lease is None:
            raise LeaseUnknown(
                f"lease {lease_id} is not held by this worker, or has ended; reserve again without a lease"
            )
        if lease.expired:
            raise LeaseUnknown(f"lease {lease_id} expired after {self._seconds:g} s unused; reserve again")
        return lease

    def renew(self, lease: Lease, now: float) -> None:
        """The lease was used."""
        lease.expires = now + self._seconds

    def keep_row(self, lease: Lease, row: int) -> None:
        """Hold a row until the lease ends or expires."""
        self._index.hold(row)
        lease.rows.append(row)

    def keep_slot(self, lease: Lease, slot: int) -> None:
        """Count a slot to the lease, with a hold that the caller has taken."""
        lease.slots[slot] += 1
        lease.holder.held_bytes += lease.block_bytes

    def drop_slot(self, lease: Lease, slot: int) -> None:
        """Give one hold of a slot back, unless that was taken from the lease already."""
        if not lease.slots[slot]:
            return
        lease.slots[slot] -= 1
        if not lease.slots[slot]:
            del lease.slots[slot]
        lease.holder.held_bytes -= lease.block_bytes
        self._arena.unhold(slot)

    def drop_rows(self, lease: Lease) -> None:
        """Stop keeping the lease's rows."""
        rows, lease.rows = lease.rows, []
        for row in reversed(rows):
            self._index.unhold(row)

    def drop_slots(self, lease: Lease) -> None:
        """Give all slots of the lease back."""
        for slot in list(lease.slots.elements()):
            self.drop_slot(lease, slot)

    def forget(self, lease: Lease) -> None:
        """The lease is over; its rows and slots must have been dropped."""
        lease.ended = True
        if self._leases.pop(lease.id, None) is not None:
            self._of_namespace[lease.namespace] -= 1
            if not self._of_namespace[lease.namespace]:
                del self._of_namespace[lease.namespace]
        lease.holder.leases.pop(lease.id, None)

    def due(self, now: float) -> list[Lease]:
        """Leases whose clock has run out and that have not been expired yet."""
        return [lease for lease in self._leases.values() if not lease.expired and lease.expires <= now]
