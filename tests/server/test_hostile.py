"""Calls that mean harm: each gets a proper status, and the daemon goes on serving others."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvstore import wire
from kvstore.hashing import ROOT
from kvstore.mapping import open_mapping
from kvstore.v1 import kvstore_pb2 as pb
from kvstore.v1 import kvstore_pb2_grpc
from server.workers import MAX_LEASES, MAX_REMOTE
from tests.server.conftest import DEADLINE, DaemonProcess, Document, Fleet, document, flag_maker, start

VERBS = {method.name: method for method in pb.DESCRIPTOR.services_by_name["KVStore"].methods}
TOKEN = b"h" * 16
PROPER = {
    grpc.StatusCode.OK,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.DATA_LOSS,
    grpc.StatusCode.UNAVAILABLE,
}
FUZZ = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


class Target:
    """A daemon with a document in it, and a plain channel to it."""

    def __init__(self, daemon: DaemonProcess, doc: Document) -> None:
        self.daemon = daemon
        self.doc = doc
        self.channel = grpc.insecure_channel(daemon.url)
        self.stub: Any = kvstore_pb2_grpc.KVStoreStub(self.channel)

    def status(self) -> pb.StatusResponse:
        response: pb.StatusResponse = self.stub.Status(pb.StatusRequest(), timeout=DEADLINE)
        return response

    def resident_bytes(self) -> int:
        lines = Path(f"/proc/{self.daemon.process.pid}/status").read_text().splitlines()
        # The most it ever had: what one call took for a moment counts.
        (line,) = [line for line in lines if line.startswith("VmHWM:")]
        return int(line.split()[1]) * 1024

    def call(self, verb: str, *messages: Any) -> grpc.StatusCode:
        """The status that a call with these messages ends with; the rest of a stream is read."""
        method, call = VERBS[verb], getattr(self.stub, verb)
        try:
            if method.server_streaming:
                list(call(iter(messages), timeout=DEADLINE))
            elif method.client_streaming:
                call(iter(messages), timeout=DEADLINE)
            else:
                call(messages[0], timeout=DEADLINE)
        except grpc.RpcError as failure:
            return failure.code()  # type: ignore[no-any-return, attr-defined]
        return grpc.StatusCode.OK


@pytest.fixture(scope="module")
def target() -> Iterator[Target]:
    fleet = Fleet()
    with flag_maker() as flags:
        daemon = start(fleet, "mapped", flags, lease_seconds=1, log_level="warning", interval=64)
        client = fleet.connect(daemon.url)
        doc = document(client, 6)
        doc.store(client)
        made = Target(daemon, doc)
        yield made
        # Still there, and as good as before.
        assert daemon.process.poll() is None
        assert not [line for line in daemon.log if "call_failed" in line]
        assert doc.load(client) == 6
        other = document(client, 6, seed=77)
        other.store(client)
        assert other.load(client) == 6
        counters = made.status().counters
        assert not [name for name in counters if name.endswith(("_internal", "_unknown"))]
        made.channel.close()
        fleet.close()


def numbers(bits: int) -> st.SearchStrategy[int]:
    return st.one_of(st.integers(0, 8), st.sampled_from([1 << 20, (1 << bits - 1), (1 << bits) - 1]))


def value(field: Any, doc: Document) -> st.SearchStrategy[Any]:
    kind = field.type
    if kind == FieldDescriptor.TYPE_MESSAGE:
        return messages(field.message_type, doc)
    if kind == FieldDescriptor.TYPE_BOOL:
        return st.booleans()
    if kind == FieldDescriptor.TYPE_STRING:
        return st.one_of(st.text(max_size=50), namespaces())
    if kind == FieldDescriptor.TYPE_BYTES:
        known = [doc.namespace, ROOT, TOKEN, *doc.hashes, b"".join(doc.hashes)]
        return st.one_of(st.sampled_from(known), st.binary(max_size=70))
    return numbers(32 if kind in (FieldDescriptor.TYPE_UINT32,) else 64)


def messages(descriptor: Descriptor, doc: Document) -> st.SearchStrategy[Any]:
    """Messages of a type, with fields that make sense beside ones that don't."""
    made = getattr(pb, descriptor.name)
    fields = {
        field.name: st.lists(value(field, doc), max_size=4) if field.is_repeated else value(field, doc)
        for field in descriptor.fields
    }
    if descriptor.oneofs:  # one of the kinds, or none
        options = [st.fixed_dictionaries({name: of}) for name, of in fields.items()]
        return st.one_of(st.just({}), *options).map(lambda chosen: made(**chosen))
    return st.fixed_dictionaries({}, optional=fields).map(lambda chosen: made(**chosen))


def namespaces() -> st.SearchStrategy[str]:
    """JSON that looks more or less like a namespace."""
    odd = st.one_of(
        st.none(), st.booleans(), st.integers(-1, 1 << 70), st.floats(), st.text(max_size=5), st.just([[]])
    )
    names = ["num_layers", "latent_rank", "rope_dim", "dtype", "first_layer", "strips", "block_tokens"]
    strips = st.lists(st.fixed_dictionaries({"name": odd, "nbytes": odd}), max_size=2)
    layout = st.dictionaries(st.sampled_from(names), st.one_of(odd, st.integers(1, 64), strips), max_size=5)
    fields = st.sampled_from(["model", "tenant", "salt", "rope_layout", "other"])
    whole = st.builds(
        lambda rest, inner: rest | {"layout": inner},
        st.dictionaries(fields, odd, max_size=3),
        st.one_of(odd, layout),
    )
    return st.one_of(whole, odd, layout).map(json.dumps)


@FUZZ
@given(data=st.data(), verb=st.sampled_from(sorted(VERBS)))
def test_whatever_a_message_says_gets_a_proper_status(target: Target, verb: str, data: st.DataObject) -> None:
    method = VERBS[verb]
    least, most = (0, 4) if method.client_streaming else (1, 1)
    sent = data.draw(st.lists(messages(method.input_type, target.doc), min_size=least, max_size=most))
    assert target.call(verb, *sent) in PROPER


@FUZZ
@given(verb=st.sampled_from([*sorted(VERBS), "Nothing"]), body=st.binary(max_size=200))
def test_whatever_bytes_a_call_brings_the_next_is_answered(target: Target, verb: str, body: bytes) -> None:
    call = target.channel.unary_unary(f"/{wire.SERVICE}/{verb}")
    code = grpc.StatusCode.OK
    try:
        call(body, timeout=DEADLINE)
    except grpc.RpcError as failure:
        code = failure.code()  # type: ignore[attr-defined]
    assert code in PROPER if verb in VERBS else code is grpc.StatusCode.UNIMPLEMENTED


@FUZZ
@given(body=st.binary(max_size=3000), arena=st.booleans())
def test_bytes_on_either_socket_harm_nobody(target: Target, body: bytes, arena: bool) -> None:
    path = target.daemon.arena_socket if arena else target.daemon.socket
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.connect(str(path))
        try:
            connection.sendall(body)
        except (BrokenPipeError, ConnectionResetError):
            assert not arena
    assert target.status().namespaces >= 1


def deep(depth: int) -> pb.OpenNamespaceRequest:
    return pb.OpenNamespaceRequest(namespace_json="[" * depth)


def strip_of(text: str) -> pb.OpenNamespaceRequest:
    layout = f'{{"num_layers": 1, "strips": [{{"name": "x", "nbytes": {text}}}]}}'
    return pb.OpenNamespaceRequest(namespace_json=f'{{"layout": {layout}}}')


WORKER = pb.Worker(token=TOKEN)
MANY = wire.MAX_HASHES + 1
HUGE: dict[str, tuple[str, Callable[[Document], list[Any]]]] = {
    "deep namespace": ("OpenNamespace", lambda doc: [deep(100_000)]),
    "long namespace": ("OpenNamespace", lambda doc: [deep(wire.MAX_NAMESPACE_CHARS + 1)]),
    "infinite strip": ("OpenNamespace", lambda doc: [strip_of("Infinity")]),
    "endless prompt": (
        "Match",
        lambda doc: [pb.MatchRequest(namespace=doc.namespace, tokens=(1 << 64) - 1, align=64)],
    ),
    "many hashes": ("Match", lambda doc: [pb.MatchRequest(namespace=doc.namespace, hashes=bytes(32 * MANY))]),
    "many units": (
        "Commit",
        lambda doc: [pb.CommitRequest(worker=WORKER, units=[pb.UnitMark(kinds=1)] * MANY)],
    ),
    "many credits": (
        "Load",
        lambda doc: [
            pb.LoadRequest(
                start=pb.LoadStart(
                    namespace=doc.namespace,
                    hashes=b"".join(doc.hashes),
                    worker=pb.Worker(token=TOKEN, mapped=True),
                )
            ),
            wire.load_returned([0] * MANY),
        ],
    ),
    "long piece": (
        "Upload",
        lambda doc: [
            pb.UploadRequest(lease=1, worker=WORKER, hash=doc.hashes[0], data=bytes(7 << 20), last=True)
        ],
    ),
}


@pytest.mark.parametrize("name", HUGE)
def test_what_is_too_large_is_refused_before_it_takes_memory(target: Target, name: str) -> None:
    verb, build = HUGE[name]
    sent = build(target.doc)
    if name == "many credits":  # of a worker that has its arena
        mapping = open_mapping(str(target.daemon.socket), DEADLINE)
        sent[0].start.worker.token = mapping.identity.token
    before = target.resident_bytes()
    for _ in range(3):
        assert target.call(verb, *sent) in PROPER - {grpc.StatusCode.OK, grpc.StatusCode.UNAVAILABLE}
    assert target.resident_bytes() - before < 100 << 20
    if name == "many credits":
        mapping.retire()


def test_a_message_beyond_the_limit_is_refused_by_the_transport(target: Target) -> None:
    message = pb.MatchRequest(namespace=target.doc.namespace, hashes=bytes(wire.MAX_MESSAGE_BYTES))
    assert target.call("Match", message) is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_a_crowd_of_made_up_workers_shuts_nobody_out(target: Target) -> None:
    for number in range(MAX_REMOTE + 10):
        token = number.to_bytes(16, "big")
        target.stub.Release(pb.ReleaseRequest(lease=1, worker=pb.Worker(token=token)), timeout=DEADLINE)
    start = pb.ReserveRequest(namespace=target.doc.namespace, parent=ROOT, worker=WORKER)
    target.stub.Release(
        pb.ReleaseRequest(lease=target.stub.Reserve(start, timeout=DEADLINE).lease, worker=WORKER)
    )


def test_one_worker_cannot_open_leases_without_end(target: Target) -> None:
    mapping = open_mapping(str(target.daemon.socket), DEADLINE)
    worker = pb.Worker(token=mapping.identity.token, mapped=True)
    request = pb.ReserveRequest(namespace=target.doc.namespace, parent=ROOT, worker=worker)
    codes = {target.call("Reserve", request) for _ in range(MAX_LEASES + 1)}
    assert codes == {grpc.StatusCode.OK, grpc.StatusCode.RESOURCE_EXHAUSTED}
    assert target.status().leases >= MAX_LEASES
    mapping.retire()
