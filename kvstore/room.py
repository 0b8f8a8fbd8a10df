"""Room on the disk: whose blocks take how much of it, and what leaves when it is full."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection

from kvstore.disk import DiskTier
from kvstore.eviction import TailEvictor
from kvstore.prefix_index import PrefixIndex
from kvstore.settings import Policy
from kvstore.spaces import SpaceTable


class Room:
    """Bytes of payloads on disk, by namespace. Owned by the store's event loop."""

    def __init__(
        self,
        index: PrefixIndex,
        disk: DiskTier,
        spaces: SpaceTable,
        policy: Policy,
        evict: Callable[[int], None],
    ) -> None:
        """``evict`` is called on rows that have to leave, and calls ``leave``."""
        self._index = index
        self._disk = disk
        self._spaces = spaces
        self._evictor = TailEvictor(index, policy)
        self._evict = evict
        self.used: Counter[int] = Counter()  # by id of the namespace

    @property
    def used_bytes(self) -> int:
        """Of all namespaces."""
        return self.used.total()

    def enter(self, row: int) -> None:
        """A block is on disk now."""
        self.used[self._index.namespace[row]] += self._stored_bytes(row)

    def leave(self, row: int) -> None:
        """A block that is on disk leaves it."""
        self.used[self._index.namespace[row]] -= self._stored_bytes(row)

    def _stored_bytes(self, row: int) -> int:
        block_bytes = self._spaces.of(self._index.namespace[row]).block_bytes
        return self._disk.stored_bytes(block_bytes, self._index.length[row])

    def need(self, rows: Collection[int]) -> int:
        """Bytes of disk that these blocks take at most, once they are written."""
        sizes = (self._spaces.of(self._index.namespace[row]).block_bytes for row in rows)
        return sum(self._disk.stored_bytes(size, size) for size in sizes)

    def keep_within(self) -> None:
        """Evict what is too much: the disk may have been given fewer bytes."""
        self._evictor.evict(lambda: self.used_bytes <= self._disk.capacity_bytes, self._evict)

    def make(self, block_bytes: int, nbytes: int) -> bool:
        """Evict until so many more bytes, in blocks of this size, fit; False if that can't be had."""
        limit = self._disk.limit_bytes(block_bytes)
        return self._evictor.evict(lambda: self.used_bytes + nbytes <= limit, self._evict)
