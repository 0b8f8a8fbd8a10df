"""Load against a daemon: through the mapped arena, or as bytes.

A failure on the way never raises inside the iteration: it ends with ``short`` at what
was delivered whole.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import grpc
import xxhash

from kvstore.api import LoadedBlock
from kvstore.errors import CorruptBlock, DeadlineExceeded, KVStoreError, Unavailable
from kvstore.mapping import Mapping
from kvstore.transport import error_of
from kvstore.v1 import kvstore_pb2 as pb
from kvstore.wire import load_returned

log = logging.getLogger(__name__)

_QUEUED = 8  # responses read ahead; beyond that gRPC's flow control holds the daemon back


class LoadCall:
    """The stream of one Load, with a deadline on each wait.

    gRPC has a deadline for whole streams only, so a thread reads the responses.
    """

    def __init__(
        self,
        start: pb.LoadRequest,
        open_call: Callable[[Iterator[pb.LoadRequest]], Any],
        on_silence: Callable[[], None],
    ) -> None:
        """``on_silence`` is called when a wait ran into its deadline."""
        self._on_silence = on_silence
        self._requests: queue.SimpleQueue[pb.LoadRequest | None] = queue.SimpleQueue()
        self._responses: queue.Queue[pb.LoadResponse | KVStoreError | None] = queue.Queue(_QUEUED)
        self._ended = False  # the reader has put its last item and it was taken
        self._requests.put(start)
        self._call = open_call(iter(self._requests.get, None))
        threading.Thread(target=self._read, name="latentkv-load", daemon=True).start()

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
            self._on_silence()
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

    def receive_lease(self, timeout: float) -> int:
        """The first message: the lease. Raises what the daemon refused the Load with."""
        response = self.receive(timeout)
        if response is None or response.WhichOneof("kind") != "lease":
            raise Unavailable("the Load stream did not start with its lease")
        return int(response.lease)

    def send(self, request: pb.LoadRequest) -> None:
        """Send a request; lost if the stream has broken."""
        self._requests.put(request)

    def finish(self, timeout: float) -> None:
        """Say that nothing is held any more, and wait for the daemon to know. Raises like ``receive``."""
        self._requests.put(None)
        deadline = time.monotonic() + timeout
        while self.receive(deadline - time.monotonic()) is not None:
            pass

    def cancel(self) -> None:
        """Break the stream and end its threads."""
        self._call.cancel()
        self._requests.put(None)
        for _ in range(_QUEUED + 2):  # what the reader may still want to put
            with contextlib.suppress(KVStoreError, queue.Empty):
                self._take(1.0)


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a Load asks for: blocks ``[first, count)``, each of them within ``timeout`` seconds."""

    first: int
    count: int
    block_bytes: int
    timeout: float


class RemoteLoad(ABC):
    """What both ways share: batches in order, ``short``, and the end."""

    def __init__(self, call: LoadCall, wanted: Wanted) -> None:
        self._call = call
        self._next = wanted.first  # blocks before it were delivered, or not asked for
        self._count = wanted.count
        self._block_bytes = wanted.block_bytes
        self._timeout = wanted.timeout
        self._batch: list[LoadedBlock] = []  # with the caller
        self._closed = False
        self._broken = False
        self.short: int | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._closed:
            self._closed = True
            self._take_back()
            self._end()

    def __iter__(self) -> Iterator[list[LoadedBlock]]:
        while not self._closed and self.short is None and self._next < self._count:
            try:
                self._batch = self._receive()
            except KVStoreError as error:
                log.warning("event=load_cut blocks=%d of=%d reason=%s", self._next, self._count, error)
                self._broken = True
                self.short = self._next
                return
            if not self._batch:
                return
            self._next += len(self._batch)
            yield self._batch
            self._take_back()

    def _take_back(self) -> list[LoadedBlock]:
        """The caller's time with the last batch is over: its views end, so a late use is an error."""
        batch, self._batch = self._batch, []
        for block in batch:
            with contextlib.suppress(BufferError):  # an array over it is still alive
                block.data.release()
        return batch

    def _next_response(self, deadline: float) -> pb.LoadResponse | None:
        """A response with blocks; None when the hit ends here."""
        response = self._call.receive(deadline - time.monotonic())
        if response is None:
            raise Unavailable(f"the Load stream ended at block {self._next} of {self._count}")
        if response.WhichOneof("kind") == "short":
            self.short = min(max(int(response.short), 0), self._next)
            return None
        return response

    @abstractmethod
    def _receive(self) -> list[LoadedBlock]:
        """The next batch; empty when the hit ends here."""

    @abstractmethod
    def _end(self) -> None:
        """Leave nothing held."""


class MappedLoad(RemoteLoad):
    """Blocks as views of the arena, whose slots go back as credits."""

    def __init__(self, call: LoadCall, wanted: Wanted, mapping: Mapping, release: Callable[[], None]) -> None:
        super().__init__(call, wanted)
        self._mapping = mapping
        self._release = release

    def _receive(self) -> list[LoadedBlock]:
        response = self._next_response(time.monotonic() + self._timeout)
        if response is None:
            return []
        announced = response.announced
        if announced.first != self._next or len(announced.offsets) > self._count - self._next:
            raise Unavailable(f"blocks {announced.first} on were announced, expected {self._next} on")
        return [
            LoadedBlock(self._next + i, self._mapping.view(offset, self._block_bytes).toreadonly())
            for i, offset in enumerate(announced.offsets)
        ]

    def _take_back(self) -> list[LoadedBlock]:
        batch = super()._take_back()
        if batch:
            self._call.send(load_returned(block.index for block in batch))
        return batch

    def _end(self) -> None:
        """The daemon must know that the slots are free, or else never use them again."""
        try:
            if not self._broken:
                self._call.finish(self._timeout)
                return
        except KVStoreError as error:
            log.warning("event=load_end_unheard reason=%s", error)
        finally:
            self._call.cancel()
            self._mapping.done()
        self._release()


class ByteLoad(RemoteLoad):
    """Blocks as received bytes, each checked against its checksum.

    One stream: the daemon's loop alone fills a core with it, so more streams only cost more.
    """

    def __init__(self, call: LoadCall, wanted: Wanted, on_damaged: Callable[[], None]) -> None:
        super().__init__(call, wanted)
        self._on_damaged = on_damaged

    def _receive(self) -> list[LoadedBlock]:
        deadline = time.monotonic() + self._timeout
        buffer = bytearray(self._block_bytes)
        done = 0
        while True:
            response = self._next_response(deadline)
            if response is None:
                return []
            chunk = response.chunk
            end = done + len(chunk.data)
            if chunk.block != self._next or chunk.offset != done or end > len(buffer):
                raise Unavailable(f"a piece of block {chunk.block} at {chunk.offset} came out of order")
            buffer[done:end] = chunk.data
            done = end
            if chunk.last:
                break
        if done != len(buffer) or xxhash.xxh3_64_intdigest(buffer) != chunk.checksum:
            self._on_damaged()
            raise CorruptBlock(f"block {self._next} was damaged on its way")
        return [LoadedBlock(self._next, memoryview(buffer).toreadonly())]

    def _end(self) -> None:
        self._call.cancel()


class EndedLoad:
    """A Load that could not start: a miss."""

    def __init__(self, short: int) -> None:
        self.short: int | None = short

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def __iter__(self) -> Iterator[list[LoadedBlock]]:
        return iter(())
