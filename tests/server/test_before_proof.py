"""What a peer may cost before the daemon knows who it is, and what one that is known may."""

from __future__ import annotations

import contextlib
import signal
import socket
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

import kvstore
from benchmarks.soaking import hostile
from benchmarks.soaking.hostile import EMPTY_MARKS, Victim
from kvstore import wire
from kvstore.client import Client
from kvstore.errors import Unavailable
from kvstore.identity import Identity
from kvstore.namespace import Namespace
from kvstore.v1 import kvstore_pb2 as pb
from kvstore.v1 import kvstore_pb2_grpc
from server.connections import MAX_STREAMS
from server.credentials import hash_of, new_token
from server.operators import OPERATOR
from server.receiving import MAX_CALLS, PLACES
from tests.server.conftest import DEADLINE, SMALL, DaemonProcess, Fleet, document, flag_maker
from tests.server.test_failures import until
from tests.server.test_hostile import VERBS
from tests.server.test_tenants import OPERATORS, WORKER, entry

MIB = 1 << 20
SERVICES = {wire.SERVICE: [*VERBS], OPERATOR: [method.name for method in OPERATORS.methods]}
EVERY_VERB = [(service, verb) for service, verbs in SERVICES.items() for verb in [*verbs, "Nothing", ""]]
RUBBISH = b"\xff\xff\xff"
REQUEST_SECONDS = 2.0


class House:
    """A daemon with credentials, and calls to it with and without them."""

    def __init__(self, fleet: Fleet, daemon: DaemonProcess, tokens: dict[str, str]) -> None:
        self.fleet = fleet
        self.daemon = daemon
        self.victim = Victim(daemon.url)
        self.tokens = tokens
        self.channel = grpc.insecure_channel(
            daemon.url.replace("unix://", "unix:"), [("grpc.max_send_message_length", -1)]
        )

    def proof(self, who: str) -> tuple[tuple[str, str], ...]:
        return (("authorization", f"Bearer {self.tokens[who]}"),) if who else ()

    def code(self, method: str, *messages: bytes, who: str = "", **options: Any) -> grpc.StatusCode:
        call = self.channel.stream_stream(method)
        try:
            list(call(iter(messages), timeout=DEADLINE, metadata=self.proof(who), **options))
        except grpc.RpcError as failure:
            return failure.code()  # type: ignore[no-any-return, attr-defined]
        return grpc.StatusCode.OK

    def most_memory(self) -> int:
        """The most that the daemon ever had, in bytes."""
        lines = Path(f"/proc/{self.daemon.process.pid}/status").read_text().splitlines()
        (line,) = [line for line in lines if line.startswith("VmHWM:")]
        return int(line.split()[1]) * 1024

    def answer(self, who: str) -> tuple[grpc.StatusCode, str]:
        call = self.channel.unary_unary(f"/{wire.SERVICE}/Status")
        answer = call.future(b"", timeout=DEADLINE, metadata=self.proof(who))
        return answer.code(), answer.details()

    def leases(self) -> int:
        call = kvstore_pb2_grpc.KVStoreStub(self.channel).Status
        return int(call(pb.StatusRequest(), timeout=DEADLINE, metadata=self.proof("ops")).leases)

    def counter(self, name: str) -> int:
        call = kvstore_pb2_grpc.KVStoreStub(self.channel).Status
        answer = call(pb.StatusRequest(), timeout=DEADLINE, metadata=self.proof("ops"))
        return int(answer.counters[name])

    def works(self, who: str = "search") -> bool:
        return self.answer(who)[0] is grpc.StatusCode.OK


@contextlib.contextmanager
def opened(path: Path, **settings: object) -> Iterator[House]:
    """A daemon that three tokens are known to; at its end it has failed nowhere."""
    fleet, tokens = Fleet(), {name: new_token() for name in ("search", "chat", "ops")}
    file = path / "credentials.toml"
    proofs = {name: f"token_sha256 = '{hash_of(token)}'" for name, token in tokens.items()}
    file.write_text(
        entry("search", proofs["search"], ["search"])
        + entry("chat", proofs["chat"], ["chat"])
        + entry("ops", proofs["ops"], ["*"], "operator = true")
    )
    with flag_maker() as flags:
        daemon = fleet.daemon(*flags(credentials=file, **settings))
        made = House(fleet, daemon, tokens)
        yield made
        assert daemon.process.poll() is None
        assert made.works()
        log = "".join(daemon.log)
        assert "Traceback" not in log, log[log.index("Traceback") - 200 :][:4000]
        assert "call_failed" not in log
        made.channel.close()
        fleet.close()


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    with opened(tmp_path_factory.mktemp("house"), request_seconds=REQUEST_SECONDS) as made:
        yield made


# --- memory


@pytest.mark.parametrize("burst", [hostile.bombs, hostile.marks])
def test_what_a_stranger_sends_is_not_even_read(house: House, burst: Any) -> None:
    before = house.most_memory()
    assert burst(house.victim, 16) == Counter(UNAUTHENTICATED=16)
    assert house.most_memory() - before < 64 * MIB


def marks(count: int = EMPTY_MARKS) -> bytes:
    return pb.CommitRequest(lease=1, worker=WORKER).SerializeToString() + b"\x1a\x00" * count


BLOATED = {
    "empty marks": ("Commit", [marks()]),
    "marks with nothing in them that counts": ("Commit", [b"\x1a\x02\x10\x00" * 2_000_000]),
    "one mark with everything in it": ("Commit", [b"\x1a\x80\x89\x7a" + b"\x0a\x00" * 1_000_000]),
    "two kinds of message in turn": ("Load", [b"\x0a\x00\x12\x00" * 2_000_000]),
    "two kinds in turn, later": ("Load", [pb.LoadRequest(start=pb.LoadStart()).SerializeToString()] * 2),
    "a worker again and again": ("Reserve", [b"\x2a\x00" * 4_000_000]),
    "fields that nobody knows": ("Match", [b"\xf8\x07\x00" * 2_600_000]),
    "groups": ("Match", [b"\xfb\x07\xfc\x07" * 2_000_000]),
    "numbers side by side": ("Load", [b"\x12\x80\x80\xf4\x03\x0a\xfb\xff\xf3\x03" + bytes(8_000_000 - 5)]),
    "a number without an end": ("Match", [b"\xff" * 7_000_000]),
    "a namespace of brackets": ("OpenNamespace", [b"\x0a\x80\x80\x80\x02" + b"[" * (4 << 20)]),
}


@pytest.mark.parametrize("name", BLOATED, ids=lambda name: name.replace(" ", "_"))
def test_a_message_is_counted_before_it_becomes_objects(house: House, name: str) -> None:
    verb, messages = BLOATED[name]
    before = house.most_memory()
    for _ in range(3):
        code = house.code(f"/{wire.SERVICE}/{verb}", *messages, who="search")
        assert code in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND), code
    assert house.most_memory() - before < 64 * MIB


def test_many_messages_at_once_become_objects_one_after_another(house: House) -> None:
    before = house.most_memory()
    # As many marks as a commit may have, of four bytes each, which are refused for what they say.
    marks = [pb.UnitMark(kinds=8)] * wire.MAX_HASHES
    body = pb.CommitRequest(worker=WORKER, lease=1, units=marks).SerializeToString()
    call = house.channel.unary_unary(f"/{wire.SERVICE}/Commit", None, None)
    running = [call.future(body, timeout=DEADLINE, metadata=house.proof("search")) for _ in range(24)]
    assert {each.code() for each in running} <= {
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.NOT_FOUND,
    }
    # One takes some ten MiB; all together would take a few hundred.
    assert house.most_memory() - before < 96 * MIB


def test_compressed_messages_are_refused_and_never_unpacked(house: House) -> None:
    before = house.most_memory()
    body = bytes(40 * MIB)
    for who, code in (("", grpc.StatusCode.UNAUTHENTICATED), ("search", grpc.StatusCode.INVALID_ARGUMENT)):
        method = f"/{wire.SERVICE}/Match"
        assert house.code(method, body, who=who, compression=grpc.Compression.Gzip) is code
    assert house.most_memory() - before < 32 * MIB


@pytest.mark.parametrize(
    "verb", sorted({*VERBS} - {"OpenNamespace", "Match", "Load", "Reserve", "Upload", "Commit"})
)
def test_a_verb_that_needs_little_takes_little(house: House, verb: str) -> None:
    large = b"\xfa\x07\x80\x80\x08" + bytes(1 << 17)  # an unknown field
    assert house.code(f"/{wire.SERVICE}/{verb}", large, who="search") is grpc.StatusCode.INVALID_ARGUMENT


# --- bytes that are no message


@pytest.mark.parametrize(("service", "verb"), EVERY_VERB)
def test_rubbish_is_answered_by_who_sent_it(house: House, service: str, verb: str) -> None:
    method = f"/{service}/{verb}"
    assert house.code(method, RUBBISH) is grpc.StatusCode.UNAUTHENTICATED
    assert house.code(method) is grpc.StatusCode.UNAUTHENTICATED
    if verb not in SERVICES[service]:
        assert house.code(method, RUBBISH, who="ops") is grpc.StatusCode.UNIMPLEMENTED
        return
    assert house.code(method, RUBBISH, who="ops") is grpc.StatusCode.INVALID_ARGUMENT
    refused = grpc.StatusCode.NOT_FOUND if service == OPERATOR else grpc.StatusCode.INVALID_ARGUMENT
    assert house.code(method, RUBBISH, who="search") is refused


@pytest.mark.parametrize(
    "method",
    [
        "/grpc.health.v1.Health/Check",
        "/grpc.health.v1.Health/Watch",
        "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
    ],
)
def test_rubbish_to_the_services_for_everyone_is_refused_as_such(house: House, method: str) -> None:
    assert house.code(method, RUBBISH) is grpc.StatusCode.INVALID_ARGUMENT
    assert house.code(method, b"\x0a\x80\x80\x08" + b"x" * (1 << 17)) is grpc.StatusCode.INVALID_ARGUMENT


def test_the_services_for_everyone_still_answer(house: House) -> None:
    check = health_pb2.HealthCheckRequest().SerializeToString()
    assert house.code("/grpc.health.v1.Health/Check", check) is grpc.StatusCode.OK
    method = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
    asked = reflection_pb2.ServerReflectionRequest(list_services="").SerializeToString()
    (answer,) = house.channel.stream_stream(method)(iter([asked]), timeout=DEADLINE)
    assert wire.SERVICE in reflection_pb2.ServerReflectionResponse.FromString(answer).__str__()


def test_much_rubbish_is_a_few_lines_in_the_log(house: House) -> None:
    before = len(house.daemon.log)
    came = hostile.babble(house.victim, 50)
    assert came == Counter(UNAUTHENTICATED=50 * (len(OPERATORS.methods) + 1))
    assert len(house.daemon.log) - before < 30


def test_what_a_verb_is_called_is_not_remembered(house: House) -> None:
    for number in range(20):
        assert house.code(f"/{OPERATOR}/Made{number}", RUBBISH) is grpc.StatusCode.UNAUTHENTICATED
    stub = kvstore_pb2_grpc.KVStoreStub(house.channel)
    counters = stub.Status(pb.StatusRequest(), timeout=DEADLINE, metadata=house.proof("ops")).counters
    assert counters["rpc_unknown_unauthenticated"] >= 20
    assert not [name for name in counters if "made" in name]


# --- time


STREAMS = {
    "Load": [],
    "Match": [],
    "Status": [],
    "Upload": [],
    "Upload, later": [pb.UploadRequest(lease=1, worker=pb.Worker(token=b"u" * 16))],
}


@pytest.mark.parametrize("name", STREAMS)
def test_a_message_that_does_not_come_ends_the_call(house: House, name: str) -> None:
    over = threading.Event()

    def some() -> Iterator[bytes]:
        yield from (message.SerializeToString() for message in STREAMS[name])
        over.wait(DEADLINE)

    call = house.channel.stream_stream(f"/{wire.SERVICE}/{name.split(',')[0]}")
    with pytest.raises(grpc.RpcError) as raised:
        list(call(some(), timeout=DEADLINE, metadata=house.proof("search")))
    over.set()
    failure: Any = raised.value
    if name == "Upload, later":  # no lease of that name: it is refused by what it says
        assert failure.code() in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND)
        return
    assert failure.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert "no whole message" in failure.details()


def test_a_load_whose_bytes_are_not_taken_ends_with_its_lease(tmp_path: Path) -> None:
    with opened(tmp_path, lease_seconds=0.5) as house, contextlib.ExitStack() as held:
        unread_loads(house, held, 4)
        # More of them than the connection's window may have room for.
        until(lambda: house.counter("rpc_load_deadline_exceeded") > 0)
        until(lambda: house.leases() == 0)


def test_strangers_streams_that_say_nothing_are_refused_at_once(house: House) -> None:
    assert hostile.silent_loads(house.victim, 16) == Counter(UNAUTHENTICATED=16)


def test_calls_that_stall_half_way_make_room_for_those_that_come_whole(house: House) -> None:
    with contextlib.ExitStack() as held:
        for _ in range(2):
            connection = held.enter_context(hostile.greeted(house.victim))
            for stream in range(1, PLACES * 2, 2):
                proof = dict(house.proof("search"))
                # A message of a MiB is announced, and does not come.
                begun = hostile.opened_call("Match", stream, **proof)
                connection.sendall(begun + hostile.frame(0, 0, stream, b"\x00\x00\x10\x00\x00" + bytes(100)))
        assert all(house.works() for _ in range(8))


def unread_loads(house: House, held: contextlib.ExitStack, count: int) -> None:
    """So many Loads by `search` whose blocks nobody takes; they fill a connection's window, and stay."""
    client = kvstore.connect(house.daemon.url, timeout=DEADLINE, identity=Identity(house.tokens["search"]))
    held.callback(client.close)
    doc = document(client, 6, tenant="search")
    doc.store(client)
    worker = pb.Worker(token=b"l" * 16)
    start = pb.LoadStart(namespace=doc.namespace, hashes=b"".join(doc.hashes), worker=worker)
    for first in range(0, count, MAX_STREAMS):
        connection = held.enter_context(hostile.greeted(house.victim))
        for stream in range(1, 2 * min(MAX_STREAMS, count - first), 2):
            begun = hostile.opened_call("Load", stream, **dict(house.proof("search")))
            connection.sendall(begun + hostile.message(pb.LoadRequest(start=start), stream))


def test_one_caller_has_so_many_calls_and_others_go_on(house: House) -> None:
    refused = f"{MAX_CALLS} calls of this caller are open already; wait for some to end"
    with contextlib.ExitStack() as held:
        unread_loads(house, held, MAX_CALLS)
        until(lambda: house.answer("search") == (grpc.StatusCode.RESOURCE_EXHAUSTED, refused))
        assert house.works("chat")
        assert house.works("ops")
    until(house.works)


# --- connections


def test_calls_that_are_reset_cancel_nobody_elses(house: House) -> None:
    assert house.works()  # so that the connection is there
    flood = [hostile.greeted(house.victim) for _ in range(8)]
    process = house.daemon.process
    process.send_signal(signal.SIGSTOP)
    try:
        threads = [threading.Thread(target=_reset, args=(each,), daemon=True) for each in flood]
        for thread in threads:
            thread.start()
        call = house.channel.unary_unary(f"/{wire.SERVICE}/Status")
        running = [call.future(b"", timeout=DEADLINE, metadata=house.proof("search")) for _ in range(16)]
    finally:
        process.send_signal(signal.SIGCONT)
    assert {each.code() for each in running} == {grpc.StatusCode.OK}
    for connection in flood:
        connection.close()


def _reset(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        for stream in range(1, 4000, 2):
            connection.sendall(
                hostile.opened_call("Match", stream) + hostile.frame(3, 0, stream, b"\0\0\0\x08")
            )


@pytest.mark.parametrize("burst", [hostile.idle_connections, hostile.half_handshakes])
def test_a_connection_that_says_nothing_is_hung_up_on(house: House, burst: Any) -> None:
    with hostile.connected(house.victim) as silent:
        silent.settimeout(DEADLINE)
        if burst is hostile.half_handshakes:
            silent.sendall(b"PRI * HT")
        with contextlib.suppress(ConnectionResetError):
            while silent.recv(1 << 12):  # the daemon's own settings come first
                pass


def test_descriptors_are_as_many_as_may_be(house: House) -> None:
    lines = Path(f"/proc/{house.daemon.process.pid}/limits").read_text().splitlines()
    (soft, hard) = next(line.split()[3:5] for line in lines if line.startswith("Max open files"))
    assert int(soft) == min(int(hard), 1 << 16)


def test_connections_leave_the_daemon_its_descriptors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limited = tmp_path / "python"
    limited.write_text(f'#!/bin/sh\nulimit -n 256\nexec {sys.executable} "$@"\n')
    limited.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(limited))
    with opened(tmp_path) as house, contextlib.ExitStack() as held:
        assert house.works()
        silent = []
        for _ in range(400):
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # hung up on before it greeted
                silent.append(held.enter_context(hostile.greeted(house.victim)))
        assert sum(not hung_up(each) for each in silent) <= 256 // 2
        # Who is connected goes on, and what needs descriptors of its own has them.
        assert house.works()
        client = kvstore.connect(house.daemon.url, timeout=DEADLINE, identity=Identity(house.tokens["chat"]))
        held.callback(client.close)
        for each in silent:
            each.close()
        until(lambda: can_open(client))


def hung_up(connection: socket.socket) -> bool:
    connection.settimeout(DEADLINE)
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def can_open(client: Client) -> bool:
    try:
        client.open_namespace(Namespace(SMALL, tenant="chat"))
    except Unavailable:
        return False
    return True
