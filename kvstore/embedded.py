"""The embedded store: the same verbs as a daemon's client, in-process and synchronous.

The store's event loop runs in a thread of its own; every verb is one call into it.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import secrets
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

from kvstore.api import LoadedBlock, Match, Reservation, ReservedBlock, ReserveState, Status
from kvstore.errors import DeadlineExceeded, Unavailable
from kvstore.layout import BLOCK_TOKENS
from kvstore.loading import LoadStream
from kvstore.namespace import Namespace
from kvstore.settings import StoreSettings
from kvstore.store import Store
from kvstore.units import UnitMark

Result = TypeVar("Result")

CALL_SECONDS = 30.0  # bound of the verbs that wait for nothing but the loop


class Embedded:
    """A ``KVStore`` that owns its data directory. Thread-safe; close it, or use it as a context."""

    def __init__(self, settings: StoreSettings) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="latentkv-loop", daemon=True)
        self._thread.start()
        self._closed = False
        try:
            self._store = self._run(Store.open(settings), None)
        except BaseException:
            self._stop_loop()
            raise
        self._sizes: dict[bytes, int] = {}  # namespace digest -> block bytes
        self._holder = self._store.connect(secrets.token_bytes(16), mapped=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self, work: Coroutine[Any, Any, Result], timeout: float | None = CALL_SECONDS) -> Result:
        if self._closed:
            work.close()
            raise Unavailable("this store is closed; open it again")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(timeout)
        except concurrent.futures.TimeoutError:
            future.cancel()
            raise DeadlineExceeded(f"the store did not answer within {timeout:g} s") from None

    def _call(self, work: Callable[[], Result]) -> Result:
        async def call() -> Result:
            return work()

        return self._run(call())

    def open_namespace(self, namespace: Namespace) -> bytes:
        digest = self._run(self._store.open_namespace(namespace))
        self._sizes[digest] = namespace.layout.block_bytes
        return digest

    def match(
        self,
        namespace: bytes,
        hashes: Sequence[bytes],
        tokens: int,
        *,
        align: int = BLOCK_TOKENS,
        store: bool = False,
    ) -> Match:
        return self._call(lambda: self._store.match(namespace, hashes, tokens, align=align, store=store))

    def load(
        self, namespace: bytes, hashes: Sequence[bytes], *, first: int = 0, timeout: float = 60.0
    ) -> EmbeddedLoad:
        stream = self._call(lambda: self._store.load(self._holder, namespace, hashes, first))
        return EmbeddedLoad(self, stream, timeout)

    def reserve(
        self, namespace: bytes, parent: bytes, hashes: Sequence[bytes], *, lease: int = 0
    ) -> Reservation:
        answer = self._call(lambda: self._store.reserve(self._holder, namespace, parent, hashes, lease))
        offsets = iter(answer.offsets)
        return Reservation(
            answer.lease,
            tuple(
                ReservedBlock(
                    block,
                    state,
                    self._slice(next(offsets), self._sizes[namespace])
                    if state is ReserveState.FILL
                    else None,
                )
                for block, state in zip(hashes, answer.states, strict=True)
            ),
        )

    def _slice(self, offset: int, nbytes: int) -> memoryview:
        return self._store.arena.memory[offset : offset + nbytes]

    def commit(self, lease: int, hashes: Sequence[bytes], units: Sequence[UnitMark] = ()) -> int:
        return self._call(lambda: self._store.commit(self._holder, lease, hashes, units))

    def durable(self, ticket: int, *, timeout: float = 60.0) -> bool:
        return self._run(self._store.durable(ticket), timeout)

    def release(self, lease: int) -> None:
        self._call(lambda: self._store.release(self._holder, lease))

    def status(self) -> Status:
        return self._call(self._store.status)

    def check(self) -> list[str]:
        """Violated invariants of the store's tables; empty when sound."""
        return self._call(self._store.check)

    def close(self) -> None:
        """Make what is dirty durable and give the data directory up; a second call does nothing."""
        if self._closed:
            return
        try:
            self._run(self._store.close(), None)
        finally:
            self._stop_loop()

    def _stop_loop(self) -> None:
        self._closed = True
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class EmbeddedLoad:
    """A ``Load`` over an in-process stream."""

    def __init__(self, store: Embedded, stream: LoadStream, timeout: float) -> None:
        self._store = store
        self._stream = stream
        self._timeout = timeout

    @property
    def short(self) -> int | None:
        """See ``kvstore.api.Load``."""
        return self._stream.short

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._store._call(lambda: self._stream.close(returned=True))

    def __iter__(self) -> Iterator[list[LoadedBlock]]:
        batch: list[tuple[int, int]] = []
        while batch := self._store._run(self._step([index for index, _ in batch]), self._timeout):
            yield [LoadedBlock(index, self._view(offset)) for index, offset in batch]

    async def _step(self, returned: list[int]) -> list[tuple[int, int]]:
        self._stream.give_back(returned)
        return await self._stream.next()

    def _view(self, offset: int) -> memoryview:
        return self._store._slice(offset, self._stream.block_bytes).toreadonly()
