"""The KVStore service: checks what came, asks the store, answers.

Handlers never block the loop. Every failure of the store becomes its status here, and
an unexpected one INTERNAL, in one place.
"""
# ruff: noqa: N802  (gRPC names the methods)

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import TypeVar

import grpc

from kvstore import wire
from kvstore.errors import InvalidArgument, KVStoreError, Unavailable
from kvstore.layout import BLOCK_TOKENS
from kvstore.loading import Outcome
from kvstore.spaces import Space
from kvstore.store import Store
from kvstore.v1 import kvstore_pb2 as pb
from server.access import Access
from server.record import RequestRecord
from server.refusals import refuse
from server.streams import Context, Unread, Upload, announce_slots, send_blocks
from server.tally import Asked, Loaded, Tally
from server.workers import WorkerTable

log = logging.getLogger(__name__)

Request = TypeVar("Request")
Response = TypeVar("Response")
Handler = Callable[["KVStoreService", Request, Context], Awaitable[Response]]


def answered(handler: Handler[Request, Response]) -> Handler[Request, Response]:
    """Turn what a handler raises into a status, count it and log it."""
    verb = handler.__name__
    step = verb.lower() if verb in ("Match", "Reserve", "Commit") else None  # Load times itself

    @functools.wraps(handler)
    async def answer(service: KVStoreService, request: Request, context: Context) -> Response:
        began = time.monotonic()
        try:
            service.refuse_when_draining()
            response = await handler(service, request, context)
        except Unread as unread:
            service.tally.answered(verb, grpc.StatusCode.DEADLINE_EXCEEDED.name)
            return await unread.told(context)
        except KVStoreError as error:
            failure = error
        except grpc.aio.InternalError:  # the caller has gone; writing to it is what failed
            service.tally.answered(verb, grpc.StatusCode.CANCELLED.name)
            raise asyncio.CancelledError from None
        except Exception as error:  # a handler's bug must cost one call, not the daemon
            if context.done():  # the caller has gone, whatever failed then
                service.tally.answered(verb, grpc.StatusCode.CANCELLED.name)
                raise asyncio.CancelledError from None
            log.exception("event=call_failed verb=%s", verb)
            failure = wire.DaemonFailed(f"{verb} failed in the daemon ({type(error).__name__}); see its log")
        else:
            service.tally.answered(verb, grpc.StatusCode.OK.name)
            if step is not None:
                service.tally.took(step, time.monotonic() - began)
            return response
        return await refuse(service.tally, verb, context, failure)

    return answer


class KVStoreService:
    """Implements ``kvstore.v1.KVStore`` over one store."""

    def __init__(
        self,
        store: Store,
        workers: WorkerTable,
        tally: Tally,
        record: RequestRecord,
        *,
        read_seconds: float,
    ) -> None:
        """A worker may take ``read_seconds`` to take a piece of a block."""
        self._store = store
        self._record = record
        self._workers = workers
        self._access = Access(store)
        self.tally = tally
        self._read_seconds = read_seconds
        self._draining = False

    def drain(self) -> None:
        """Refuse new calls from now on."""
        self._draining = True

    def refuse_when_draining(self) -> None:
        """Raises ``Unavailable`` while the daemon shuts down."""
        if self._draining:
            raise Unavailable("the daemon is shutting down; go on without it and try again later")

    @answered
    async def OpenNamespace(
        self, request: pb.OpenNamespaceRequest, context: Context
    ) -> pb.OpenNamespaceResponse:
        digest = await self._store.open_namespace(
            self._access.require(wire.namespace_of(request)), self._access.opener
        )
        return pb.OpenNamespaceResponse(digest=digest)

    @answered
    async def Match(self, request: pb.MatchRequest, context: Context) -> pb.MatchResponse:
        space = self._access.space(request.namespace)
        match = self._store.match(
            space.digest,
            wire.hashes_of(request.hashes),
            wire.tokens_of(request),
            align=request.align,
            store=request.store,
        )
        asked = Asked(request.tokens, request.counted, space.layout.block_tokens)
        self.tally.matched(space.namespace.tenant, asked, match)
        # A trace has blocks of one size, and a request once.
        if not request.counted and space.layout.block_tokens == BLOCK_TOKENS:
            self._record.note(request.tokens, request.hashes)
        return wire.match_response(match)

    @answered
    async def Load(self, requests: AsyncIterator[pb.LoadRequest], context: Context) -> None:
        start = await anext(aiter(requests), None)
        if start is None or start.WhichOneof("kind") != "start":
            raise InvalidArgument("the first message of a Load stream must be `start`")
        await self._load(start.start, requests, context)

    async def _load(
        self, start: pb.LoadStart, requests: AsyncIterator[pb.LoadRequest], context: Context
    ) -> None:
        hashes = wire.hashes_of(start.hashes)
        space = self._access.space(start.namespace)
        began = time.monotonic()
        with self._workers.loading(self._access.worker(start.worker), len(hashes)) as holder:
            stream = self._store.load(holder, space.digest, hashes, start.first, wire.readers_of(start))
            whole = False
            try:
                await context.write(pb.LoadResponse(lease=stream.lease))
                if holder.mapped:
                    await announce_slots(stream, requests, context)
                else:
                    await send_blocks(stream, context, self._read_seconds)
                whole = True
            finally:
                # A worker may die before its stream does; what was announced since is nobody's.
                stream.close(returned=whole or self._workers.is_gone(holder))
                self._note_load(space, stream.outcome(start.counted), time.monotonic() - began)

    def _note_load(self, space: Space, outcome: Outcome, seconds: float) -> None:
        loaded = Loaded(outcome, space.layout.block_tokens, outcome.delivered * space.block_bytes, seconds)
        self.tally.loaded(space.namespace.tenant, loaded)

    @answered
    async def Reserve(self, request: pb.ReserveRequest, context: Context) -> pb.ReserveResponse:
        worker = self._access.worker(request.worker)
        holder = self._workers.holder(worker) if request.lease else self._workers.lessee(worker)
        reserved = self._store.reserve(
            holder,
            self._access.space(request.namespace).digest,
            wire.digest(request.parent),
            wire.hashes_of(request.hashes),
            request.lease,
            request.epoch if request.HasField("epoch") else None,
        )
        return pb.ReserveResponse(
            lease=reserved.lease,
            states=bytes(reserved.states),
            offsets=reserved.offsets if holder.mapped else (),
        )

    @answered
    async def Upload(self, requests: AsyncIterator[pb.UploadRequest], context: Context) -> pb.UploadResponse:
        first = await anext(aiter(requests), None)
        if first is None:
            return pb.UploadResponse()
        worker = self._access.worker(first.worker)
        if worker.mapped:
            raise InvalidArgument(
                "a worker that maps the arena fills its slots there; Upload is for the others"
            )
        with self._workers.streaming(worker) as holder:
            upload = Upload(self._store, self._workers, worker, first.lease)
            upload.feed(holder, first)
            async for piece in requests:
                upload.feed(holder, piece)
        return pb.UploadResponse()

    @answered
    async def Commit(self, request: pb.CommitRequest, context: Context) -> pb.CommitResponse:
        worker = self._access.worker(request.worker)
        holder = self._workers.holder(worker)
        hashes = wire.hashes_of(request.hashes)
        units = wire.marks_of(request.units)
        self._workers.require_uploaded(worker, request.lease, hashes)
        ticket = self._store.commit(holder, request.lease, hashes, units)
        self._workers.forget_uploads(worker, request.lease, hashes)
        return pb.CommitResponse(ticket=ticket)

    @answered
    async def Durable(self, request: pb.DurableRequest, context: Context) -> pb.DurableResponse:
        return pb.DurableResponse(durable=await self._store.durable(self._access.ticket(request.ticket)))

    @answered
    async def Release(self, request: pb.ReleaseRequest, context: Context) -> pb.ReleaseResponse:
        worker = self._access.worker(request.worker)
        self._store.release(self._workers.holder(worker), request.lease)
        self._workers.forget_uploads(worker, request.lease)
        return pb.ReleaseResponse()

    @answered
    async def Status(self, request: pb.StatusRequest, context: Context) -> pb.StatusResponse:
        status = self._store.status()
        whole = replace(status, counters=status.counters | self.tally.call_counters())
        return wire.status_response(self._access.status(whole))
