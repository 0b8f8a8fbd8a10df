"""The Operator service: what ``latentkv status`` and ``explain`` ask over the daemon's own socket."""
# ruff: noqa: N802  (gRPC names the methods)

from __future__ import annotations

import functools
import json
from collections.abc import Awaitable, Callable
from typing import TypeVar

import grpc

from kvstore import wire
from kvstore.errors import KVStoreError
from kvstore.store import Store
from kvstore.v1 import operator_pb2 as pb
from server.pages import Pages
from server.record import RequestRecord
from server.report import trail_report
from server.streams import Context

_BATCH = 64  # recorded requests of a message

OPERATOR = pb.DESCRIPTOR.services_by_name["Operator"].full_name

Request = TypeVar("Request")
Response = TypeVar("Response")
Handler = Callable[["OperatorService", Request, Context], Awaitable[Response]]


def answered(handler: Handler[Request, Response]) -> Handler[Request, Response]:
    """Turn what a handler raises into a status."""

    @functools.wraps(handler)
    async def answer(service: OperatorService, request: Request, context: Context) -> Response:
        try:
            return await handler(service, request, context)
        except KVStoreError as error:
            return await context.abort(*wire.status_of_error(error))

    return answer


class OperatorService:
    """Implements ``kvstore.v1.Operator``. It answers while the daemon drains, too.

    An operator sees every tenant: whoever may call this may know what each of them has stored.
    """

    def __init__(self, store: Store, pages: Pages, record: RequestRecord) -> None:
        self._store = store
        self._pages = pages
        self._record = record

    async def Report(self, request: pb.ReportRequest, context: Context) -> pb.ReportResponse:
        """Everything an operator may want to see."""
        report = self._pages.report()
        if report is None:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the store is being opened; ask again")
        return pb.ReportResponse(report_json=report.to_json())

    async def Namespaces(self, request: pb.NamespacesRequest, context: Context) -> pb.NamespacesResponse:
        """The open namespaces and the keys of their chains."""
        spaces = self._store.spaces()
        named = [
            pb.OpenNamespace(namespace_json=space.namespace.to_json(), digest=space.digest)
            for space in spaces
        ]
        return pb.NamespacesResponse(namespaces=named)

    @answered
    async def Trail(self, request: pb.TrailRequest, context: Context) -> pb.TrailResponse:
        """How far a prompt is stored, and what is known of the place where it stops."""
        trail = self._store.trail(
            wire.digest(request.namespace),
            wire.hashes_of(request.hashes),
            wire.tokens_of(request),
            align=request.align,
        )
        return pb.TrailResponse(trail_json=json.dumps(trail_report(trail)))

    async def Record(self, request: pb.RecordRequest, context: Context) -> None:
        """The last requests."""
        for batch in self._record.batches(_BATCH):
            recorded = [pb.RecordedRequest(at=each.at, tokens=each.tokens, ids=each.ids) for each in batch]
            await context.write(pb.RecordResponse(requests=recorded))
