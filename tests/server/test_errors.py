"""Wrong calls that no client of ours makes get the right status and class, and change nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import grpc
import pytest

from kvstore import connect, wire
from kvstore.errors import InvalidArgument
from kvstore.hashing import ROOT
from kvstore.v1 import kvstore_pb2 as pb
from kvstore.v1 import kvstore_pb2_grpc
from tests.server.conftest import MODES, Fleet, document, flag_maker, start

Flags = Callable[..., list[str]]


@pytest.fixture(scope="module", params=MODES)
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    fleet = Fleet()
    with flag_maker() as flags:
        yield start(fleet, request.param, flags).url
        fleet.close()


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
