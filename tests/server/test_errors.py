"""Bad calls get the right status and class, change nothing, and the session goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import grpc
import pytest

from kvstore import connect, wire
from kvstore.api import KVStore
from kvstore.client import Client
from kvstore.errors import (
    CapacityTooSmall,
    InvalidArgument,
    KVStoreError,
    LeaseUnknown,
    NamespaceMismatch,
    NamespaceUnknown,
    NotReserved,
    ParentMissing,
    TicketUnknown,
)
from kvstore.hashing import ROOT
from kvstore.layout import LatentLayout
from kvstore.namespace import Namespace
from kvstore.units import UnitKind, UnitMark
from kvstore.v1 import kvstore_pb2 as pb
from kvstore.v1 import kvstore_pb2_grpc
from tests.server.conftest import MODES, Document, Fleet, document, flag_maker, start

Flags = Callable[..., list[str]]
Bad = Callable[[Client, Document], object]


def _commit_twice(store: KVStore, doc: Document) -> None:
    lease = store.reserve(doc.namespace, ROOT, doc.hashes).lease
    store.commit(lease, doc.hashes[:1])
    store.commit(lease, doc.hashes[:1])


def _commit_after_release(store: KVStore, doc: Document) -> None:
    lease = store.reserve(doc.namespace, ROOT, doc.hashes).lease
    store.release(lease)
    store.commit(lease, doc.hashes)


def _mix_namespaces(store: KVStore, doc: Document) -> None:
    lease = store.reserve(doc.namespace, ROOT, doc.hashes).lease
    other = document(store, 1, tenant="other")
    store.reserve(other.namespace, ROOT, other.hashes, lease=lease)


def _mark_unstored(store: KVStore, doc: Document) -> None:
    lease = store.reserve(doc.namespace, ROOT, doc.hashes).lease
    store.commit(lease, doc.hashes[:1], [UnitMark(b"x" * 32, UnitKind.REQUEST_END)])


HUGE = Namespace(LatentLayout(num_layers=4000, latent_rank=4096))
BAD: dict[str, tuple[type[KVStoreError], Bad]] = {
    "short hash": (InvalidArgument, lambda s, d: s.match(d.namespace, [b"x"], 100)),
    "hash in load": (InvalidArgument, lambda s, d: s.load(d.namespace, [b"x" * 31])),
    "first beyond": (InvalidArgument, lambda s, d: s.load(d.namespace, d.hashes, first=9)),
    "negative first": (InvalidArgument, lambda s, d: s.load(d.namespace, d.hashes, first=-1)),
    "tokens too few": (InvalidArgument, lambda s, d: s.match(d.namespace, d.hashes, 5)),
    "odd align": (InvalidArgument, lambda s, d: s.match(d.namespace, d.hashes, 999, align=65)),
    "digest length": (InvalidArgument, lambda s, d: s.match(b"short", d.hashes, 999)),
    "unknown namespace, match": (NamespaceUnknown, lambda s, d: s.match(b"n" * 32, d.hashes, 999)),
    "unknown namespace, load": (NamespaceUnknown, lambda s, d: s.load(b"n" * 32, d.hashes)),
    "unknown namespace, reserve": (NamespaceUnknown, lambda s, d: s.reserve(b"n" * 32, ROOT, d.hashes)),
    "huge block": (CapacityTooSmall, lambda s, d: s.open_namespace(HUGE)),
    "parent missing": (ParentMissing, lambda s, d: s.reserve(d.namespace, d.hashes[0], d.hashes[1:])),
    "unknown lease": (LeaseUnknown, lambda s, d: s.commit(12345, d.hashes)),
    "released lease": (LeaseUnknown, _commit_after_release),
    "other namespace": (NamespaceMismatch, _mix_namespaces),
    "committed twice": (NotReserved, _commit_twice),
    "unit nowhere": (NotReserved, _mark_unstored),
    "unknown ticket": (TicketUnknown, lambda s, d: s.durable(99)),
}


@pytest.fixture(scope="module", params=MODES)
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    fleet = Fleet()
    with flag_maker() as flags:
        yield start(fleet, request.param, flags).url
        fleet.close()


@pytest.fixture
def client(url: str, fleet: Fleet) -> Client:
    return fleet.connect(url)


@pytest.mark.parametrize("name", BAD)
def test_a_bad_call_raises_its_class_and_harms_nothing(name: str, client: Client) -> None:
    expected, bad = BAD[name]
    doc = document(client, 3, seed=list(BAD).index(name))
    before = client.status().disk.blocks
    with pytest.raises(expected) as raised:
        bad(client, doc)
    assert type(raised.value) is expected
    assert len(str(raised.value)) > 20
    assert client.status().disk.blocks <= before + 1
    assert client.match(doc.namespace, doc.hashes, len(doc.tokens)).blocks == 0


def test_a_foreign_lease_is_refused(url: str, fleet: Fleet) -> None:
    doc = document(fleet.connect(url), 2, seed=1000)
    with grpc.insecure_channel(url) as channel:
        stub = kvstore_pb2_grpc.KVStoreStub(channel)
        owner, thief = (pb.Worker(token=token * 16) for token in (b"o", b"t"))
        reserve = pb.ReserveRequest(namespace=doc.namespace, parent=ROOT, hashes=doc.hashes[0], worker=owner)
        lease = stub.Reserve(reserve).lease
        for request in (
            lambda: stub.Reserve(
                pb.ReserveRequest(lease=lease, worker=thief, namespace=doc.namespace, parent=ROOT)
            ),
            lambda: stub.Commit(pb.CommitRequest(lease=lease, worker=thief)),
        ):
            with pytest.raises(grpc.RpcError) as failed:
                request()
            assert failed.value.code() is grpc.StatusCode.NOT_FOUND
            assert (wire.ERROR_KEY, "LeaseUnknown") in failed.value.trailing_metadata()
        stub.Release(pb.ReleaseRequest(lease=lease, worker=thief))  # ignored
        stub.Commit(pb.CommitRequest(lease=lease, worker=owner))
        stub.Release(pb.ReleaseRequest(lease=lease, worker=owner))


@pytest.mark.parametrize("kind", ["nothing", "returned first", "mapped token"])
def test_a_load_that_starts_wrong_is_refused(kind: str, url: str, fleet: Fleet) -> None:
    doc = document(fleet.connect(url), 1)
    start_of = pb.LoadStart(namespace=doc.namespace, worker=pb.Worker(token=b"m" * 16, mapped=True))
    requests, code = {
        "nothing": ([], grpc.StatusCode.INVALID_ARGUMENT),
        "returned first": ([wire.load_returned([0])], grpc.StatusCode.INVALID_ARGUMENT),
        "mapped token": ([pb.LoadRequest(start=start_of)], grpc.StatusCode.UNAVAILABLE),
    }[kind]
    with grpc.insecure_channel(url) as channel, pytest.raises(grpc.RpcError) as failed:
        list(kvstore_pb2_grpc.KVStoreStub(channel).Load(iter(requests)))
    assert failed.value.code() is code


@pytest.mark.parametrize(
    "address", ["kv.example", "unix://relative", "http://127.0.0.1:80", "host:0", "host:x", ""]
)
def test_a_malformed_url_is_refused(address: str) -> None:
    with pytest.raises(InvalidArgument, match="url="):
        connect(address)
