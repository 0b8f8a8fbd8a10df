"""Clients of the HTTP port that are slow, silent, many or strange cost nobody else."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from server import listener, web
from server.listener import HEAD_BYTES, MAX_CONNECTIONS
from server.web import Page, WebServer
from tests.server.conftest import DEADLINE, DaemonProcess, Fleet, flag_maker, page_of, start
from tests.server.test_failures import until
from tests.server.test_web import get

REQUEST_SECONDS = 1.0
BIG = 64 << 20  # more than the buffers of a connection hold


@pytest.fixture(scope="module")
def daemon() -> Iterator[DaemonProcess]:
    """One that gives a client all of its usual time."""
    fleet = Fleet()
    with flag_maker() as flags:
        yield start(fleet, "mapped", flags, http="127.0.0.1:0", http_hosts="cache.example, Proxy.example")
        fleet.close()


@pytest.fixture(scope="module")
def hasty() -> Iterator[DaemonProcess]:
    """One that gives a client little time."""
    fleet = Fleet()
    with flag_maker() as flags:
        yield start(fleet, "mapped", flags, http="127.0.0.1:0", request_seconds=REQUEST_SECONDS)
        fleet.close()


def connect(url: str) -> socket.socket:
    at = urlsplit(url)
    return socket.create_connection((at.hostname or "", at.port or 0), DEADLINE)


def said(connection: socket.socket) -> bytes:
    """All that comes until the other side hangs up."""
    come = b""
    with contextlib.suppress(ConnectionResetError):
        while piece := connection.recv(1 << 16):
            come += piece
    return come


def ask(url: str, text: str) -> bytes:
    with connect(url) as connection:
        connection.sendall(text.encode())
        return said(connection)


def threads(daemon: DaemonProcess) -> int:
    return len(list(Path(f"/proc/{daemon.process.pid}/task").iterdir()))


def test_silent_clients_beyond_the_cap_are_pushed_out_by_those_who_ask(daemon: DaemonProcess) -> None:
    url, before = page_of(daemon), threads(daemon)
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(connect(url)) for _ in range(3 * MAX_CONNECTIONS)]
        for _ in range(16):
            assert get(url + "healthz") == (200, "ok\n")
        assert threads(daemon) - before <= MAX_CONNECTIONS + 8
        # Those that came first were hung up on, and those that came last have their time yet.
        assert [said(each) for each in silent[:MAX_CONNECTIONS]] == [b""] * MAX_CONNECTIONS
        silent[-1].sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert said(silent[-1]).endswith(b"ok\n")


@pytest.mark.parametrize("piece", [b"", b"G"], ids=["silent", "a byte at a time"])
def test_a_request_has_one_deadline_for_all_of_it(hasty: DaemonProcess, piece: bytes) -> None:
    with connect(page_of(hasty)) as slow:
        slow.settimeout(REQUEST_SECONDS / 5)
        for _ in range(int(5 * DEADLINE / REQUEST_SECONDS)):
            try:
                slow.sendall(piece)
                if not slow.recv(1):
                    return
            except TimeoutError:
                continue
            except (ConnectionResetError, BrokenPipeError):
                return
    pytest.fail("nobody hung up on it")


@pytest.mark.parametrize(
    "request_text",
    [
        "GET /" + "x" * HEAD_BYTES,
        "GET /healthz HTTP/1.1\r\n" + "X-Filler: 0123456789\r\n" * (HEAD_BYTES // 20),
    ],
    ids=["line", "headers"],
)
def test_a_head_is_not_read_beyond_its_limit(daemon: DaemonProcess, request_text: str) -> None:
    answer = ask(page_of(daemon), request_text)
    # What was not read of it makes the kernel reset the connection, and that may overtake the answer.
    assert answer == b"" or answer.split()[1] in (b"414", b"431")
    assert get(page_of(daemon) + "healthz") == (200, "ok\n")


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "LOCALHOST:80",
        "127.0.0.1:9000",
        "[::1]:80",
        "10.1.2.3",
        "cache.example:443",
        "proxy.example",
        socket.gethostname(),
    ],
)
def test_the_port_is_asked_by_its_own_names_and_by_addresses(daemon: DaemonProcess, host: str) -> None:
    answer = ask(page_of(daemon), f"GET /healthz HTTP/1.1\r\nHost: {host}\r\n\r\n")
    assert answer.startswith(b"HTTP/1.0 200 ")


@pytest.mark.parametrize(
    "head",
    [
        "GET /status.json HTTP/1.1\r\nHost: evil.example\r\n",
        "GET /status.json HTTP/1.1\r\nHost: localhost.evil.example:9000\r\n",
        "GET /status.json HTTP/1.1\r\nHost: 127.0.0.1.evil.example\r\n",
        "GET /status.json HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n",
        "GET http://evil.example/status.json HTTP/1.1\r\nHost: localhost\r\n",
        "GET /status.json HTTP/1.1\r\nHost: evil.example@localhost]\r\n",
        "GET /metrics HTTP/1.1\r\nHost: \r\n",
        "HEAD /healthz HTTP/1.1\r\nHost: evil.example\r\n",
    ],
)
def test_a_strangers_name_is_refused_on_every_page(daemon: DaemonProcess, head: str) -> None:
    answer = ask(page_of(daemon), head + "\r\n")
    assert answer.startswith(b"HTTP/1.0 403 ")
    assert b"blocks" not in answer


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "TRACE", "CONNECT", "PATCH"])
def test_nothing_but_reading_is_served(daemon: DaemonProcess, method: str) -> None:
    answer = ask(page_of(daemon), f"{method} /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert answer.startswith(b"HTTP/1.0 501 ")


# --- inside one process: pages that take as long as the test wants


class Site:
    """A port with a page that is large, one that waits for a gate, and one that is neither."""

    def __init__(self) -> None:
        self.waiting = 0
        self._gate = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    async def large(self) -> Callable[[], Page]:
        return lambda: Page(bytes(BIG))

    async def gated(self) -> Callable[[], Page]:
        self.waiting += 1
        await self._gate.wait()
        return lambda: Page(b"open")

    async def plain(self) -> Callable[[], Page]:
        return lambda: Page(b"plain")

    def open(self) -> None:
        self._loop.call_soon_threadsafe(self._gate.set)


def visit(look: Callable[[Site, str], None], seconds: float) -> None:
    """Let ``look`` visit a site that gives its clients so many seconds."""

    async def run() -> None:
        site = Site()
        routes = {"/large": site.large, "/gated": site.gated, "/plain": site.plain}
        server = WebServer("127.0.0.1:0", routes, seconds=seconds)
        try:
            await asyncio.to_thread(look, site, server.url)
        finally:
            await server.close()

    asyncio.run(run())


def asking(url: str, path: str) -> socket.socket:
    connection = connect(url)
    connection.sendall(f"GET {path} HTTP/1.0\r\n\r\n".encode())
    return connection


def answering() -> bool:
    return any("process_request_thread" in each.name for each in threading.enumerate())


def test_who_does_not_read_the_answer_is_hung_up_on() -> None:
    def look(site: Site, url: str) -> None:
        with asking(url, "/large") as slow:
            slow.recv(1)
            until(lambda: not answering())
            assert len(said(slow)) < BIG

    visit(look, seconds=0.5)


def test_slow_readers_make_room_for_those_who_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "READING_SECONDS", 0.0)

    def look(site: Site, url: str) -> None:
        with contextlib.ExitStack() as stack:
            for _ in range(MAX_CONNECTIONS):
                stack.enter_context(asking(url, "/large")).recv(1)
            for _ in range(8):
                assert get(url + "plain") == (200, "plain")

    visit(look, seconds=DEADLINE)


def test_when_all_are_being_answered_one_more_is_hung_up_on_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web, "ANSWER_SECONDS", DEADLINE)

    def look(site: Site, url: str) -> None:
        with contextlib.ExitStack() as stack:
            busy = [stack.enter_context(asking(url, "/gated")) for _ in range(MAX_CONNECTIONS)]
            until(lambda: site.waiting == MAX_CONNECTIONS)
            with connect(url) as more:
                assert said(more) == b""
            site.open()
            assert all(said(each).endswith(b"open") for each in busy)
            assert get(url + "plain") == (200, "plain")

    visit(look, seconds=DEADLINE)
