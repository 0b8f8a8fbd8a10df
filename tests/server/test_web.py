"""The HTTP port and gRPC's health service say the same of a daemon's life."""

from __future__ import annotations

import socket
import urllib.error
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvstore.layout import preset
from tests.server.conftest import DEADLINE, Fleet, document, page_of, start
from tests.server.test_lifecycle import refused

Flags = Callable[..., list[str]]


def get(url: str, method: str = "GET") -> tuple[int, str]:
    try:
        request = urllib.request.Request(url, method=method)
        with urllib.request.urlopen(request, timeout=DEADLINE) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_a_ready_daemon_says_so_on_both_ports(fleet: Fleet, flags: Flags) -> None:
    daemon = start(fleet, "mapped", flags, http="127.0.0.1:0")
    url = page_of(daemon)
    assert get(url + "healthz") == (200, "ok\n")
    assert get(url + "readyz") == (200, "ok\n")
    assert get(url + "readyz", "HEAD") == (200, "")
    assert get(url + "nothing")[0] == HTTPStatus.NOT_FOUND
    assert get(url + "metrics", "POST")[0] == HTTPStatus.NOT_IMPLEMENTED
    with grpc.insecure_channel(daemon.url) as channel:
        answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=DEADLINE)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING


def test_a_draining_daemon_is_alive_and_not_ready_on_both_ports(fleet: Fleet, flags: Flags) -> None:
    daemon = start(fleet, "mapped", flags, http="127.0.0.1:0")
    url, client = page_of(daemon), fleet.connect(daemon.url)
    doc = document(client, 24, layout=preset("deepseek-v3", num_layers=30))
    doc.store(client)
    with grpc.insecure_channel(daemon.url) as channel, client.load(doc.namespace, doc.hashes) as load:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), timeout=DEADLINE)
        assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
        next(iter(load))  # a stream that is open holds the drain up
        daemon.process.terminate()
        assert next(watch).status == health_pb2.HealthCheckResponse.NOT_SERVING
        assert get(url + "healthz") == (200, "ok\n")
        assert get(url + "readyz") == (503, "draining: the daemon shuts down\n")


def test_a_client_that_sends_nothing_keeps_nobody_waiting(fleet: Fleet, flags: Flags) -> None:
    daemon = start(fleet, "mapped", flags, http="127.0.0.1:0")
    port = int(page_of(daemon).split(":")[2].rstrip("/"))
    silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(3)]
    try:
        with ThreadPoolExecutor(8) as pool:
            assert set(pool.map(get, [page_of(daemon) + "healthz"] * 16)) == {(200, "ok\n")}
    finally:
        for each in silent:
            each.close()


def test_an_http_port_in_use_is_refused_in_one_line(fleet: Fleet, flags: Flags) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"http='127.0.0.1:{port}' cannot be bound" in refused(flags(http=f"127.0.0.1:{port}"))


def test_without_the_setting_no_port_is_opened(fleet: Fleet, flags: Flags) -> None:
    assert "http off" in start(fleet, "mapped", flags).ready
