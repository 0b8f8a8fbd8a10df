"""The HTTP port and gRPC's health service say the same of a daemon's life."""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from subprocess import PIPE
from urllib.parse import urlsplit

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvstore.layout import preset
from server import web
from server.web import Page
from tests.server.conftest import DEADLINE, ROOT_DIR, Fleet, document, page_of, start
from tests.server.test_failures import until
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


# A daemon whose store opens once a line comes.
SLOW = """
import asyncio, sys
from kvstore.store import Store
from server.commands.serve import run_daemon
from server.config import load

async def open_store(settings, observer):
    await asyncio.to_thread(sys.stdin.readline)
    return await Store.open(settings, observer=observer)

flags = [part.removeprefix("--").replace("-", "_") for part in sys.argv[1::2]]
run_daemon(load(dict(zip(flags, sys.argv[2::2]))), open_store)
"""


def test_a_daemon_that_still_opens_its_store_is_alive_and_not_ready(flags: Flags) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        url = f"http://127.0.0.1:{free.getsockname()[1]}/"
    command = [sys.executable, "-c", SLOW, *flags(http=url.split("/")[2])]
    with subprocess.Popen(command, stdin=PIPE, stdout=PIPE, text=True, cwd=ROOT_DIR) as daemon:
        assert daemon.stdin is not None
        assert daemon.stdout is not None
        until(lambda: reachable(url))
        assert get(url + "healthz") == (200, "ok\n")
        for path in ("readyz", "status.json"):
            assert get(url + path) == (503, "starting: the store is being opened\n")
        assert "latentkv_ready 0.0" in get(url + "metrics")[1]
        assert "latentkv_dirty_blocks" not in get(url + "metrics")[1]
        daemon.stdin.write("\n")
        daemon.stdin.flush()
        assert daemon.stdout.readline().startswith("latentkv: serving on")
        assert get(url + "readyz") == (200, "ok\n")
        daemon.terminate()
        assert daemon.wait(DEADLINE) == 0


def reachable(url: str) -> bool:
    try:
        return get(url + "healthz")[0] == HTTPStatus.OK
    except OSError:
        return False


async def fails() -> Callable[[], Page]:
    raise ZeroDivisionError("a defect")


async def waits() -> Callable[[], Page]:
    await asyncio.Event().wait()
    raise AssertionError("nobody sets it")


async def works() -> Callable[[], Page]:
    return lambda: Page(b"works")


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
def test_a_page_that_fails_or_hangs_or_is_not_read_costs_itself_alone(
    host: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(web, "ANSWER_SECONDS", 0.05)
    caplog.set_level(logging.DEBUG)

    async def serve() -> None:
        try:
            server = web.WebServer(f"{host}:0", {"/fails": fails, "/waits": waits, "/works": works})
        except OSError:
            pytest.skip(f"this machine has no {host}")
        try:
            await asyncio.to_thread(look, server.url)
        finally:
            await server.close()

    def look(url: str) -> None:
        assert get(url + "fails") == (500, "the page failed; see the daemon's log\n")
        assert get(url + "waits") == (503, "the event loop did not answer within 0.05 s\n")
        address = urlsplit(url)
        for _ in range(8):  # more than there are threads
            with socket.create_connection((address.hostname, address.port)) as rude:
                rude.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        until(lambda: caplog.text.count("event=page_unread") == 8)
        assert get(url + "works") == (200, "works")
        assert caplog.text.count("event=page_failed path=/fails") == 1

    asyncio.run(serve())
