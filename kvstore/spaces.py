"""The namespaces that a store knows, by digest and by the small id its records hold."""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import monotonic

from kvstore.allowance import MAX_BLOCK_SIZES, MAX_NAMESPACES, Allowances, Share
from kvstore.arena import Arena
from kvstore.disk import DiskTier
from kvstore.epochs import Epochs
from kvstore.errors import CapacityTooSmall, InvalidArgument, NamespaceUnknown
from kvstore.layout import LatentLayout
from kvstore.namespace import DIGEST_BYTES, Namespace
from kvstore.payloads.direct import PAGE_BYTES

__all__ = ["MAX_BLOCK_SIZES", "MAX_NAMESPACES", "Space", "SpaceTable", "unknown_namespace"]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Space:
    """An open namespace: its id, the key of its hash chains, and where its blocks go."""

    id: int
    namespace: Namespace
    digest: bytes
    layout: LatentLayout
    slot_class: int
    block_bytes: int


class SpaceTable:
    """Registry of namespaces. Digests stay valid over restarts, for the catalogue keeps them.

    An id is given once: what knows a namespace by its id never finds another one under it.
    """

    def __init__(self, disk: DiskTier, arena: Arena, allowances: Allowances | None = None) -> None:
        """Without ``allowances`` those of the whole store alone count."""
        self._disk = disk
        self._arena = arena
        self._by_digest: dict[bytes, Space] = {}
        self._by_id: dict[int, Space] = {}
        self._by_namespace: dict[Namespace, Space] = {}
        self._used: dict[int, float] = {}  # by id, monotonic seconds
        self._busy: Counter[int] = Counter()  # by id: what goes on with it
        self._closed: dict[int, tuple[bytes, int]] = {}  # catalogued, not open: digests and sizes by id
        self.allowances = allowances or Allowances(MAX_NAMESPACES, MAX_BLOCK_SIZES)
        self.epochs = Epochs()

    def __len__(self) -> int:
        return len(self._by_digest)

    def __iter__(self) -> Iterator[Space]:
        return iter(list(self._by_id.values()))

    @property
    def known_sizes(self) -> set[int]:
        """Block bytes of all catalogued namespaces, closed ones too."""
        return self.allowances.all.by_size.keys() | {size for _, size in self._closed.values()}

    def admit(self, number: int, namespace: Namespace, digest: bytes, shares: list[Share]) -> Space:
        """Open a catalogued namespace that counts for these shares. Raises ``CapacityTooSmall``."""
        layout = namespace.layout
        space = Space(number, namespace, digest, layout, self.fit(layout), layout.block_bytes)
        self._by_digest[digest] = self._by_id[number] = self._by_namespace[namespace] = space
        self._closed.pop(number, None)
        self.allowances.enter(number, space.block_bytes, shares)
        self.touch(space)
        return space

    def restore(self) -> None:
        """Open the catalogue's namespaces; those that no longer fit the tiers stay closed.

        What was being erased is erased first. Raises ``DiskError``.
        """
        self.epochs.restore(self._disk.catalog)
        for number, text, digest in self._disk.catalog.namespaces():
            try:
                namespace = Namespace.from_json(text)
                self._closed[number] = digest, namespace.layout.block_bytes
                self.admit(number, namespace, digest, self.allowances.shares(namespace.tenant, None))
            except InvalidArgument as error:  # CapacityTooSmall is one
                log.warning("event=namespace_closed id=%d reason=%s", number, error)

    def fit(self, layout: LatentLayout) -> int:
        """The slot class of a layout. Raises ``CapacityTooSmall`` if a tier can't hold one block."""
        limit = self._disk.limit_bytes(layout.block_bytes)
        if layout.block_bytes + PAGE_BYTES > limit:  # a payload takes whole pages and a header
            raise CapacityTooSmall(
                f"disk: {max(limit, 0)} usable bytes are less than one block of {layout.block_bytes} bytes;"
                " raise disk_bytes"
            )
        return self._arena.register(layout.block_bytes)

    def leave(self, space: Space) -> None:
        """A namespace is open no longer. Nothing of it may be left but its record."""
        del self._by_digest[space.digest], self._by_id[space.id], self._by_namespace[space.namespace]
        del self._used[space.id]
        self.allowances.leave(space.id)

    def forget_closed(self, holding: set[int]) -> list[bytes]:
        """Forget the closed namespaces but those that hold something, by id; the digests of the others."""
        idle = self._closed.keys() - holding
        return [self._closed.pop(number)[0] for number in idle]

    def touch(self, space: Space) -> None:
        """Somebody uses it."""
        self._used[space.id] = monotonic()
        self.allowances.touch(space.id)

    def used(self, number: int) -> float:
        """When it was last used, in monotonic seconds."""
        return self._used[number]

    @contextmanager
    def busy(self, space: Space) -> Iterator[None]:
        """Something goes on with a namespace, which therefore stays open."""
        self._busy[space.id] += 1
        try:
            yield
        finally:
            self._busy[space.id] -= 1
            if not self._busy[space.id]:
                del self._busy[space.id]

    def is_busy(self, number: int) -> bool:
        """Whether something goes on with it."""
        return number in self._busy or number in self.epochs.erasing

    def behind(self, number: int) -> Iterator[Space]:
        """The open namespaces whose ids are above this one, by rising id."""
        return (self._by_id[each] for each in sorted(self._by_id) if each > number)

    def find(self, namespace: Namespace) -> Space | None:
        """The open space of this very namespace."""
        return self._by_namespace.get(namespace)

    def of(self, number: int) -> Space:
        """The open namespace of an indexed row (rows of closed ones are not indexed)."""
        return self._by_id[number]

    def known(self, number: int) -> Space | None:
        """The open namespace of an id that may be out of date."""
        return self._by_id.get(number)

    def by_size(self) -> dict[int, list[int]]:
        """Block bytes of the open namespaces, and the ids of those that have such blocks."""
        ids: defaultdict[int, list[int]] = defaultdict(list)
        for number, space in self._by_id.items():
            ids[space.block_bytes].append(number)
        return ids

    def get(self, digest: bytes) -> Space:
        """The open namespace with this digest; ``NamespaceUnknown`` if there is none."""
        space = self._by_digest.get(digest)
        if space is None:
            raise unknown_namespace(digest)
        self.touch(space)
        return space


def unknown_namespace(digest: bytes) -> NamespaceUnknown:
    """What is said of a digest that is not open, or not to be seen by whoever asks."""
    shown = digest[:8].hex() if len(digest) == DIGEST_BYTES else f"of {len(digest)} bytes"
    return NamespaceUnknown(f"namespace {shown} is not open here; call open_namespace first")
