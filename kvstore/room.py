"""Room on the disk: whose blocks take how much of it, and what leaves when it is full."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence

from kvstore.disk import DiskTier
from kvstore.eviction import TailEvictor
from kvstore.prefix_index import NONE, PrefixIndex
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
        is_loose: Callable[[int], bool],
    ) -> None:
        """``evict`` is called on rows that have to leave, and calls ``leave``; see ``TailEvictor``."""
        self._index = index
        self._disk = disk
        self._spaces = spaces
        self._evictor = TailEvictor(index, settings.policy, is_loose)
        self._evict = evict
        self._quota, self._quotas = settings.tenant_bytes, dict(settings.tenant_quotas)
        self.used: Counter[int] = Counter()  # by id of the namespace
        self._left = 0  # bytes that have left since the start

    @property
    def used_bytes(self) -> int:
        """Of all namespaces."""
        return self.used.total()

    def enter(self, row: int, length: int) -> None:
        """A block is on disk now, with so many bytes stored."""
        self.used[self._index.namespace[row]] += self._stored_bytes(row, length)

    def leave(self, row: int) -> None:
        """A block that is on disk leaves it."""
        namespace = self._index.namespace[row]
        nbytes = self._stored_bytes(row, self._index.length[row])
        self.used[namespace] -= nbytes
        if not self.used[namespace]:
            del self.used[namespace]
        self._left += nbytes

    def _stored_bytes(self, row: int, length: int) -> int:
        return self._disk.stored_bytes(self._block_bytes(row), length)

    def need(self, rows: Iterable[int]) -> int:
        """Bytes of disk that these blocks take at most, once they are written."""
        return sum(map(self._need, rows))

    def _need(self, row: int) -> int:
        return self._stored_bytes(row, self._block_bytes(row))

    def keep_within(self) -> None:
        """Evict what is too much: the disk, or a tenant, may have been given fewer bytes."""
        for tenant in {space.namespace.tenant for space in self._spaces}:
            if quota := self._quota_of(tenant):
                self._make_for(self._spaces.allowances.ids_of(tenant), quota)
        self._free(self.used_bytes - self._disk.capacity_bytes)

    def make(self, block_bytes: int, nbytes: int) -> bool:
        """Evict until so many more bytes, in blocks of this size, fit; False if that can't be had."""
        return self._free(self.used_bytes + nbytes - self._disk.limit_bytes(block_bytes))

    def _free(self, nbytes: int, among: Collection[int] | None = None) -> bool:
        """Evict until so many bytes have left (of these namespaces); False if there is no more to evict."""
        goal = self._left + nbytes
        return self._evictor.evict(lambda: self._left >= goal, self._evict, among)

    def fitting(self, rows: Sequence[int], under_way: int) -> int:
        """Evict what blocks of one layout need beside so many bytes; how many of the first of them fit."""
        size = self._block_bytes(rows[0])
        if self.make(size, under_way + self.need(rows)):
            return len(rows)
        return self._first(rows, self._disk.limit_bytes(size) - self.used_bytes - under_way)

    def never_fits(self, row: int) -> bool:
        """Whether a block and those before it are more than the whole disk may hold."""
        index, limit = self._index, self._disk.limit_bytes(self._block_bytes(row))
        if index.depth[row] * self._need(row) <= limit:
            return False
        nbytes = 0
        while row != NONE and nbytes <= limit:
            written = index.place[row] != NONE
            nbytes += self._stored_bytes(row, index.length[row]) if written else self._need(row)
            row = index.parent[row]
        return nbytes > limit

    def _block_bytes(self, row: int) -> int:
        return self._spaces.of(self._index.namespace[row]).block_bytes

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
                ids = self._spaces.allowances.ids_of(tenant)
                free = quota - self.need(row for row in under_way if self._index.namespace[row] in ids)
                # What is more than the whole quota would evict in vain.
                fits = self._first(own, free)
                self._make_for(ids, free - self.need(own[:fits]))
                beyond += own[self._first(own, free - self._used_by(ids)) :]
        return beyond

    def _first(self, rows: Sequence[int], nbytes: int) -> int:
        """How many of the first rows so many bytes are enough for."""
        for count, row in enumerate(rows):
            nbytes -= self._need(row)
            if nbytes < 0:
                return count
        return len(rows)

    def _make_for(self, ids: Collection[int], nbytes: int) -> bool:
        """Evict from these namespaces until they have no more than so many bytes; False if they have."""
        return self._free(self._used_by(ids) - nbytes, ids)

    def _used_by(self, ids: Collection[int]) -> int:
        return sum(self.used[each] for each in ids)

    def _tenant(self, row: int) -> str:
        return self._spaces.of(self._index.namespace[row]).namespace.tenant

    def _quota_of(self, tenant: str) -> int:
        return self._quotas.get(tenant, self._quota)
