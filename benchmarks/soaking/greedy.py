"""A tenant who is admitted, and takes all that is counted: sizes, names, workers, tickets.

Each is one bounded burst.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Self

import grpc

from kvstore import wire
from kvstore.address import Address
from kvstore.hashing import ROOT
from kvstore.layout import LatentLayout
from kvstore.namespace import Namespace
from kvstore.v1 import kvstore_pb2 as pb
from kvstore.v1 import kvstore_pb2_grpc

TENANT = "mallory"
SECONDS = 10.0  # after which he gives up
LAYOUTS = [LatentLayout(num_layers=layers, latent_rank=8, rope_dim=6) for layers in range(1, 81)]
SIZES = frozenset(layout.block_bytes for layout in LAYOUTS)
NAME_CHARS = 200_000

Outcome = Counter[str]
"""What came back, and how often."""


class Greedy:
    """His channel to the daemon. Use it as a context."""

    def __init__(self, url: str, token: str) -> None:
        self._channel = grpc.insecure_channel(Address.parse(url).target)
        self._stub: Any = kvstore_pb2_grpc.KVStoreStub(self._channel)
        self._proof = (("authorization", f"Bearer {token}"),)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._channel.close()

    def sizes(self) -> Outcome:
        """Namespaces of as many block sizes as there are."""
        return self._open(_named(layout) for layout in LAYOUTS)

    def names(self, count: int = 10) -> Outcome:
        """Namespaces whose names are as long as a book."""
        return self._open(
            _named(LAYOUTS[0]).replace('"salt":""', f'"salt":"{number}{"x" * NAME_CHARS}"')
            for number in range(count)
        )

    def workers(self, count: int = 1500) -> Outcome:
        """Workers of one process, each with a lease."""
        key = self._key()
        made = (_worker() for _ in range(count))
        return self._call(self._stub.Reserve, (_lease(key, who) for who in made))

    def tickets(self, count: int = 1500) -> Outcome:
        """Commits of nothing, each of which gets a ticket."""
        who = _worker()
        asked = _lease(self._key(), who)
        try:
            lease = self._stub.Reserve(asked, timeout=SECONDS, metadata=self._proof).lease
        except grpc.RpcError as error:
            return Counter([error.code().name])
        return self._call(self._stub.Commit, [pb.CommitRequest(lease=lease, worker=who)] * count)

    def _key(self) -> bytes:
        request = pb.OpenNamespaceRequest(namespace_json=_named(LAYOUTS[0]))
        try:
            return bytes(self._stub.OpenNamespace(request, timeout=SECONDS, metadata=self._proof).digest)
        except grpc.RpcError:
            return bytes(32)

    def _open(self, named: Iterable[str]) -> Outcome:
        return self._call(
            self._stub.OpenNamespace, (pb.OpenNamespaceRequest(namespace_json=name) for name in named)
        )

    def _call(self, verb: Any, requests: Iterable[Any]) -> Outcome:
        """All at once."""
        running = [verb.future(each, timeout=SECONDS, metadata=self._proof) for each in requests]
        return Counter(each.code().name for each in running)


def _named(layout: LatentLayout) -> str:
    return Namespace(layout, model="m", tenant=TENANT).to_json()


def _lease(key: bytes, who: pb.Worker) -> pb.ReserveRequest:
    return pb.ReserveRequest(namespace=key, parent=ROOT, worker=who)


def _worker() -> pb.Worker:
    return pb.Worker(token=secrets.token_bytes(wire.TOKEN_BYTES))


BURSTS: Sequence[Callable[[Greedy], Outcome]] = (Greedy.sizes, Greedy.names, Greedy.workers, Greedy.tickets)
