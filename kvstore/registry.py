"""Opening namespaces, and retiring those of which there is nothing left.

A namespace that holds nothing (no block, lease or pin, nothing under way) and was not used for a
while is retired: its record leaves the catalogue, and with the last of a block size the files and
slots of that size go. Whoever comes back opens it again, under the same digest and another id. So
trainers that make a namespace a step cost what they use.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice, takewhile
from time import monotonic
from typing import Any

from kvstore.allowance import Share
from kvstore.arena import Arena
from kvstore.disk import DiskTier
from kvstore.errors import DiskError, InvalidArgument
from kvstore.leases import LeaseTable
from kvstore.namespace import Namespace
from kvstore.prefix_index import PrefixIndex
from kvstore.spaces import Space, SpaceTable
from kvstore.writeback import Writer

log = logging.getLogger(__name__)

IDLE_SECONDS = 600.0  # unused for so long, what is empty is retired; sooner only where a limit is reached
MAX_DESCRIPTION = 8192  # bytes of a namespace's canonical JSON
PATIENCE = 10.0  # seconds that what has still to leave the disk is waited for
_RETIRED_A_TXN = 256


class Registry:
    """Part of the store; owned by its event loop like the tables that it works on."""

    def __init__(
        self,
        index: PrefixIndex,
        spaces: SpaceTable,
        leases: LeaseTable,
        arena: Arena,
        disk: DiskTier,
        writer: Writer,
        counters: Counter[str],
    ) -> None:
        self._index = index
        self._spaces = spaces
        self._leases = leases
        self._arena = arena
        self._disk = disk
        self._writer = writer
        self._counters = counters
        self._opening: dict[Namespace, asyncio.Task[Space]] = {}

    async def open(self, namespace: Namespace, opener: str | None) -> Space:
        """The open namespace, registered first if it is new; see ``Store.open_namespace``.

        It is opened once however many ask, and though a caller stops waiting.
        """
        space = self._spaces.find(namespace)
        if space is not None:
            self._spaces.touch(space)
            return space
        task = self._opening.get(namespace)
        if task is None:
            _require_short(namespace)
            task = self._opening[namespace] = asyncio.create_task(self._open(namespace, opener))
            task.add_done_callback(lambda done: self._opened(namespace, done))
        return await asyncio.shield(task)

    def _opened(self, namespace: Namespace, task: asyncio.Task[Space]) -> None:
        del self._opening[namespace]
        if not task.cancelled():
            task.exception()  # seen, even if nobody waits any more

    async def _open(self, namespace: Namespace, opener: str | None) -> Space:
        allowances, size = self._spaces.allowances, namespace.layout.block_bytes
        await self._make_room(namespace.tenant, opener, size)
        shares = allowances.shares(namespace.tenant, opener)
        try:
            for share in shares:
                share.require(size)
            self._spaces.fit(namespace.layout)
            for share in shares:
                share.coming[namespace] = size
            epoch = self._spaces.epochs.first()
            found = await self._writer.record(self._disk.add_namespace, namespace, epoch)
            if found.new and epoch:
                self._spaces.epochs.move(found.number, epoch)
            return self._spaces.find(namespace) or self._spaces.admit(
                found.number, namespace, found.digest, shares
            )
        finally:
            for share in shares:
                share.coming.pop(namespace, None)
            allowances.tidy(shares)
            self._forget_class(size)

    async def _make_room(self, tenant: str, opener: str | None, size: int) -> None:
        """Retire what is empty of a share that is used up, least recently used first, used lately or not."""
        for position in range(len(self._spaces.allowances.shares(tenant, opener))):
            share = self._spaces.allowances.shares(tenant, opener)[position]
            if share.full:
                await self.retire(islice(self._empty(list(share.ids)), 1))
            elif share.crowded(size):
                await self.retire(self._empty_size(share))

    def _empty(self, ids: Iterable[int]) -> Iterator[Space]:
        return (self._spaces.of(number) for number in ids if self._is_empty(number))

    def _empty_size(self, share: Share) -> list[Space]:
        """All namespaces of one size of blocks, of a size of which all are empty; none if there is none."""
        for ids in share.by_size.values():
            if all(map(self._is_empty, ids)):
                return list(self._empty(ids))
        return []

    def _is_empty(self, number: int) -> bool:
        return not (
            self._index.population[number] or self._leases.any_in(number) or self._spaces.is_busy(number)
        )

    def page(self, after: int, limit_bytes: int) -> list[Space]:
        """The open namespaces behind an id, as many as have so many bytes of description; at least one."""
        found: list[Space] = []
        for space in self._spaces.behind(after):
            limit_bytes -= len(space.namespace.to_json()) + len(space.digest)
            if limit_bytes < 0 and found:
                break
            found.append(space)
        return found

    async def retire_idle(self, idle_seconds: float = IDLE_SECONDS) -> int:
        """Retire what is empty and was not used for so long; how many. Raises ``DiskError``."""
        since, retired = monotonic() - idle_seconds, 0
        by_use = list(self._spaces.allowances.all.ids)
        idle = list(self._empty(takewhile(lambda number: self._spaces.used(number) <= since, by_use)))
        for start in range(0, len(idle), _RETIRED_A_TXN):
            retired += await self.retire(idle[start : start + _RETIRED_A_TXN])
        return retired

    async def retire(self, spaces: Iterable[Space]) -> int:
        """Retire those of these, which were empty, that are not used meanwhile; how many.

        Raises ``DiskError``, and then they stay open.
        """
        used = {space: self._spaces.used(space.id) for space in spaces}
        if not used or not await self._have_left():
            return 0
        retiring = [space for space, then in used.items() if self._is_unused_since(space, then)]
        if retiring:
            await self._retire(retiring)
        return len(retiring)

    async def _have_left(self) -> bool:
        """Wait until what is gone from the index has left the disk, for its records name namespaces.

        False if that takes long, as it does while the disk fails.
        """
        left, under_way = self._writer.gone(), self._writer.under_way()
        ends: set[asyncio.Future[Any]] = {left}
        ends |= {asyncio.ensure_future(batch.done.wait()) for batch in under_way}
        _, late = await asyncio.wait(ends, timeout=PATIENCE)
        for each in late:
            each.cancel()
        return not late and not any(batch.failed for batch in under_way)

    def _is_unused_since(self, space: Space, then: float) -> bool:
        number = space.id
        return (
            self._spaces.known(number) is not None
            and self._spaces.used(number) == then
            and self._is_empty(number)
        )

    async def _retire(self, retiring: Sequence[Space]) -> None:
        for space in retiring:  # from here on no verb finds them, and who opens one anew comes behind us
            self._spaces.leave(space)
        notes = self._spaces.epochs.retirement([space.id for space in retiring])
        try:
            digests = [space.digest for space in retiring]
            await self._writer.record(self._disk.drop_namespaces, digests, notes)
        except BaseException:
            for space in retiring:
                self._take_back(space)
            raise
        for space in retiring:
            self._spaces.epochs.forget(space.id)
            self._writer.room.used.pop(space.id, None)
            self._writer.tickets.close_namespace(space.id)
        self._counters["retired_namespaces"] += len(retiring)
        for size in {space.block_bytes for space in retiring}:
            await self._drop_size(size)

    def _take_back(self, space: Space) -> None:
        if self._spaces.find(space.namespace) is None:
            shares = self._spaces.allowances.shares(space.namespace.tenant, None)
            self._spaces.admit(space.id, space.namespace, space.digest, shares)

    async def _drop_size(self, size: int) -> None:
        """Give up the slots and files of a block size, unless a namespace has it or is about to."""
        if not self._forget_class(size) or size in self._spaces.known_sizes:
            return
        with contextlib.suppress(DiskError):  # the next start removes what is left
            await self._writer.record(self._disk.drop_size, size)

    def _forget_class(self, size: int) -> bool:
        """Give up the slots of a size that no open namespace has, nor one that is being opened."""
        everyone = self._spaces.allowances.all
        if size in everyone.by_size or size in everyone.coming.values():
            return False
        return self._arena.forget(size)


def _require_short(namespace: Namespace) -> None:
    length = len(namespace.to_json())
    if length > MAX_DESCRIPTION:
        raise InvalidArgument(
            f"the namespace's description has {length} bytes, and may have {MAX_DESCRIPTION}; shorten its"
            " model, revision, adapter, rope or salt"
        )
