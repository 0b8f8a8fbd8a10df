"""Who calls, and what of the store there is for them.

An interceptor establishes the caller before a handler runs; ``Access`` is where handlers
look up whatever a call names. What belongs to a tenant that the caller does not cover is
answered as what does not exist.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Collection
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

import grpc

from kvstore import wire
from kvstore.api import Status
from kvstore.errors import NotCovered, Unauthenticated
from kvstore.namespace import Namespace
from kvstore.spaces import Space, unknown_namespace
from kvstore.store import Store
from kvstore.tickets import unknown_ticket
from kvstore.v1 import kvstore_pb2 as pb
from server.credentials import EVERYONE, Caller, Credentials, Evidence
from server.interception import Wrapping
from server.operators import OPERATOR
from server.refusals import refuse
from server.streams import Context
from server.tally import Tally
from server.workers import Worker, WorkerTable

_BEARER = "Bearer "
NO_VERB = "unknown"  # in metrics: what a call named may be anything
_CERTIFICATE_NAMES = "peer_dns"  # not its URIs, addresses or mail addresses, nor its common name

_caller: ContextVar[Caller] = ContextVar("caller")  # of the call that this task answers


def caller() -> Caller:
    """Who calls. Raises ``LookupError`` where no call is being answered."""
    return _caller.get()


def caller_or_nobody() -> Caller | None:
    """Who calls; None in a call of a service that is for everyone."""
    return _caller.get(None)


class Identifying(Wrapping):
    """Lets calls of our services through that come from a known caller."""

    def __init__(self, credentials: Credentials, workers: Collection[WorkerTable], tally: Tally) -> None:
        super().__init__()
        self._credentials = credentials
        self._workers = workers
        self._tally = tally

    def wrap(self, handler: Any, service: str, verb: str) -> Any:
        """See ``Wrapping``."""
        if service not in (wire.SERVICE, OPERATOR):
            return handler
        return _preceded(handler, functools.partial(self._admit, service, verb))

    def instead(self, service: str) -> Any:
        """A verb that our services have not is for known callers, too. See ``Wrapping``."""
        if service not in (wire.SERVICE, OPERATOR):
            return None

        async def answer(_: Any, context: Context) -> None:
            await self._admit(service, NO_VERB, context)
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, f"{service} has no such verb; use its proto")

        return grpc.stream_unary_rpc_method_handler(answer)

    async def _admit(self, service: str, verb: str, context: Context) -> None:
        found = self._credentials.caller(self._evidence(context))
        if found is None:
            why = "this daemon serves known callers only; give a token, certificate or uid of its credentials"
            await refuse(self._tally, verb, context, Unauthenticated(why))
        elif service == OPERATOR and not found.operator:
            why = "the operators' service is for credentials with `operator = true`"
            await refuse(self._tally, verb, context, NotCovered(why))
        else:
            _caller.set(found)

    def _evidence(self, context: Context) -> Evidence:
        """A token counts first, then a certificate, then who the worker was at the handover socket."""
        given = {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}
        if "authorization" in given:
            return Evidence(token=given["authorization"].removeprefix(_BEARER))
        names = context.auth_context().get(_CERTIFICATE_NAMES, ())
        if names:
            return Evidence(names=tuple(name.decode(errors="replace") for name in names))
        if wire.WORKER_KEY in given and context.peer().startswith("unix:"):
            uids = (table.uid_of(given[wire.WORKER_KEY]) for table in self._workers)
            return Evidence(uid=next((uid for uid in uids if uid is not None), None))
        return Evidence()


def _preceded(handler: Any, admit: Callable[[Context], Awaitable[None]]) -> Any:
    """The handler, of any shape, behind ``admit``."""
    behind, make = next(
        (behind, make)
        for behind, make in (
            (handler.unary_unary, grpc.unary_unary_rpc_method_handler),
            (handler.unary_stream, grpc.unary_stream_rpc_method_handler),
            (handler.stream_unary, grpc.stream_unary_rpc_method_handler),
            (handler.stream_stream, grpc.stream_stream_rpc_method_handler),
        )
        if behind is not None
    )

    async def run(request: Any, context: Context) -> Any:
        await admit(context)
        return await behind(request, context)

    return make(
        run,
        request_deserializer=handler.request_deserializer,
        response_serializer=handler.response_serializer,
    )


class Access:
    """What the caller of the running call may name in its domain's store.

    Without a caller everything raises ``LookupError``.
    """

    def __init__(self, store: Store) -> None:
        self._store = store

    def require(self, namespace: Namespace) -> Namespace:
        """A namespace to be opened. Raises ``NotCovered``, whether or not there is such a tenant."""
        if not caller().covers(namespace.tenant):
            raise NotCovered(
                f"tenant {namespace.tenant[:80]!r} is not covered by this credential; name one that is"
            )
        return namespace

    @property
    def opener(self) -> str | None:
        """For whose share a namespace counts that is opened; None where all callers are one."""
        return None if caller() == EVERYONE else caller().name

    def space(self, digest: bytes) -> Space:
        """An open namespace. Raises ``NamespaceUnknown``, ``InvalidArgument``."""
        space = self._store.space(wire.digest(digest))
        if not caller().covers(space.namespace.tenant):
            raise unknown_namespace(digest)
        return space

    def worker(self, message: pb.Worker) -> Worker:
        """The worker that a message names, among this caller's. Raises ``InvalidArgument``."""
        named = wire.worker_of(message)
        return Worker(caller(), named.token, named.mapped)

    def ticket(self, ticket: int) -> int:
        """A ticket. Raises ``TicketUnknown``."""
        if not caller().covers(self._store.tenant_of_ticket(ticket)):
            raise unknown_ticket(ticket)
        return ticket

    def status(self, status: Status) -> Status:
        """What this caller may see of the store's status: totals say what other tenants do."""
        asking = caller()
        if asking.operator or asking.tenants is None:
            return status
        return Status(
            host=replace(status.host, used_bytes=0, blocks=0),
            disk=replace(status.disk, used_bytes=0, blocks=0),
            mode=status.mode,
            pinned=status.pinned,
            dirty_blocks=0,
            units=0,
            leases=0,
            namespaces=0,
        )
