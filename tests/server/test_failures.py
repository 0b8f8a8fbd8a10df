"""Daemons and workers that die: a miss, never a wrong byte, a hang or a lost slot."""

from __future__ import annotations

import os
import resource
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import suppress

import grpc
import pytest
import xxhash

from kvstore import wire
from kvstore.api import KVStore, MissReason, ReserveState
from kvstore.client import Client
from kvstore.errors import (
    DeadlineExceeded,
    LeaseUnknown,
    NotReserved,
    TicketUnknown,
    Unavailable,
)
from kvstore.hashing import ROOT
from kvstore.layout import preset
from kvstore.mapping import open_mapping
from kvstore.units import UnitKind, UnitMark
from kvstore.v1 import kvstore_pb2 as pb
from kvstore.v1 import kvstore_pb2_grpc
from tests.server.conftest import DEADLINE, MODES, ROOT_DIR, SMALL, Fleet, document, start

Flags = Callable[..., list[str]]
BIG = preset("deepseek-v3", num_layers=30)  # 2.2 MB a block: a quota of the small arena is 14 blocks

WORKER = textwrap.dedent("""
    import sys
    import kvstore
    from kvstore.hashing import ROOT
    from tests.server.conftest import document
    from tests.server.test_failures import BIG

    client = kvstore.connect(sys.argv[1], timeout=30)
    doc = document(client, 12, layout=BIG)
    if sys.argv[2] == "fill":
        answer = client.reserve(doc.namespace, ROOT, doc.hashes)
    else:
        batches = iter(client.load(doc.namespace, doc.hashes))
        next(batches)
    print("holding", flush=True)
    sys.stdin.read()
""")

FORKING_WORKER = WORKER.replace("print(", "import os; os.fork() or sys.stdin.read()\nprint(")


def worker(url: str, action: str) -> subprocess.Popen[str]:
    """A worker process that holds slots until it dies."""
    process = subprocess.Popen(
        [sys.executable, "-c", WORKER, url, action],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT_DIR,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "holding\n"
    return process


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


def until(condition: Callable[[], bool]) -> None:
    """Ask again until it holds; the deadline only ends a failed test."""
    deadline = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("mode", MODES)
def test_one_client_survives_kill_and_restart_of_the_daemon(mode: str, fleet: Fleet, flags: Flags) -> None:
    daemon = start(fleet, mode, flags)
    port = daemon.url.rpartition(":")[2]
    client = fleet.connect(daemon.url)
    doc = document(client, 5)
    doc.store(client)
    daemon.kill()
    assert client.match(doc.namespace, doc.hashes, len(doc.tokens)).reason is MissReason.UNAVAILABLE
    assert doc.load(client) == 0
    with pytest.raises(Unavailable):
        client.status()
    if mode == "tcp-bytes":
        fleet.daemon(*flags(f"127.0.0.1:{port}"))
    else:
        daemon.restart()
    # The digest stays valid, the connection and the arena are new.
    assert doc.load(client) == 5
    assert client.match(doc.namespace, doc.hashes, len(doc.tokens)).blocks == 5
    other = document(client, 5, seed=1)
    other.store(client)
    assert other.load(client) == 5


@pytest.mark.parametrize("mode", MODES)
def test_what_was_leased_from_a_dead_daemon_is_gone(mode: str, fleet: Fleet, flags: Flags) -> None:
    daemon = start(fleet, mode, flags)
    client = fleet.connect(daemon.url)
    doc = document(client, 5)
    old = client.reserve(doc.namespace, ROOT, doc.hashes)
    ticket = client.commit(old.lease, [])
    daemon.kill()
    if mode == "tcp-bytes":
        fleet.daemon(*flags(daemon.url))
    else:
        daemon.restart()
    # An old lease must not pass for one of the new daemon's.
    new = client.reserve(doc.namespace, ROOT, doc.hashes)
    assert [block.state for block in new.blocks] == [ReserveState.FILL] * 5
    with pytest.raises((LeaseUnknown, NotReserved)):
        client.commit(old.lease, doc.hashes[:1], [UnitMark(doc.hashes[0], UnitKind.REQUEST_END)])
    with pytest.raises(TicketUnknown):
        client.durable(ticket)
    client.release(old.lease)
    assert client.status().leases == 1


def test_a_view_into_a_dead_daemons_arena_stays_as_it_was(fleet: Fleet, flags: Flags) -> None:
    daemon = start(fleet, "mapped", flags)
    client = fleet.connect(daemon.url)
    doc = document(client, 3)
    doc.store(client)
    with client.load(doc.namespace, doc.hashes) as load:
        batch = next(iter(load))
        daemon.restart()
        other = document(client, 3, seed=1)
        other.store(client)
        assert [block.data for block in batch] == [doc.data(block) for block in doc.hashes[: len(batch)]]


@pytest.mark.parametrize("mode", MODES)
def test_a_daemon_that_dies_in_mid_load_ends_it_short(mode: str, fleet: Fleet, flags: Flags) -> None:
    daemon = start(fleet, mode, flags)
    client = fleet.connect(daemon.url)
    doc = document(client, 20, layout=BIG)
    doc.store(client)
    delivered = 0
    with client.load(doc.namespace, doc.hashes, timeout=DEADLINE) as load:
        for batch in load:
            if not delivered:
                daemon.kill()
            for block in batch:
                assert block.data == doc.data(doc.hashes[block.index])
                delivered += 1
    assert load.short == delivered
    assert 0 < delivered < 20


def circuit(client: Client) -> tuple[int, int]:
    """How often it opened, and how many calls it refused."""
    counters = client.status().counters
    return counters.get("client_circuit_opened", 0), counters.get("client_circuit_refused", 0)


@pytest.mark.parametrize("mode", ["mapped", "tcp-bytes"])
def test_a_daemon_that_hangs_costs_its_deadline_once_and_is_used_again_when_it_answers(
    mode: str, fleet: Fleet, flags: Flags
) -> None:
    daemon = start(fleet, mode, flags)
    client = fleet.connect(daemon.url, timeout=1.0)
    patient = fleet.connect(daemon.url)
    doc = document(patient, 18, layout=BIG)
    doc.store(patient)
    assert document(client, 18, layout=BIG) == doc
    with client.load(doc.namespace, doc.hashes, timeout=1.0) as load:
        for batch in load:
            daemon.process.send_signal(signal.SIGSTOP)
            delivered = batch[-1].index + 1
    # As many refusals as calls: not one of them waited for the daemon.
    for _ in range(100):
        assert client.match(doc.namespace, doc.hashes, len(doc.tokens)).reason is MissReason.UNAVAILABLE
    assert doc.load(client, timeout=1.0) == 0
    for refused in (client.status, lambda: client.reserve(doc.namespace, ROOT, doc.hashes)):
        with pytest.raises(Unavailable, match="asked no more"):
            refused()
    # The load that was cut has opened the circuit: no match had to wait for its own deadline.
    assert client._transport.breaker.counters()["circuit_refused"] >= 103
    daemon.process.send_signal(signal.SIGCONT)
    assert load.short == delivered <= 18
    until(lambda: client.match(doc.namespace, doc.hashes, len(doc.tokens)).blocks == 18)
    assert doc.load(client) == 18
    assert circuit(client)[0] == 1
    assert circuit(patient) == (0, 0)
    assert patient.status().leases == 0
    if mode == "mapped":
        daemon.wait_for("event=worker_gone")  # the first connection, given up because its slots were unsure


def test_a_daemon_that_hangs_before_the_arena_is_mapped_costs_one_deadline_too(
    fleet: Fleet, flags: Flags
) -> None:
    daemon = start(fleet, "mapped", flags)
    client = fleet.connect(daemon.url, timeout=0.5)
    doc = document(client, 3)
    daemon.process.send_signal(signal.SIGSTOP)
    assert doc.load(client) == 0
    assert client.match(doc.namespace, doc.hashes, len(doc.tokens)).reason is MissReason.UNAVAILABLE
    daemon.process.send_signal(signal.SIGCONT)
    until(lambda: client.match(doc.namespace, doc.hashes, len(doc.tokens)).reason is MissReason.NEVER_SEEN)
    doc.store(client)
    assert doc.load(client) == 3
    assert circuit(client)[0] == 1


def test_what_a_daemon_reserved_without_being_heard_comes_back_to_it(fleet: Fleet, flags: Flags) -> None:
    """The client can't know which slots were meant for it, so it leaves its connection to the arena."""
    daemon = start(fleet, "mapped", flags)
    client = fleet.connect(daemon.url, timeout=0.5)
    doc = document(client, 3)
    doc.store(client)
    daemon.process.send_signal(signal.SIGSTOP)
    with pytest.raises(DeadlineExceeded):
        client.reserve(doc.namespace, ROOT, doc.hashes)
    daemon.process.send_signal(signal.SIGCONT)
    daemon.wait_for("event=worker_gone")
    until(lambda: doc.load(client) == 3)
    assert client.status().leases == 0


def test_waiting_for_the_disk_in_vain_says_nothing_against_the_daemon(fleet: Fleet, flags: Flags) -> None:
    daemon = start(fleet, "mapped", flags)
    client = fleet.connect(daemon.url)
    doc = document(client, 1)
    ticket = doc.store(client, durable=False)
    with suppress(DeadlineExceeded):
        client.durable(ticket, timeout=0.0001)
    assert doc.load(client) == 1
    assert circuit(client) == (0, 0)


def test_a_daemon_restarted_while_the_circuit_is_open_is_used_again(fleet: Fleet, flags: Flags) -> None:
    daemon = start(fleet, "mapped", flags)
    client = fleet.connect(daemon.url, timeout=0.5)
    doc = document(client, 5)
    doc.store(client)
    daemon.process.send_signal(signal.SIGSTOP)
    assert client.match(doc.namespace, doc.hashes, len(doc.tokens)).reason is MissReason.UNAVAILABLE
    daemon.restart()
    until(lambda: client.match(doc.namespace, doc.hashes, len(doc.tokens)).blocks == 5)
    assert doc.load(client) == 5


@pytest.mark.parametrize("action", ["fill", "read"])
def test_a_killed_worker_frees_the_slots_it_held(action: str, fleet: Fleet, flags: Flags) -> None:
    daemon = start(fleet, "mapped", flags)
    client = fleet.connect(daemon.url)
    doc = document(client, 12, layout=BIG)
    if action == "read":
        doc.store(client)
    process = worker(daemon.url, action)
    assert client.status().leases == 1
    if action == "fill":
        states = {block.state for block in client.reserve(doc.namespace, ROOT, doc.hashes).blocks}
        assert states == {ReserveState.PENDING}
        client.close()
        client = fleet.connect(daemon.url)
        doc = document(client, 12, layout=BIG)
        daemon.wait_for("event=worker_gone")
    end(process)
    daemon.wait_for("event=worker_gone", count=2 if action == "fill" else 1)
    assert client.status().leases == 0
    if action == "fill":
        doc.store(client)
    assert doc.load(client) == 12


def test_the_parents_death_is_seen_though_a_forked_child_lives(fleet: Fleet, flags: Flags) -> None:
    daemon = start(fleet, "mapped", flags)
    process = subprocess.Popen(
        [sys.executable, "-c", FORKING_WORKER, daemon.url, "fill"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT_DIR,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "holding\n"
    os.kill(process.pid, signal.SIGKILL)
    daemon.wait_for("event=worker_gone")
    process.communicate()


def test_a_client_is_unavailable_in_a_forked_child(fleet: Fleet, flags: Flags) -> None:
    client = fleet.connect(start(fleet, "mapped", flags).url)
    doc = document(client, 2)
    doc.store(client)
    child = os.fork()
    if not child:
        try:
            missed = client.match(doc.namespace, doc.hashes, len(doc.tokens)).reason
            client.status()
        except Unavailable as error:
            os._exit(0 if missed is MissReason.UNAVAILABLE and "fork" in str(error) else 2)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert doc.load(client) == 2


@pytest.mark.parametrize("mode", ["unix-bytes", "tcp-bytes"])
def test_the_lease_of_a_silent_remote_worker_expires(mode: str, fleet: Fleet, flags: Flags) -> None:
    client = fleet.connect(start(fleet, mode, flags, lease_seconds=0.2).url)
    doc = document(client, 3)
    answer = client.reserve(doc.namespace, ROOT, doc.hashes)
    until(lambda: client.status().counters.get("expired_leases", 0) == 1)
    with pytest.raises((LeaseUnknown, NotReserved)):
        client.commit(answer.lease, doc.hashes)
    until(lambda: client.status().leases == 0)
    doc.store(client)
    assert doc.load(client) == 3


def test_a_block_is_not_committed_before_its_bytes_came(fleet: Fleet, flags: Flags) -> None:
    daemon = start(fleet, "tcp-bytes", flags)
    client = fleet.connect(daemon.url)
    doc = document(client, 1)
    token = pb.Worker(token=b"w" * 16)
    with grpc.insecure_channel(daemon.url) as channel:
        stub = kvstore_pb2_grpc.KVStoreStub(channel)
        reserve = pb.ReserveRequest(namespace=doc.namespace, parent=ROOT, hashes=doc.hashes[0], worker=token)
        lease = stub.Reserve(reserve).lease
        commit = pb.CommitRequest(lease=lease, hashes=doc.hashes[0], worker=token)
        data = doc.data(doc.hashes[0])
        piece = pb.UploadRequest(
            lease=lease, worker=token, hash=doc.hashes[0], data=data, checksum=1, last=True
        )
        gap = pb.UploadRequest(
            lease=lease, worker=token, hash=doc.hashes[0], data=data, offset=1, checksum=1, last=True
        )
        for attempt, code in (
            (lambda: stub.Commit(commit), grpc.StatusCode.FAILED_PRECONDITION),
            (lambda: stub.Upload(iter([gap])), grpc.StatusCode.INVALID_ARGUMENT),
            (lambda: stub.Upload(iter([piece])), grpc.StatusCode.DATA_LOSS),
            (lambda: stub.Commit(commit), grpc.StatusCode.FAILED_PRECONDITION),
        ):
            with pytest.raises(grpc.RpcError) as failed:
                attempt()
            assert failed.value.code() is code
        piece.checksum = xxhash.xxh3_64_intdigest(data)
        stub.Upload(iter([piece]))
        stub.Commit(commit)
    assert doc.load(client) == 1


class DamagingDaemon(kvstore_pb2_grpc.KVStoreServicer):
    """Sends one good block and one whose bytes don't fit their checksum."""

    def OpenNamespace(self, request: pb.OpenNamespaceRequest, context: object) -> pb.OpenNamespaceResponse:
        return pb.OpenNamespaceResponse(digest=bytes(32))

    def Status(self, request: pb.StatusRequest, context: object) -> pb.StatusResponse:
        return pb.StatusResponse(mode="ok")

    def Load(self, requests: object, context: object):  # type: ignore[no-untyped-def]
        yield pb.LoadResponse(lease=1)
        data = bytes(SMALL.block_bytes)
        good = xxhash.xxh3_64_intdigest(data)
        for block, checksum in ((0, good), (1, good + 1)):
            yield pb.LoadResponse(chunk=pb.Chunk(block=block, data=data, checksum=checksum, last=True))


def test_bytes_damaged_on_the_way_end_the_hit_before_them(fleet: Fleet) -> None:
    server = grpc.server(futures.ThreadPoolExecutor(2))
    kvstore_pb2_grpc.add_KVStoreServicer_to_server(DamagingDaemon(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    client = fleet.connect(f"127.0.0.1:{port}")
    doc = document(client, 3)
    with client.load(bytes(32), doc.hashes) as load:
        assert [block.index for batch in load for block in batch] == [0]
    assert load.short == 1
    assert client.status().counters["client_damaged_blocks"] == 1
    server.stop(None).wait()


def test_a_daemon_out_of_descriptors_maps_workers_again_once_it_has_some(fleet: Fleet, flags: Flags) -> None:
    daemon = start(fleet, "mapped", flags)
    pid = daemon.process.pid
    taken = {int(each) for each in os.listdir(f"/proc/{pid}/fd")}
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (min(set(range(1024)) - taken), before[1]))
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as worker:
        worker.connect(str(daemon.arena_socket))
        daemon.wait_for('event=handover_failed reason="Too many open files"')
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)
        worker.settimeout(DEADLINE)
        assert b'"arena_bytes": 67108864' in worker.recv(1024)
    doc = document(fleet.connect(daemon.url), 3)
    doc.store(fleet.clients[0])
    assert doc.load(fleet.clients[0]) == 3


def test_a_peer_of_another_user_gets_no_arena(fleet: Fleet, flags: Flags) -> None:
    if os.getuid():
        pytest.skip("only root can become another user")
    daemon = start(fleet, "mapped", flags)
    for path in (daemon.socket.parent.parent, daemon.socket.parent, daemon.arena_socket):
        path.chmod(0o777)
    child = os.fork()
    if not child:
        os.setuid(65534)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.connect(str(daemon.arena_socket))
            os._exit(len(connection.recv(1)))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    daemon.wait_for("event=worker_refused")


def test_a_closed_client_is_unavailable_and_its_leases_are_released(fleet: Fleet, flags: Flags) -> None:
    url = start(fleet, "tcp-bytes", flags).url
    client: KVStore = fleet.connect(url)
    doc = document(client, 2)
    client.reserve(doc.namespace, ROOT, doc.hashes)
    client.close()
    with pytest.raises(Unavailable):
        client.status()
    assert client.match(doc.namespace, doc.hashes, len(doc.tokens)).reason is MissReason.UNAVAILABLE
    assert fleet.connect(url).status().leases == 0


def test_that_a_loads_requests_end_gives_no_slot_back(fleet: Fleet, flags: Flags) -> None:
    """A stream that is cancelled may look like one that is half-closed, and the worker may still look."""
    daemon = start(fleet, "mapped", flags)
    client = fleet.connect(daemon.url)
    doc = document(client, 5)
    doc.store(client)
    until(lambda: client.status().leases == 0)
    mapping = open_mapping(daemon.url.removeprefix("unix://"), DEADLINE)
    heard = threading.Event()

    def requests() -> Iterator[pb.LoadRequest]:
        yield wire.load_start(mapping.identity, doc.namespace, doc.hashes, 0, None)
        heard.wait(DEADLINE)

    with grpc.insecure_channel(daemon.url) as channel:
        stub = kvstore_pb2_grpc.KVStoreStub(channel)
        answers = stub.Load(requests())
        lease = next(answers).lease
        assert len(next(answers).announced.offsets) > 0
        heard.set()
        list(answers)
        assert client.status().leases == 1
        stub.Release(pb.ReleaseRequest(lease=lease, worker=wire.worker(mapping.identity)))
    assert client.status().leases == 0
    mapping.retire()
