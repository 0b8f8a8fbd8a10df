"""The embedded store: the same verbs as a daemon's client, in-process and synchronous.

The store's event loop runs in a thread of its own; every verb is one call into it.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import secrets
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

from kvstore.api import (
    LoadedBlock,
    Match,
    MissReason,
    Readers,
    Reservation,
    ReservedBlock,
    ReserveState,
    Status,
)
from kvstore.clock import Clock
from kvstore.curation import Curator
from kvstore.errors import DeadlineExceeded, Unavailable
from kvstore.hashing import check_hashes
from kvstore.layout import BLOCK_TOKENS
from kvstore.loading import LoadStream
from kvstore.namespace import Namespace
from kvstore.payloads import OpenPayloads
from kvstore.reopening import Opened, reopening
from kvstore.settings import StoreSettings
from kvstore.store import Reserved, Store
from kvstore.units import UnitMark

log = logging.getLogger(__name__)

Result = TypeVar("Result")

CALL_SECONDS = 30.0  # bound of the verbs that wait for nothing but the loop


class Embedded:
    """A ``KVStore`` that owns its data directory. Thread-safe; close it, or use it as a context."""

    def __init__(
        self,
        settings: StoreSettings,
        open_payloads: OpenPayloads | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.opened = Opened()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="latentkv-loop", daemon=True)
        self._thread.start()
        self._lock = threading.Lock()  # a call enters the loop before it is closed, or not at all
        self._closed = False
        try:
            self._store = self._run(Store.open(settings, open_payloads, clock=clock), None)
        except BaseException:
            self._enter_closed()
            self._stop_loop()
            raise
        self._holder = self._store.connect(secrets.token_bytes(16), mapped=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self, work: Coroutine[Any, Any, Result], timeout: float | None = CALL_SECONDS) -> Result:
        with self._lock:
            if self._closed:
                work.close()
                raise Unavailable("this store is closed; open it again")
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(timeout)
        except concurrent.futures.TimeoutError:
            future.cancel()
            raise DeadlineExceeded(f"the store did not answer within {timeout} s") from None
        except concurrent.futures.CancelledError:
            raise Unavailable("this store was closed during the call; open it again") from None

    def _call(self, work: Callable[[], Result]) -> Result:
        async def call() -> Result:
            return work()

        return self._run(call())

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
        check_hashes(hashes)
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
    ) -> EmbeddedLoad:
        """See ``KVStore.load``."""
        try:
            stream = self._call(lambda: self._store.load(self._holder, namespace, hashes, first, readers))
        except Unavailable as error:
            log.warning("event=load_unanswered reason=%s", error)
            return EmbeddedLoad(self, None, first, timeout)
        return EmbeddedLoad(self, stream, first, timeout)

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

        def reserve() -> tuple[Reserved, int]:
            answer = self._store.reserve(self._holder, namespace, parent, hashes, lease, epoch)
            return answer, self._store.space(namespace).block_bytes

        answer, block_bytes = self._call(reserve)
        offsets = iter(answer.offsets)
        blocks = (
            ReservedBlock(
                block,
                state,
                self._slice(next(offsets), block_bytes) if state is ReserveState.FILL else None,
            )
            for block, state in zip(hashes, answer.states, strict=True)
        )
        return Reservation(answer.lease, tuple(blocks))

    def _slice(self, offset: int, nbytes: int) -> memoryview:
        return self._store.arena.memory[offset : offset + nbytes]

    def commit(self, lease: int, hashes: Sequence[bytes], units: Sequence[UnitMark] = ()) -> int:
        """See ``KVStore.commit``."""
        return self._call(lambda: self._store.commit(self._holder, lease, hashes, units))

    def durable(self, ticket: int, *, timeout: float = 60.0) -> bool:
        """See ``KVStore.durable``."""
        return self._run(self._store.durable(ticket), timeout)

    def release(self, lease: int) -> None:
        """See ``KVStore.release``."""
        self._call(lambda: self._store.release(self._holder, lease))

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
        """Make what is dirty durable and give the data directory up; a second call does nothing."""
        if not self._enter_closed():
            return
        try:
            asyncio.run_coroutine_threadsafe(self._store.close(), self._loop).result()
        finally:
            self._stop_loop()

    def _enter_closed(self) -> bool:
        with self._lock:
            before, self._closed = self._closed, True
        return not before

    def _stop_loop(self) -> None:
        asyncio.run_coroutine_threadsafe(_cancel_others(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _cancel_others() -> None:
    """End the calls that still wait, so that their callers learn of the end."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


class EmbeddedLoad:
    """A ``Load`` over an in-process stream; None stands for one that could not be opened."""

    def __init__(self, store: Embedded, stream: LoadStream | None, first: int, timeout: float) -> None:
        self._store = store
        self._stream = stream
        self._timeout = timeout
        self._reached = first  # leading hashes that were delivered
        self._failed = stream is None

    @property
    def short(self) -> int | None:
        """See ``kvstore.api.Load``."""
        if self._failed or self._stream is None:
            return self._reached
        return self._stream.short

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        stream = self._stream
        if stream is not None:
            with contextlib.suppress(Unavailable):  # closed meanwhile: nothing is held any more
                self._store._call(lambda: stream.close(returned=True))

    def __iter__(self) -> Iterator[list[LoadedBlock]]:
        if self._stream is None or self._failed:
            return
        stream = self._stream
        while batch := self._step(stream):
            yield [LoadedBlock(index, self._view(offset, stream.block_bytes)) for index, offset in batch]

    def _step(self, stream: LoadStream) -> list[tuple[int, int]]:
        try:
            batch = self._store._run(_next(stream), self._timeout)
        except Unavailable as error:  # a miss from here on, never an exception in the model's path
            log.warning("event=load_unanswered reason=%s", error)
            self._failed = True
            return []
        if batch:
            self._reached = batch[-1][0] + 1
        return batch

    def _view(self, offset: int, nbytes: int) -> memoryview:
        return self._store._slice(offset, nbytes).toreadonly()


async def _next(stream: LoadStream) -> list[tuple[int, int]]:
    stream.give_back(stream.announced())
    return await stream.next()
