"""The Operator service: what ``status``, ``explain`` and ``units`` ask over the daemon's own socket."""
# ruff: noqa: N802  (gRPC names the methods)

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import TypeVar

from kvstore import wire
from kvstore.curation import UNIT_ORDERS
from kvstore.errors import InvalidArgument, KVStoreError, Unavailable
from kvstore.store import Store
from kvstore.v1 import operator_pb2 as pb
from server.events import event
from server.holdings import holdings, pin_held
from server.record import RequestRecord
from server.report import trail_report
from server.reporter import Reporter
from server.streams import Context

log = logging.getLogger(__name__)

MAX_UNITS = 1000  # in one answer
MAX_PINS = 10_000  # the same
PAGE_BYTES = wire.MAX_MESSAGE_BYTES // 4  # of namespaces in one answer
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
            failure = error
        except Exception as error:  # a handler's bug must cost one call, and be told as what it is
            if context.done():  # the caller has gone; writing to it is what failed
                raise
            log.exception("event=call_failed verb=%s", handler.__name__)
            failure = wire.DaemonFailed(
                f"{handler.__name__} failed in the daemon ({type(error).__name__}); see its log"
            )
        return await context.abort(*wire.status_of_error(failure))

    return answer


class OperatorService:
    """Implements ``kvstore.v1.Operator``.

    An operator sees every tenant of a domain: whoever may call this may know what each has stored.
    """

    def __init__(self, store: Store, reporter: Reporter, record: RequestRecord) -> None:
        self._store = store
        self._reporter = reporter
        self._record = record

    @answered
    async def Report(self, request: pb.ReportRequest, context: Context) -> pb.ReportResponse:
        """Everything an operator may want to see."""
        report = self._reporter.report()
        if report is None:
            raise Unavailable("the store is being opened; ask again")
        return pb.ReportResponse(report_json=report.to_json())

    @answered
    async def Namespaces(self, request: pb.NamespacesRequest, context: Context) -> pb.NamespacesResponse:
        """The open namespaces and the keys of their chains, as many as go into an answer."""
        spaces = self._store.keeping.registry.page(request.after, PAGE_BYTES)
        named = [
            pb.OpenNamespace(namespace_json=space.namespace.to_json(), digest=space.digest)
            for space in spaces
        ]
        return pb.NamespacesResponse(namespaces=named, next=spaces[-1].id if spaces else 0)

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

    @answered
    async def Units(self, request: pb.UnitsRequest, context: Context) -> pb.UnitsResponse:
        """The first units in an order."""
        order = next((each for each in UNIT_ORDERS if each == request.order), None)
        if order is None or not 0 < request.limit <= MAX_UNITS:
            raise InvalidArgument(
                f"order={request.order!r}, limit={request.limit}: use one of {', '.join(UNIT_ORDERS)}, and"
                f" 1 to {MAX_UNITS}"
            )
        tenant = request.tenant if request.HasField("tenant") else None
        units = await self._store.keeping.curator.units(tenant=tenant, order=order, limit=request.limit)
        held = holdings(units, await self._store.keeping.curator.pins(), clipped=True)
        return pb.UnitsResponse(units_json=json.dumps([asdict(each) for each in held]))

    @answered
    async def Unit(self, request: pb.UnitRequest, context: Context) -> pb.UnitResponse:
        """One unit."""
        unit = await self._store.keeping.curator.unit(request.unit)
        (held,) = holdings([unit], await self._store.keeping.curator.pins())
        return pb.UnitResponse(unit_json=json.dumps(asdict(held)))

    @answered
    async def Pins(self, request: pb.PinsRequest, context: Context) -> pb.PinsResponse:
        """The pins, as many as go into an answer."""
        tenant = request.tenant if request.HasField("tenant") else None
        pins = (await self._store.keeping.curator.pins(tenant=tenant))[request.first :]
        shown = [asdict(pin_held(pin)) for pin in pins[:MAX_PINS]]
        return pb.PinsResponse(pins_json=json.dumps(shown), more=len(pins) > MAX_PINS)

    @answered
    async def Pin(self, request: pb.PinRequest, context: Context) -> pb.PinResponse:
        """Keep a unit, or keep it for longer."""
        curator = self._store.keeping.curator
        if bool(request.unit) == bool(request.handle):
            raise InvalidArgument("name a unit to be pinned or the handle of a pin to be extended, not both")
        if request.unit:
            pin = await curator.pin(request.unit, request.seconds)
        else:
            pin = await curator.extend(request.handle, request.seconds)
        event(log, logging.INFO, "pinned", handle=pin.handle, unit=pin.unit[:6].hex(), expires=pin.expires)
        return pb.PinResponse(pin_json=json.dumps(asdict(pin_held(pin))))

    @answered
    async def Unpin(self, request: pb.UnpinRequest, context: Context) -> pb.UnpinResponse:
        """Keep a unit no longer."""
        await self._store.keeping.curator.unpin(request.handle)
        event(log, logging.INFO, "unpinned", handle=request.handle)
        return pb.UnpinResponse()

    @answered
    async def Delete(self, request: pb.DeleteRequest, context: Context) -> pb.DeleteResponse:
        """Delete a unit, a namespace or a tenant."""
        curator, what = self._store.keeping.curator, request.WhichOneof("what")
        if what == "unit":
            deleted = await curator.delete_unit(request.unit)
        elif what == "namespace":
            deleted = await curator.delete_namespaces(digest=request.namespace)
        elif what == "tenant":
            deleted = await curator.delete_namespaces(tenant=request.tenant)
        else:
            raise InvalidArgument("name a unit, a namespace or a tenant to be deleted")
        event(log, logging.WARNING, "deleted", what=what, blocks=deleted.blocks)
        return pb.DeleteResponse(namespaces=deleted.namespaces, blocks=deleted.blocks)

    @answered
    async def Record(self, request: pb.RecordRequest, context: Context) -> None:
        """The last requests."""
        for batch in self._record.batches(_BATCH):
            recorded = [pb.RecordedRequest(at=each.at, tokens=each.tokens, ids=each.ids) for each in batch]
            await context.write(pb.RecordResponse(requests=recorded))
