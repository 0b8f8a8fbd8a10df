"""The standard library's threading HTTP server, for clients that may be slow, silent or many.

Each connection is one request, and has one deadline for all of it: to send it, and to read the
answer. There are so many at once, with a thread each. One too many pushes out the oldest that has
not said yet what it wants, or takes long to read it: so slow clients keep nobody out.
"""

from __future__ import annotations

import contextlib
import http.client
import io
import logging
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, HTTPServer, ThreadingHTTPServer
from typing import Any, cast

from server.events import event

log = logging.getLogger(__name__)

MAX_CONNECTIONS = 64
READING_SECONDS = 1.0  # for a client to read its answer when others wait
HEAD_BYTES = 16 << 10  # of a request: its line and its headers
_OUT_OF_DESCRIPTORS_SECONDS = 0.2  # before the next is accepted


@dataclass(slots=True)
class _Client:
    """A connection and its deadline."""

    until: float  # monotonic seconds
    asking: bool = True  # it has not said yet what it wants
    reading: float | None = None  # since when it has had its answer to read

    def may_go(self, now: float) -> bool:
        """Whether it may be ended for another's sake."""
        return self.asking or (self.reading is not None and now - self.reading > READING_SECONDS)


class Listener(ThreadingHTTPServer):
    """Lets ``respond`` answer the requests that come to an address."""

    daemon_threads = True
    block_on_close = False  # see ``finish``
    request_queue_size = MAX_CONNECTIONS

    def __init__(self, address: tuple[str, int], respond: Callable[[Request], None], seconds: float) -> None:
        """Bind. Raises ``OSError``. A client has ``seconds`` for all that it does."""
        self.respond = respond
        self._seconds = seconds
        self._news = threading.Condition()  # over what follows
        self._clients: dict[socket.socket, _Client] = {}  # the oldest first
        if ":" in address[0]:
            self.address_family = socket.AF_INET6
        super().__init__(address, Request)

    def server_bind(self) -> None:
        """As ``TCPServer``: ``HTTPServer`` also looks its own name up, which may take long."""
        self.allow_reuse_port = False
        super(HTTPServer, self).server_bind()

    def get_request(self) -> tuple[socket.socket, Any]:
        """As ``TCPServer``; out of descriptors it waits a moment, for the next try would be at once."""
        try:
            return super().get_request()
        except OSError:
            time.sleep(_OUT_OF_DESCRIPTORS_SECONDS)
            raise

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Whether there is room for one more."""
        with self._news:
            now = time.monotonic()
            if len(self._clients) >= MAX_CONNECTIONS:
                slow = next((each for each, client in self._clients.items() if client.may_go(now)), None)
                if slow is None:
                    return False
                self._end(slow)
            self._clients[request] = _Client(now + self._seconds)
        return True

    def service_actions(self) -> None:
        """End those whose time is over; called by ``serve_forever`` every now and then."""
        now = time.monotonic()
        with self._news:
            for late in [each for each, client in self._clients.items() if client.until <= now]:
                self._end(late)

    def _end(self, connection: socket.socket) -> None:
        """Its thread finds the connection at its end, and closes it."""
        del self._clients[connection]
        with contextlib.suppress(OSError):  # the client was faster
            connection.shutdown(socket.SHUT_RDWR)

    def asked(self, connection: socket.socket) -> None:
        """It has said what it wants."""
        with self._news:
            if connection in self._clients:
                self._clients[connection].asking = False

    def answered(self, connection: socket.socket) -> None:
        """Its answer is there to be read."""
        with self._news:
            if connection in self._clients:
                self._clients[connection].reading = time.monotonic()

    def finish_request(self, request: Any, client_address: Any) -> None:
        """See ``BaseServer``; in the connection's thread."""
        try:
            super().finish_request(request, client_address)
        except (OSError, ValueError) as error:  # the client has gone, is too slow, or speaks no HTTP
            event(log, logging.DEBUG, "page_unread", reason=error)

    def shutdown_request(self, request: Any) -> None:
        """See ``BaseServer``: the connection is over."""
        with self._news:
            self._clients.pop(request, None)
            self._news.notify_all()
        super().shutdown_request(request)

    def finish(self, seconds: float) -> None:
        """End those that have not asked yet, and wait for the answers at work, not for ever."""
        with self._news:
            for silent in [each for each, client in self._clients.items() if client.asking]:
                self._end(silent)
            self._news.wait_for(lambda: not self._clients, seconds)


class _Head(io.BufferedIOBase):
    """The lines of a request's head, up to ``HEAD_BYTES`` of them."""

    def __init__(self, file: io.BufferedIOBase) -> None:
        self._file = file
        self._left = HEAD_BYTES

    def readline(self, size: int | None = -1, /) -> bytes:
        line = self._file.readline(self._left + 1)
        self._left -= len(line)
        if self._left < 0:
            raise http.client.LineTooLong("head")
        return line


class Request(BaseHTTPRequestHandler):
    """One request, of one connection."""

    server: Listener

    def setup(self) -> None:
        super().setup()
        self.rfile = cast(io.BufferedReader, _Head(self.rfile))

    def handle(self) -> None:
        try:
            self.handle_one_request()
        except http.client.LineTooLong:  # the request's line; that of a header is answered already
            self.requestline, self.request_version, self.command = "", "", ""
            self.send_error(HTTPStatus.REQUEST_URI_TOO_LONG)

    def do_GET(self) -> None:
        self.server.asked(self.connection)
        self.server.respond(self)

    def do_HEAD(self) -> None:
        self.do_GET()

    def respond(self, status: HTTPStatus, kind: str, body: bytes) -> None:
        """Answer, a HEAD without the body."""
        self.server.answered(self.connection)
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("Content-Security-Policy", "default-src 'self' 'unsafe-inline'; img-src data:")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def version_string(self) -> str:
        return "latentkv"

    def log_message(self, format: str, *args: object) -> None:
        event(log, logging.DEBUG, "page", request=format % args)
