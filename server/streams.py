"""The streaming halves of Load and Upload."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, NoReturn, TypeAlias

import grpc
import xxhash

from kvstore import wire
from kvstore.errors import CorruptBlock, DeadlineExceeded, InvalidArgument
from kvstore.leases import Holder
from kvstore.loading import LoadStream
from kvstore.store import Store
from kvstore.v1 import kvstore_pb2 as pb
from server.workers import Worker, WorkerTable

Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]


class Unread(DeadlineExceeded):
    """A peer takes nothing of what is written to it. Only once it does can it be told so."""

    def __init__(self, message: str, writing: asyncio.Task[None]) -> None:
        super().__init__(message)
        self._writing = writing

    async def told(self, context: Context) -> NoReturn:
        """Wait until it has taken what was being written, and say it then: nothing is held for it by now."""
        try:
            await self._writing
            await context.abort(*wire.status_of_error(self))
        except grpc.aio.InternalError:  # it has gone
            raise asyncio.CancelledError from None
        finally:
            self._writing.cancel()


async def write_within(seconds: float, response: Any, context: Context) -> None:
    """Write a response. Raises ``Unread`` when the peer does not take it in time."""
    writing = asyncio.ensure_future(context.write(response))
    try:
        await asyncio.wait({writing}, timeout=seconds)
    except asyncio.CancelledError:
        writing.cancel()
        raise
    if not writing.done():
        raise Unread(f"nothing was taken of this stream for {seconds:g} s; call again", writing)
    writing.result()


async def announce_slots(
    stream: LoadStream, requests: AsyncIterator[pb.LoadRequest], context: Context
) -> None:
    """Load for a worker that maps the arena; ends when it half-closes, done with all slots."""
    announcing = asyncio.create_task(_announce(stream, context))
    crediting = asyncio.create_task(_credit(stream, requests))
    try:
        await asyncio.wait({announcing, crediting}, return_when=asyncio.FIRST_COMPLETED)
        if announcing.done():
            announcing.result()
        await crediting
    finally:
        # The stream may be closed only when nothing runs in it any more.
        await _end(announcing)
        await _end(crediting)


async def _end(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait({task})
    if not task.cancelled():
        task.exception()  # the first failure was raised already


async def _announce(stream: LoadStream, context: Context) -> None:
    while batch := await stream.next():
        # Batches are in order and without gaps, so the first index says it all.
        offsets = [offset for _, offset in batch]
        await context.write(pb.LoadResponse(announced=pb.Announced(first=batch[0][0], offsets=offsets)))
    if stream.short is not None:
        await context.write(pb.LoadResponse(short=stream.short))


async def _credit(stream: LoadStream, requests: AsyncIterator[pb.LoadRequest]) -> None:
    async for request in requests:
        if request.WhichOneof("kind") != "returned":
            raise InvalidArgument("a Load stream has one `start`, then only `returned`")
        stream.give_back(wire.indices_of(request.returned))


async def send_blocks(stream: LoadStream, context: Context, seconds: float) -> None:
    """Load for a worker that gets bytes; gRPC's flow control is its credit.

    Raises ``Unread`` when it takes no more for so many seconds: its lease has expired by then.
    """
    while batch := await stream.next():
        for index, _ in batch:
            await _send_block(stream, index, context, seconds)
            stream.give_back([index])
    if stream.short is not None:
        await context.write(pb.LoadResponse(short=stream.short))


async def _send_block(stream: LoadStream, index: int, context: Context, seconds: float) -> None:
    nbytes, checksum = len(stream.view(index)), stream.checksum(index)
    for start in range(0, nbytes, wire.CHUNK_BYTES):
        # A slow worker's lease may expire between chunks, so each asks for the bytes anew;
        # should they have changed, the checksum tells the worker.
        data = bytes(stream.view(index)[start : start + wire.CHUNK_BYTES])
        last = start + len(data) == nbytes
        chunk = pb.Chunk(block=index, offset=start, data=data, last=last, checksum=checksum if last else 0)
        await write_within(seconds, pb.LoadResponse(chunk=chunk), context)


class Upload:
    """Writes the pieces of uploaded blocks into their slots.

    The slot is looked up for every piece and written before anything else can run, so a
    lease that expires between two pieces cannot let one land in a slot of another block.
    """

    def __init__(self, store: Store, workers: WorkerTable, worker: Worker, lease: int) -> None:
        self._store = store
        self._workers = workers
        self._worker = worker
        self._lease = lease
        self._block = b""
        self._done = 0  # bytes of the current block
        self._hasher = xxhash.xxh3_64()

    def feed(self, holder: Holder, piece: pb.UploadRequest) -> None:
        """Take the next piece. Raises ``InvalidArgument``, ``NotReserved``, ``CorruptBlock``."""
        if piece.hash:
            self._begin(wire.digest(piece.hash))
        if not self._block or piece.offset != self._done:
            raise InvalidArgument(
                f"piece at {piece.offset}, expected {self._done} of a block named by its hash"
            )
        slot = self._store.slot_for_upload(holder, self._lease, self._block)
        end = self._done + len(piece.data)
        if end > len(slot) or piece.last != (end == len(slot)):
            raise InvalidArgument(
                f"{end} bytes of a block of {len(slot)}: send exactly the block's bytes, `last` with the last"
            )
        slot[self._done : end] = piece.data
        self._hasher.update(piece.data)
        self._done = end
        if piece.last:
            self._finish(piece.checksum)

    def _begin(self, block: bytes) -> None:
        self._workers.note_upload(self._worker, self._lease, block, whole=False)
        self._block, self._done, self._hasher = block, 0, xxhash.xxh3_64()

    def _finish(self, checksum: int) -> None:
        if self._hasher.intdigest() != checksum:
            raise CorruptBlock(f"block {self._block[:6].hex()} was damaged on its way; upload it again")
        self._workers.note_upload(self._worker, self._lease, self._block, whole=True)
        self._block = b""
