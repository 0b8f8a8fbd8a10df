"""The namespaces that a store knows, by digest and by the small id its records hold."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from kvstore.arena import Arena
from kvstore.disk import DiskTier
from kvstore.epochs import Epochs
from kvstore.errors import CapacityTooSmall, InvalidArgument, NamespaceUnknown
from kvstore.layout import LatentLayout
from kvstore.namespace import DIGEST_BYTES, Namespace
from kvstore.payloads.direct import PAGE_BYTES

MAX_NAMESPACES = 65536
MAX_BLOCK_SIZES = 64  # each has files, maps and slots of its own

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
    """Registry of namespaces. Digests stay valid over restarts, for the catalogue keeps them."""

    def __init__(self, disk: DiskTier, arena: Arena) -> None:
        self._disk = disk
        self._arena = arena
        self._by_digest: dict[bytes, Space] = {}
        self._by_id: dict[int, Space] = {}
        self._by_namespace: dict[Namespace, Space] = {}
        self.epochs = Epochs()
        self.known_sizes: set[int] = set()  # block bytes of all catalogued namespaces, closed ones too

    def __len__(self) -> int:
        return len(self._by_digest)

    def __iter__(self) -> Iterator[Space]:
        return iter(list(self._by_id.values()))

    def admit(self, number: int, namespace: Namespace, digest: bytes) -> Space:
        """Open a catalogued namespace. Raises ``CapacityTooSmall``."""
        layout = namespace.layout
        space = Space(number, namespace, digest, layout, self.fit(layout), layout.block_bytes)
        self._by_digest[digest] = self._by_id[number] = self._by_namespace[namespace] = space
        return space

    def restore(self) -> None:
        """Open the catalogue's namespaces; those that no longer fit the tiers stay closed.

        What was being erased is erased first. Raises ``DiskError``.
        """
        self.epochs.restore(self._disk.catalog)
        for number, text, digest in self._disk.catalog.namespaces():
            try:
                namespace = Namespace.from_json(text)
                self.known_sizes.add(namespace.layout.block_bytes)
                self.admit(number, namespace, digest)
            except InvalidArgument as error:  # CapacityTooSmall is one
                log.warning("event=namespace_closed id=%d reason=%s", number, error)

    def fit(self, layout: LatentLayout) -> int:
        """The slot class of a layout. Raises ``CapacityTooSmall`` if a tier can't hold one block, or one
        more namespace or size of blocks is too many.
        """
        sizes = self.by_size().keys()
        if len(self) >= MAX_NAMESPACES or len(sizes | {layout.block_bytes}) > MAX_BLOCK_SIZES:
            raise CapacityTooSmall(
                f"{len(self)} namespaces with {len(sizes)} sizes of blocks are open, and no more can be;"
                " use fewer, or start with an empty directory"
            )
        limit = self._disk.limit_bytes(layout.block_bytes)
        if layout.block_bytes + PAGE_BYTES > limit:  # a payload takes whole pages and a header
            raise CapacityTooSmall(
                f"disk: {max(limit, 0)} usable bytes are less than one block of {layout.block_bytes} bytes;"
                " raise disk_bytes"
            )
        return self._arena.register(layout.block_bytes)

    def find(self, namespace: Namespace) -> Space | None:
        """The open space of this very namespace."""
        return self._by_namespace.get(namespace)

    def of(self, number: int) -> Space:
        """The open namespace of an indexed row (rows of closed ones are not indexed)."""
        return self._by_id[number]

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
        return space


def unknown_namespace(digest: bytes) -> NamespaceUnknown:
    """What is said of a digest that is not open, or not to be seen by whoever asks."""
    shown = digest[:8].hex() if len(digest) == DIGEST_BYTES else f"of {len(digest)} bytes"
    return NamespaceUnknown(f"namespace {shown} is not open here; call open_namespace first")
