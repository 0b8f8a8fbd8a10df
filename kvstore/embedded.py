"""The embedded store: the same verbs as a daemon's client, in-process and synchronous.

The store's event loop runs in a thread of its own; every verb is one call into it.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import weakref
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar

from kvstore.api import (
    Load,
    Match,
    MissReason,
    Readers,
    Reservation,
    ReservedBlock,
    ReserveState,
    Status,
)
from kvstore.arguments import bounded_hashes, bounded_tokens, digest, unsigned
from kvstore.clock import Clock
from kvstore.curation import Curator
from kvstore.delivery import BlockLoad, EndedLoad
from kvstore.ending import end_when_dropped
from kvstore.errors import Unavailable
from kvstore.layout import BLOCK_TOKENS
from kvstore.leases import Holder
from kvstore.lending import Fills, Lent, when_unseen
from kvstore.loading import LoadStream
from kvstore.looping import CALL_SECONDS, LoopThread
from kvstore.namespace import Namespace
from kvstore.payloads import OpenPayloads
from kvstore.reopening import Opened, reopening
from kvstore.settings import StoreSettings
from kvstore.store import Reserved, Store
from kvstore.units import UnitMark

log = logging.getLogger(__name__)

Result = TypeVar("Result")


class Embedded:
    """A ``KVStore`` that owns its data directory. Thread-safe; close it, or use it as a context.

    One that is dropped is closed in the background. In a forked child every call is refused, closing does
    nothing, and the directory stays the parent's alone.
    """

    def __init__(
        self,
        settings: StoreSettings,
        open_payloads: OpenPayloads | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.opened = Opened()
        self._loop = LoopThread()
        try:
            self._store = self._loop.run(Store.open(settings, open_payloads, clock=clock), None)
        except BaseException:
            self._loop.close()
            raise
        self._holder = self._store.connect(secrets.token_bytes(16), mapped=True)
        self._leases: dict[int, Fills] = {}
        self._loads: weakref.WeakSet[BlockLoad] = weakref.WeakSet()
        self._ending = end_when_dropped(
            self, partial(_close, self._loop, self._store, self._leases, self._loads)
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self, work: Coroutine[Any, Any, Result], timeout: float | None = CALL_SECONDS) -> Result:
        return self._loop.run(work, timeout)

    def _call(self, work: Callable[[], Result]) -> Result:
        return self._loop.call(work)

    def open_namespace(self, namespace: Namespace) -> bytes:
        """See ``KVStore.open_namespace``."""
        digest = self._run(self._store.open_namespace(namespace))
        self.opened.note(digest, namespace)
        return digest

    @reopening
    def match(
        self,
        namespace: bytes,
        hashes: Sequence[bytes],
        tokens: int,
        *,
        align: int = BLOCK_TOKENS,
        store: bool = False,
        counted: int = 0,  # nobody counts by request here
    ) -> Match:
        """See ``KVStore.match``."""
        digest(namespace)
        bounded_hashes(hashes)
        bounded_tokens(tokens)
        unsigned("align", align, 32)
        unsigned("counted", counted)
        try:
            return self._call(lambda: self._store.match(namespace, hashes, tokens, align=align, store=store))
        except Unavailable as error:
            log.warning("event=match_unanswered reason=%s", error)
            return Match(reason=MissReason.UNAVAILABLE)

    @reopening
    def load(
        self,
        namespace: bytes,
        hashes: Sequence[bytes],
        *,
        first: int = 0,
        timeout: float = 60.0,
        readers: Readers | None = None,
        counted: int = 0,  # nobody counts by request here
    ) -> Load:
        """See ``KVStore.load``."""
        digest(namespace)
        bounded_hashes(hashes)
        unsigned("first", first, 32)
        unsigned("counted", counted, 32)
        try:
            stream = self._call(lambda: self._store.load(self._holder, namespace, hashes, first, readers))
        except Unavailable as error:
            log.warning("event=load_unanswered reason=%s", error)
            return EndedLoad(first)
        source = _StreamSource(self._loop, self._store, self._holder, stream, timeout)
        load = BlockLoad(source, first, len(hashes), self)
        self._loads.add(load)
        if not self._ending.alive:  # closed meanwhile, by another thread
            load.close(wait=False)
        return load

    @reopening
    def reserve(
        self,
        namespace: bytes,
        parent: bytes,
        hashes: Sequence[bytes],
        *,
        lease: int = 0,
        epoch: int | None = None,
    ) -> Reservation:
        """See ``KVStore.reserve``."""
        digest(namespace)
        bounded_hashes(hashes)
        if epoch is not None:
            unsigned("epoch", epoch)

        def reserve() -> tuple[Reserved, int]:
            answer = self._store.reserve(self._holder, namespace, parent, hashes, lease, epoch)
            return answer, self._store.space(namespace).block_bytes

        answer, block_bytes = self._call(reserve)
        offsets = iter(answer.offsets)
        fills = self._leases.setdefault(answer.lease, Fills())
        blocks = (
            ReservedBlock(
                block,
                state,
                fills.lend(block, _slice(self._store, next(offsets), block_bytes))
                if state is ReserveState.FILL
                else None,
            )
            for block, state in zip(hashes, answer.states, strict=True)
        )
        return Reservation(answer.lease, tuple(blocks))

    def commit(self, lease: int, hashes: Sequence[bytes], units: Sequence[UnitMark] = ()) -> int:
        """See ``KVStore.commit``."""
        bounded_hashes(hashes)
        fills = self._leases.get(lease)
        if fills is not None:
            fills.seal(hashes)
        ticket = self._call(lambda: self._store.commit(self._holder, lease, hashes, units))
        if fills is not None:
            fills.forget(hashes)
        return ticket

    def durable(self, ticket: int, *, timeout: float = 60.0) -> bool:
        """See ``KVStore.durable``."""
        return self._run(self._store.durable(unsigned("ticket", ticket)), timeout)

    def release(self, lease: int) -> None:
        """See ``KVStore.release``."""
        self._loop.require_home()
        fills = self._leases.pop(lease, None)
        _release(self._loop, self._store, self._holder, lease, fills.end() if fills is not None else [])

    def status(self) -> Status:
        """See ``KVStore.status``."""
        return self._call(self._store.status)

    def curate(self, work: Callable[[Curator], Coroutine[Any, Any, Result]], timeout: float = 60.0) -> Result:
        """What an operator does: ``store.curate(lambda it: it.delete_unit(name))``; see ``Curator``."""
        return self._run(work(self._store.keeping.curator), timeout)

    def expire(self, now: float) -> int:
        """Drop what has expired when the wall clock shows ``now``, as the store does by itself; how many
        blocks.
        """
        return self._run(self._store.keeping.expire(now), None)

    def check(self) -> list[str]:
        """Violated invariants of the store's tables; empty when sound."""
        return self._call(self._store.check)

    def close(self) -> None:
        """End all loads and leases, make what is dirty durable and give the data directory up.

        A second call does nothing.
        """
        if self._loop.here and self._ending.detach() is not None:
            _close(self._loop, self._store, self._leases, self._loads)


def _close(
    loop: LoopThread, store: Store, leases: dict[int, Fills], loads: weakref.WeakSet[BlockLoad]
) -> None:
    for load in list(loads):
        load.close(wait=False)
    for fills in list(leases.values()):
        fills.end()
    leases.clear()
    loop.close(store.close())


def _release(loop: LoopThread, store: Store, holder: Holder, lease: int, seen: Sequence[Lent]) -> None:
    """End a lease once nobody can look at its slots any more."""

    def release() -> None:
        with contextlib.suppress(Unavailable):  # closed meanwhile: nothing is held any more
            loop.call(lambda: store.release(holder, lease))

    when_unseen(seen, release)


def _slice(store: Store, offset: int, nbytes: int) -> memoryview:
    return store.arena.memory[offset : offset + nbytes]


class _StreamSource:
    """The blocks of a stream in this process, where they lie."""

    def __init__(
        self, loop: LoopThread, store: Store, holder: Holder, stream: LoadStream, timeout: float
    ) -> None:
        self._loop = loop
        self._store = store
        self._holder = holder
        self._stream = stream
        self._timeout = timeout
        self._returned: list[int] = []  # not given back yet: that goes along with the next call

    def receive(self, expected: int) -> list[Lent] | int:
        """See ``Source``."""
        returned, self._returned = self._returned, []
        batch, short = self._loop.run(_next(self._stream, returned), self._timeout)
        if not batch:
            return expected if short is None else short
        nbytes = self._stream.block_bytes
        return [Lent(_slice(self._store, offset, nbytes), readonly=True) for _, offset in batch]

    def give_back(self, indices: Sequence[int]) -> None:
        """See ``Source``."""
        self._returned = [*self._returned, *indices]

    def end(self, seen: Sequence[Lent], *, wait: bool) -> None:
        """See ``Source``."""
        stream = self._stream
        with contextlib.suppress(Unavailable):  # closed meanwhile: nothing is held any more
            self._loop.call(lambda: stream.close(returned=not seen))
        if seen:
            _release(self._loop, self._store, self._holder, stream.lease, seen)


async def _next(stream: LoadStream, returned: Sequence[int]) -> tuple[list[tuple[int, int]], int | None]:
    stream.give_back(returned)
    return await stream.next(), stream.short
