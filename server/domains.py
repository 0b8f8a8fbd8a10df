"""Trust domains: each has a store of its own, and so an arena and a disk that hold its tenants' blocks only.

Behind the daemon's one front nothing of one domain can be named from another: a call is answered
by the services of its caller's domain, and these know one store.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from operator import methodcaller
from types import SimpleNamespace
from typing import Any

import grpc
from google.protobuf import descriptor_pool

from kvstore import wire
from kvstore.store import Store
from kvstore.v1 import kvstore_pb2_grpc, operator_pb2_grpc
from server.access import caller
from server.config import Config
from server.operators import OPERATOR, OperatorService
from server.record import RequestRecord
from server.reporter import Reporter
from server.service import KVStoreService
from server.streams import Context
from server.workers import WorkerTable


class Domain:
    """An open domain: its store, the workers that may map it, and the services over both."""

    def __init__(self, store: Store, reporter: Reporter, config: Config) -> None:
        record = RequestRecord(config.record_bytes, store.time.now)
        self.store = store
        self.reporter = reporter
        # Twice, so that leases end by their own clock first, and say so.
        self.workers = WorkerTable(store, idle_seconds=2 * config.lease_seconds)
        self.calls = KVStoreService(
            store, self.workers, reporter.tally, record, read_seconds=config.lease_seconds
        )
        self.operators = OperatorService(store, reporter, record)


def add_services(domains: Mapping[str, Domain], server: grpc.aio.Server) -> None:
    """Answer the verbs of both services: each call by the domain of its caller."""
    kvstore_pb2_grpc.add_KVStoreServicer_to_server(
        _front(wire.SERVICE, {name: each.calls for name, each in domains.items()}), server
    )
    operator_pb2_grpc.add_OperatorServicer_to_server(
        _front(OPERATOR, {name: each.operators for name, each in domains.items()}), server
    )


def _front(service: str, behind: Mapping[str, object]) -> SimpleNamespace:
    """A servicer whose verbs are those of the caller's domain."""

    def passed_on(verb: str) -> Callable[[Any, Context], Awaitable[Any]]:
        async def answer(request: Any, context: Context) -> Any:
            return await methodcaller(verb, request, context)(behind[caller().domain])

        return answer

    verbs = descriptor_pool.Default().FindServiceByName(service).methods
    return SimpleNamespace(**{verb.name: passed_on(verb.name) for verb in verbs})
