"""Calls that every store must refuse, each with the class that it must refuse them by."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvstore.api import KVStore
from kvstore.arguments import MAX_HASHES, MAX_TOKENS
from kvstore.errors import (
    CapacityTooSmall,
    InvalidArgument,
    KVStoreError,
    LeaseUnknown,
    NamespaceMismatch,
    NamespaceUnknown,
    NotReserved,
    ParentMissing,
    TicketUnknown,
)
from kvstore.hashing import ROOT, block_hashes
from kvstore.layout import LatentLayout
from kvstore.namespace import Namespace
from kvstore.testing.chains import OTHER, SMALL, content, end_of, store_chain, tokens
from kvstore.units import UnitKind, UnitMark

END = UnitKind.REQUEST_END
STRANGE = b"s" * 32
HUGE = LatentLayout(num_layers=4000, latent_rank=4096)


@dataclass(frozen=True)
class World:
    """A chain of four stored blocks, and four more that a lease has reserved and filled."""

    store: KVStore
    namespace: bytes
    other: bytes
    hashes: list[bytes]
    lease: int

    @classmethod
    def make(cls, store: KVStore, salt: str) -> World:
        """In namespaces of its own."""
        namespace = store.open_namespace(Namespace(layout=SMALL, salt=salt))
        hashes = block_hashes(namespace, tokens(1, 8))
        assert store_chain(store, namespace, hashes[:4])
        other = store.open_namespace(Namespace(layout=OTHER, salt=salt))
        answer = store.reserve(namespace, hashes[3], hashes[4:])
        for block in answer.blocks:
            assert block.data is not None
            block.data[:] = content(block.hash, SMALL.block_bytes)
        return cls(store, namespace, other, hashes, answer.lease)

    def state(self) -> tuple[object, ...]:
        """What a wrong call must not change."""
        status = self.store.status()
        matched = self.store.match(self.namespace, self.hashes, 1000)
        return status.leases, status.host, status.disk, status.units, matched.blocks, matched.stored_blocks

    def reserve(self, parent: bytes, hashes: Sequence[bytes], lease: int = 0) -> object:
        """Reserve in the namespace."""
        return self.store.reserve(self.namespace, parent, hashes, lease=lease)

    def match(self, hashes: Sequence[bytes], tokens: int, align: int = 64) -> object:
        """Match in the namespace."""
        return self.store.match(self.namespace, hashes, tokens, align=align)

    def load(self, hashes: Sequence[bytes], first: int = 0) -> object:
        """Load in the namespace."""
        return self.store.load(self.namespace, hashes, first=first)

    def commit(self, hashes: Sequence[bytes], *units: UnitMark) -> object:
        """Commit under the lease."""
        return self.store.commit(self.lease, hashes, units)


Call = Callable[[World], object]


def _hashes_like(bad: Any) -> dict[str, tuple[type[KVStoreError], Call]]:
    """Each call that takes hashes, with a value that is none."""
    return {
        f"match of {bad!r:.12}": (InvalidArgument, lambda w: w.match([bad], 64)),
        f"load of {bad!r:.12}": (InvalidArgument, lambda w: w.load([bad])),
        f"parent {bad!r:.12}": (InvalidArgument, lambda w: w.reserve(bad, [STRANGE])),
        f"reserve of {bad!r:.12}": (InvalidArgument, lambda w: w.reserve(ROOT, [bad])),
        f"commit of {bad!r:.12}": (InvalidArgument, lambda w: w.commit([bad])),
        f"mark at {bad!r:.12}": (InvalidArgument, lambda w: w.commit([], UnitMark(bad, END))),
    }


def _unit_kinds(kinds: int) -> tuple[type[KVStoreError], Call]:
    return InvalidArgument, lambda w: w.commit([], UnitMark(w.hashes[3], kinds))  # type: ignore[arg-type]


WRONG_CALLS: dict[str, tuple[type[KVStoreError], Call]] = {
    **_hashes_like(b""),
    **_hashes_like(b"x" * 31),
    **_hashes_like(bytearray(32)),
    "commit of a strange block": (NotReserved, lambda w: w.commit([STRANGE], *end_of(w.hashes))),
    "commit of a stored block": (NotReserved, lambda w: w.commit(w.hashes[:1], *end_of(w.hashes))),
    "commit with a strange block": (NotReserved, lambda w: w.commit([*w.hashes[4:], STRANGE])),
    "commit of one block twice": (NotReserved, lambda w: w.commit([w.hashes[4]] * 2)),
    "mark at a strange block": (NotReserved, lambda w: w.commit([w.hashes[4]], UnitMark(STRANGE, END))),
    "mark at an open block": (NotReserved, lambda w: w.commit([w.hashes[4]], UnitMark(w.hashes[6], END))),
    "no unit kind": _unit_kinds(0),
    "unknown unit kind": _unit_kinds(8),
    "negative unit kind": _unit_kinds(-1),
    "commit under a strange lease": (LeaseUnknown, lambda w: w.store.commit(w.lease + 1, w.hashes[4:])),
    "reserve under a strange lease": (LeaseUnknown, lambda w: w.reserve(ROOT, w.hashes, w.lease + 1)),
    "lease of another namespace": (
        NamespaceMismatch,
        lambda w: w.store.reserve(w.other, ROOT, [STRANGE], lease=w.lease),
    ),
    "unknown parent": (ParentMissing, lambda w: w.reserve(STRANGE, [STRANGE])),
    "parent of another namespace": (
        ParentMissing,
        lambda w: w.store.reserve(w.other, w.hashes[3], [STRANGE]),
    ),
    "stored block of another namespace": (
        NamespaceMismatch,
        lambda w: w.store.reserve(w.other, ROOT, [w.hashes[0]]),
    ),
    "open block of another namespace": (
        NamespaceMismatch,
        lambda w: w.store.reserve(w.other, ROOT, [w.hashes[5]]),
    ),
    "a ring": (InvalidArgument, lambda w: w.reserve(w.hashes[3], [w.hashes[0]])),
    "a second root": (InvalidArgument, lambda w: w.reserve(ROOT, [w.hashes[1]])),
    "a shortcut": (InvalidArgument, lambda w: w.reserve(w.hashes[0], [w.hashes[2]])),
    "a foreign start": (InvalidArgument, lambda w: w.reserve(ROOT, [STRANGE, w.hashes[1]])),
    "reserve of one block twice": (InvalidArgument, lambda w: w.reserve(ROOT, [STRANGE, STRANGE])),
    "match in no namespace": (NamespaceUnknown, lambda w: w.store.match(b"n" * 32, [], 1)),
    "load in no namespace": (NamespaceUnknown, lambda w: w.store.load(b"n" * 32, [])),
    "reserve in no namespace": (NamespaceUnknown, lambda w: w.store.reserve(b"n" * 32, ROOT, [])),
    "tokens too few": (InvalidArgument, lambda w: w.match(w.hashes, 100)),
    "align 0": (InvalidArgument, lambda w: w.match(w.hashes, 512, 0)),
    "negative align": (InvalidArgument, lambda w: w.match(w.hashes, 512, -64)),
    "odd align": (InvalidArgument, lambda w: w.match(w.hashes, 512, 96)),
    "negative first": (InvalidArgument, lambda w: w.load(w.hashes, -1)),
    "first beyond": (InvalidArgument, lambda w: w.load(w.hashes, 9)),
    "namespace that is no digest": (InvalidArgument, lambda w: w.store.match(b"n", [], 1)),
    "load in no digest": (InvalidArgument, lambda w: w.store.load(b"n", [])),
    "reserve in no digest": (InvalidArgument, lambda w: w.store.reserve(b"n", ROOT, [])),
    "negative tokens": (InvalidArgument, lambda w: w.match([], -1)),
    "half a token": (InvalidArgument, lambda w: w.match([], 1.5)),  # type: ignore[arg-type]
    "more tokens than a call may have": (InvalidArgument, lambda w: w.match([], MAX_TOKENS + 1)),
    "more hashes than a call may have": (InvalidArgument, lambda w: w.match([STRANGE] * (MAX_HASHES + 1), 1)),
    "huge align": (InvalidArgument, lambda w: w.match([], 64, 1 << 38)),
    "negative counted": (
        InvalidArgument,
        lambda w: w.store.match(w.namespace, w.hashes, 512, counted=-1),
    ),
    "load with negative counted": (
        InvalidArgument,
        lambda w: w.store.load(w.namespace, w.hashes, counted=-1),
    ),
    "half a first": (InvalidArgument, lambda w: w.load(w.hashes, 1.5)),  # type: ignore[arg-type]
    "negative epoch": (
        InvalidArgument,
        lambda w: w.store.reserve(w.namespace, ROOT, w.hashes, epoch=-1),
    ),
    "negative ticket": (InvalidArgument, lambda w: w.store.durable(-1)),
    "unknown ticket": (TicketUnknown, lambda w: w.store.durable(77)),
    "block larger than a tier": (CapacityTooSmall, lambda w: w.store.open_namespace(Namespace(HUGE))),
}
