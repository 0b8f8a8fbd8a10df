"""Room on the disk: whose blocks take how much of it, and what leaves when it is full."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection

from kvstore.disk import DiskTier
from kvstore.eviction import TailEvictor
from kvstore.prefix_index import PrefixIndex
from kvstore.settings import StoreSettings
from kvstore.spaces import SpaceTable


class Room:
    """Bytes of payloads on disk, by namespace. Owned by the store's event loop."""

    def __init__(
        self,
        index: PrefixIndex,
        disk: DiskTier,
        spaces: SpaceTable,
        settings: StoreSettings,
        evict: Callable[[int], None],
    ) -> None:
        """``evict`` is called on rows that have to leave, and calls ``leave``."""
        self._index = index
        self._disk = disk
        self._spaces = spaces
        self._evictor = TailEvictor(index, settings.policy)
        self._evict = evict
        self._quota, self._quotas = settings.tenant_bytes, dict(settings.tenant_quotas)
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
        """Evict what is too much: the disk, or a tenant, may have been given fewer bytes."""
        for tenant in {space.namespace.tenant for space in self._spaces}:
            if quota := self._quota_of(tenant):
                self._make_for(self._ids_of(tenant), quota)
        self._evictor.evict(lambda: self.used_bytes <= self._disk.capacity_bytes, self._evict)

    def make(self, block_bytes: int, nbytes: int) -> bool:
        """Evict until so many more bytes, in blocks of this size, fit; False if that can't be had."""
        limit = self._disk.limit_bytes(block_bytes)
        return self._evictor.evict(lambda: self.used_bytes + nbytes <= limit, self._evict)

    def beyond_quota(self, rows: Collection[int], under_way: Collection[int]) -> list[int]:
        """Evict from the tenants of these rows, each its own, what their quotas need; rows that still
        do not fit beside those ``under_way``. Rows come parents first.
        """
        if not (self._quota or self._quotas):
            return []
        mine: defaultdict[str, list[int]] = defaultdict(list)
        for row in rows:
            mine[self._tenant(row)].append(row)
        beyond: list[int] = []
        for tenant, own in mine.items():
            if quota := self._quota_of(tenant):
                ids = self._ids_of(tenant)
                coming = self.need([row for row in under_way if self._index.namespace[row] in ids])
                fits = self._fitting(own, quota - coming)
                while fits and not self._make_for(ids, quota - coming - self.need(own[:fits])):
                    fits -= 1
                beyond += own[fits:]
        return beyond

    def _fitting(self, rows: list[int], nbytes: int) -> int:
        """How many of the first rows so many bytes are enough for."""
        for count in range(len(rows)):
            nbytes -= self.need(rows[count : count + 1])
            if nbytes < 0:
                return count
        return len(rows)

    def _make_for(self, ids: Collection[int], nbytes: int) -> bool:
        """Evict from these namespaces until they have no more than so many bytes; False if they have."""
        return self._evictor.evict(lambda: sum(self.used[each] for each in ids) <= nbytes, self._evict, ids)

    def _tenant(self, row: int) -> str:
        return self._spaces.of(self._index.namespace[row]).namespace.tenant

    def _quota_of(self, tenant: str) -> int:
        return self._quotas.get(tenant, self._quota)

    def _ids_of(self, tenant: str) -> set[int]:
        return {space.id for space in self._spaces if space.namespace.tenant == tenant}
