"""Load against a daemon: through the mapped arena, or as bytes."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import xxhash

from kvstore.breaker import CircuitBreaker
from kvstore.delivery import BlockLoad
from kvstore.errors import CorruptBlock, DeadlineExceeded, KVStoreError
from kvstore.lending import Lent, when_unseen
from kvstore.mapping import Mapping
from kvstore.transport import error_of
from kvstore.v1 import kvstore_pb2 as pb
from kvstore.wire import Unheard, load_returned

log = logging.getLogger(__name__)

_QUEUED = 8  # responses read ahead; beyond that gRPC's flow control holds the daemon back
_POLL_SECONDS = 0.01


class LoadCall:
    """The stream of one Load, with a deadline on each wait.

    gRPC has a deadline for whole streams only, so a thread reads the responses.
    """

    def __init__(
        self,
        start: pb.LoadRequest,
        open_call: Callable[[Iterator[pb.LoadRequest]], Any],
        breaker: CircuitBreaker,
    ) -> None:
        """``breaker`` learns of a wait that ran into its deadline."""
        self._breaker = breaker
        self._requests: queue.SimpleQueue[pb.LoadRequest | None] = queue.SimpleQueue()
        self._responses: queue.Queue[pb.LoadResponse | KVStoreError | None] = queue.Queue(_QUEUED)
        self._ended = False  # the reader has put its last item and it was taken
        self._requests.put(start)
        self._call = open_call(iter(self._requests.get, None))
        self._reader = threading.Thread(target=self._read, name="latentkv-load", daemon=True)
        self._reader.start()

    def _read(self) -> None:
        end: KVStoreError | None = None
        try:
            for response in self._call:
                self._responses.put(response)
        except grpc.RpcError as failure:
            end = error_of(failure)
        self._responses.put(end)

    def receive(self, timeout: float) -> pb.LoadResponse | None:
        """The next response, None at the end. Raises what ended the stream, ``DeadlineExceeded``."""
        try:
            return self._take(max(timeout, 0.0))
        except queue.Empty:
            self._breaker.doubt()
            raise DeadlineExceeded(f"no block came within {timeout:.1f} s; go on without it") from None

    def _take(self, timeout: float) -> pb.LoadResponse | None:
        if self._ended:
            return None
        item = self._responses.get(timeout=timeout)
        if item is None or isinstance(item, KVStoreError):
            self._ended = True
        if isinstance(item, KVStoreError):
            raise item
        return item

    def receive_known(self, deadline: float) -> pb.LoadResponse | None:
        """The next response of a kind that this client knows; a daemon of the future may send others."""
        while True:
            response = self.receive(deadline - time.monotonic())
            if response is None or response.WhichOneof("kind") is not None:
                return response
            log.info("event=response_unknown reason=the daemon is newer than this client; upgrade the client")

    def receive_lease(self, timeout: float) -> int:
        """The first message: the lease. Raises what the daemon refused the Load with."""
        response = self.receive_known(time.monotonic() + timeout)
        if response is None or response.WhichOneof("kind") != "lease":
            raise Unheard("the Load stream did not start with its lease")
        return int(response.lease)

    def send(self, request: pb.LoadRequest) -> None:
        """Send a request; lost if the stream has broken."""
        self._requests.put(request)

    def finish(self, timeout: float) -> None:
        """Say that nothing is held any more, and wait for the daemon to know. Raises like ``receive``.

        A daemon that does not answer anyway is not waited for.
        """
        self._requests.put(None)
        if self._breaker.refuses():
            raise Unheard("the daemon does not answer, and so is not waited for")
        deadline = time.monotonic() + timeout
        while self.receive(deadline - time.monotonic()) is not None:
            pass

    def cancel(self) -> None:
        """Break the stream and end its threads."""
        self._call.cancel()
        self._requests.put(None)
        while not self._ended and self._reader.is_alive():  # it may want to put what it has, and then the end
            with contextlib.suppress(queue.Empty):
                item = self._responses.get(timeout=_POLL_SECONDS)
                self._ended = item is None or isinstance(item, KVStoreError)
        with contextlib.suppress(queue.Full):
            self._responses.put_nowait(None)  # for whoever waits in another thread


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a Load asks for: blocks ``[first, count)``, each of them within ``timeout`` seconds.

    ``end_timeout`` bounds the wait for the daemon to know of the end.
    """

    first: int
    count: int
    block_bytes: int
    timeout: float
    end_timeout: float


def _next_blocks(call: LoadCall, expected: int, count: int, deadline: float) -> pb.LoadResponse:
    """A response with blocks, or ``short``."""
    response = call.receive_known(deadline)
    if response is None:
        raise Unheard(f"the Load stream ended at block {expected} of {count}")
    return response


class _MappedSource:
    """Blocks as views of the arena, whose slots go back as credits."""

    def __init__(self, call: LoadCall, wanted: Wanted, mapping: Mapping, release: Callable[[], None]) -> None:
        self._call = call
        self._wanted = wanted
        self._mapping = mapping
        self._release = release

    def receive(self, expected: int) -> list[Lent] | int:
        """See ``Source``."""
        wanted, deadline = self._wanted, time.monotonic() + self._wanted.timeout
        announced = pb.Announced()
        while not announced.offsets:
            response = _next_blocks(self._call, expected, wanted.count, deadline)
            if response.WhichOneof("kind") == "short":
                return int(response.short)
            announced = response.announced
            if announced.first != expected or len(announced.offsets) > wanted.count - expected:
                raise Unheard(f"blocks {announced.first} on were announced, expected {expected} on")
        views = [self._mapping.view(offset, wanted.block_bytes) for offset in announced.offsets]
        return [Lent(view, readonly=True) for view in views]

    def give_back(self, indices: Sequence[int]) -> None:
        """See ``Source``."""
        self._call.send(load_returned(indices))

    def end(self, seen: Sequence[Lent], *, wait: bool) -> None:
        """The daemon must know that the slots are free, or else never use them again."""
        if wait and not seen:
            try:
                self._call.finish(self._wanted.end_timeout)
                self._call.cancel()
                self._mapping.done()
                return
            except KVStoreError as error:
                log.warning("event=load_end_unheard reason=%s", error)
        self._call.cancel()
        when_unseen(seen, self._leave)

    def _leave(self) -> None:
        self._mapping.done()
        self._release()


class _ByteSource:
    """Blocks as received bytes, each checked against its checksum.

    One stream: the daemon's loop alone fills a core with it, so more streams only cost more.
    """

    def __init__(self, call: LoadCall, wanted: Wanted, on_damaged: Callable[[], None]) -> None:
        self._call = call
        self._wanted = wanted
        self._on_damaged = on_damaged

    def receive(self, expected: int) -> list[Lent] | int:
        """See ``Source``."""
        wanted, deadline = self._wanted, time.monotonic() + self._wanted.timeout
        buffer = bytearray(wanted.block_bytes)
        done = 0
        while True:
            response = _next_blocks(self._call, expected, wanted.count, deadline)
            if response.WhichOneof("kind") == "short":
                return int(response.short)
            chunk = response.chunk
            end = done + len(chunk.data)
            if chunk.block != expected or chunk.offset != done or end > len(buffer):
                raise Unheard(f"a piece of block {chunk.block} at {chunk.offset} came out of order")
            buffer[done:end] = chunk.data
            done = end
            if chunk.last:
                break
        if done != len(buffer) or xxhash.xxh3_64_intdigest(buffer) != chunk.checksum:
            self._on_damaged()
            raise CorruptBlock(f"block {expected} was damaged on its way")
        return [Lent(memoryview(buffer), readonly=True)]

    def give_back(self, indices: Sequence[int]) -> None:
        """See ``Source``: they are the caller's own."""

    def end(self, seen: Sequence[Lent], *, wait: bool) -> None:
        """See ``Source``."""
        self._call.cancel()


class MappedLoad(BlockLoad):
    """A Load whose blocks are read where they lie."""

    def __init__(
        self, call: LoadCall, wanted: Wanted, mapping: Mapping, release: Callable[[], None], owner: object
    ) -> None:
        source = _MappedSource(call, wanted, mapping, release)
        super().__init__(source, wanted.first, wanted.count, owner)


class ByteLoad(BlockLoad):
    """A Load whose blocks travel."""

    def __init__(self, call: LoadCall, wanted: Wanted, on_damaged: Callable[[], None], owner: object) -> None:
        super().__init__(_ByteSource(call, wanted, on_damaged), wanted.first, wanted.count, owner)
