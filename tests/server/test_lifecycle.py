"""A daemon's start, its services, and its clean end."""

from __future__ import annotations

import signal
import stat
import subprocess
import sys
from collections.abc import Callable

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from kvstore.hashing import ROOT
from kvstore.layout import preset
from kvstore.wire import SERVICE
from tests.server.conftest import DEADLINE, ROOT_DIR, Fleet, document, start

Flags = Callable[..., list[str]]


def refused(flags: list[str]) -> str:
    """Start a daemon that must not start; its one line on stderr."""
    done = subprocess.run(
        [sys.executable, "-m", "server", "serve", *flags, "--log-level", "error"],
        cwd=ROOT_DIR,
        capture_output=True,
        text=True,
        timeout=DEADLINE,
    )
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1, done.stderr
    assert not done.stdout
    return done.stderr


def test_the_ready_line_says_what_is_served(fleet: Fleet, flags: Flags) -> None:
    daemon = start(fleet, "mapped", flags)
    document(client := fleet.connect(daemon.url), 3).store(client)
    assert "host 64.0 MiB pinned=" in daemon.ready
    assert daemon.ready.endswith("disk 256.0 MiB, 0 blocks, 0 units)\n")
    daemon.restart()
    assert daemon.ready.endswith("3 blocks, 1 units)\n")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_makes_what_was_committed_durable(number: int, fleet: Fleet, flags: Flags) -> None:
    daemon = start(fleet, "mapped", flags)
    client = fleet.connect(daemon.url)
    doc = document(client, 12, layout=preset("deepseek-v3", num_layers=20))
    doc.store(client, durable=False)
    daemon.process.send_signal(number)
    assert daemon.process.wait(DEADLINE) == 0
    assert not daemon.socket.exists()
    assert not daemon.arena_socket.exists()
    daemon.start()
    match = client.match(doc.namespace, doc.hashes, len(doc.tokens))
    assert (match.blocks, match.disk_blocks) == (12, 12)
    assert doc.load(client) == 12


def test_a_drain_ends_open_streams_and_leases(fleet: Fleet, flags: Flags) -> None:
    daemon = start(fleet, "mapped", flags)
    client = fleet.connect(daemon.url)
    doc = document(client, 24, layout=preset("deepseek-v3", num_layers=30))
    doc.store(client)
    client.reserve(
        doc.namespace, doc.hashes[-1], document(client, 2, seed=1, layout=preset("tiny")).hashes[:0]
    )
    with client.load(doc.namespace, doc.hashes) as load:
        for batch in load:
            if daemon.process.poll() is None:
                assert daemon.term() == 0
            delivered = batch[-1].index + 1
    assert load.short == delivered < 24
    assert "event=stopped" in "".join(daemon.log)


def test_health_and_reflection_answer(fleet: Fleet, flags: Flags) -> None:
    daemon = start(fleet, "mapped", flags)
    with grpc.insecure_channel(daemon.url) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for service in ("", SERVICE):
            request = health_pb2.HealthCheckRequest(service=service)
            assert health.Check(request, timeout=DEADLINE).status == health_pb2.HealthCheckResponse.SERVING
        watch = health.Watch(health_pb2.HealthCheckRequest(service=SERVICE), timeout=DEADLINE)
        assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
        reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        (answer,) = reflection.ServerReflectionInfo(iter([request]), timeout=DEADLINE)
        assert SERVICE in [service.name for service in answer.list_services_response.service]
        daemon.process.send_signal(signal.SIGTERM)
        assert next(watch).status == health_pb2.HealthCheckResponse.NOT_SERVING


def test_a_second_daemon_on_the_data_is_refused_and_the_first_goes_on(fleet: Fleet, flags: Flags) -> None:
    daemon = start(fleet, "mapped", flags)
    assert "data" in refused(flags("127.0.0.1:0"))
    client = fleet.connect(daemon.url)
    doc = document(client, 2)
    doc.store(client)
    assert doc.load(client) == 2


def test_a_live_socket_is_not_taken_and_a_stale_one_is(fleet: Fleet, flags: Flags) -> None:
    daemon = start(fleet, "mapped", flags)
    other = flags(data=f"{daemon.socket.parent}/other")
    assert f"another daemon listens on {daemon.socket}" in refused(other)
    daemon.kill()
    assert daemon.socket.exists()
    second = fleet.daemon(*other)
    assert second.url == daemon.url
    assert second.term() == 0


def test_a_port_in_use_is_refused(fleet: Fleet, flags: Flags) -> None:
    daemon = start(fleet, "tcp-bytes", flags)
    line = refused(flags(daemon.url, data=f"{flags()[1]}-other"))
    assert f"listen='{daemon.url}' cannot be bound" in line


def test_a_file_that_is_no_socket_is_not_replaced(fleet: Fleet, flags: Flags) -> None:
    daemon = start(fleet, "mapped", flags)
    assert daemon.term() == 0
    daemon.socket.write_text("precious")
    assert "no socket" in refused(flags())
    assert daemon.socket.read_text() == "precious"


def test_sockets_and_data_are_private(fleet: Fleet, flags: Flags) -> None:
    daemon = start(fleet, "mapped", flags)
    for path in (daemon.socket.parent, daemon.socket, daemon.arena_socket):
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0


def test_the_log_is_structured_and_names_no_block(fleet: Fleet, flags: Flags) -> None:
    daemon = start(fleet, "mapped", flags)
    client = fleet.connect(daemon.url)
    doc = document(client, 2)
    doc.store(client)
    doc.load(client)
    lease = client.reserve(doc.namespace, ROOT, doc.hashes).lease
    client.release(lease)
    client.close()
    daemon.wait_for("event=worker_gone")
    assert daemon.term() == 0
    daemon.wait_for("event=stopped")
    assert all("event=" in line and "level=" in line for line in daemon.log)
    assert not any(block.hex() in line for block in doc.hashes for line in daemon.log)
