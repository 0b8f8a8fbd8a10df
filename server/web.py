"""The daemon's HTTP port: metrics, health, and the status page. Read-only.

It runs in threads of its own and asks the event loop for what it shows, so it can also
say that the loop no longer answers.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import socket
import threading
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any
from urllib.parse import urlsplit

from server.events import event

log = logging.getLogger(__name__)

THREADS = 4
ANSWER_SECONDS = 2.0  # how long the event loop may take
_IDLE_SECONDS = 10.0  # how long a client may take to send its request or to read the answer

TEXT = "text/plain; charset=utf-8"
METRICS = "text/plain; version=0.0.4; charset=utf-8"
JSON = "application/json"
HTML = "text/html; charset=utf-8"


@dataclass(frozen=True, slots=True)
class Page:
    """An answer to GET."""

    body: bytes
    kind: str = TEXT
    status: HTTPStatus = HTTPStatus.OK


# What a path shows: the coroutine runs on the event loop, its result is rendered in a thread.
Route = Callable[[], Coroutine[Any, Any, Callable[[], Page]]]


class WebServer:
    """Serves ``routes`` at ``host:port``; port 0 takes a free one."""

    def __init__(self, address: str, routes: Mapping[str, Route]) -> None:
        """Bind. Raises ``OSError``."""
        self._loop = asyncio.get_running_loop()
        self._routes = routes
        host, _, port = address.rpartition(":")
        self._server = _Listener((host.strip("[]"), int(port)), self.answer)
        self.url = f"http://{host}:{self._server.server_address[1]}/"
        self._thread = threading.Thread(
            target=self._server.serve_forever,
            kwargs={"poll_interval": 0.2},
            name="latentkv-http",
            daemon=True,
        )
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether its thread still accepts clients."""
        return self._thread.is_alive()

    def answer(self, path: str) -> Page:
        """The page at a path. Called from any thread but the loop's."""
        route = self._routes.get(path)
        if route is None:
            return Page(b"no such page\n", status=HTTPStatus.NOT_FOUND)
        waiting = asyncio.run_coroutine_threadsafe(route(), self._loop)
        try:
            return waiting.result(ANSWER_SECONDS)()
        except concurrent.futures.TimeoutError:
            waiting.cancel()
            why = f"the event loop did not answer within {ANSWER_SECONDS:g} s\n"
            return Page(why.encode(), status=HTTPStatus.SERVICE_UNAVAILABLE)
        except Exception:  # a page that fails must not end its thread
            log.exception("event=page_failed path=%s", path)
            return Page(b"the page failed; see the daemon's log\n", status=HTTPStatus.INTERNAL_SERVER_ERROR)

    async def close(self) -> None:
        """Stop listening, and wait for the answers at work."""
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class _Listener(HTTPServer):
    """Answers each connection in one of a few threads."""

    def __init__(self, address: tuple[str, int], answer: Callable[[str], Page]) -> None:
        self.answer = answer
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="latentkv-page")
        if ":" in address[0]:
            self.address_family = socket.AF_INET6
        super().__init__(address, _Handler)

    def server_bind(self) -> None:
        """As ``TCPServer``: ``HTTPServer`` also looks its own name up, which may take long."""
        self.allow_reuse_port = False
        super(HTTPServer, self).server_bind()

    def process_request(self, request: Any, client_address: Any) -> None:
        self._pool.submit(self._process, request, client_address)

    def _process(self, request: Any, client_address: Any) -> None:
        try:
            self.finish_request(request, client_address)
        except OSError as error:  # the client has gone or is too slow
            event(log, logging.DEBUG, "page_unread", reason=error)
        finally:
            self.shutdown_request(request)

    def server_close(self) -> None:
        super().server_close()
        self._pool.shutdown()


class _Handler(BaseHTTPRequestHandler):
    timeout = _IDLE_SECONDS
    server: _Listener

    def do_GET(self) -> None:
        page = self._head()
        self.wfile.write(page.body)

    def do_HEAD(self) -> None:
        self._head()

    def _head(self) -> Page:
        page = self.server.answer(urlsplit(self.path).path)
        self.send_response(page.status)
        self.send_header("Content-Type", page.kind)
        self.send_header("Content-Length", str(len(page.body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("Content-Security-Policy", "default-src 'self' 'unsafe-inline'; img-src data:")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        return page

    def version_string(self) -> str:
        return "latentkv"

    def log_message(self, format: str, *args: object) -> None:
        event(log, logging.DEBUG, "page", request=format % args)
