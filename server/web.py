"""The daemon's HTTP port: metrics, health, and the status page. Read-only.

It runs in threads of its own and asks the event loop for what it shows, so it can also
say that the loop no longer answers.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import ipaddress
import logging
import socket
import threading
from collections.abc import Callable, Collection, Coroutine, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any
from urllib.parse import urlsplit

from server.listener import Listener, Request

log = logging.getLogger(__name__)

RENDERED_AT_ONCE = 4  # pages; more would only take the processors from the event loop
ANSWER_SECONDS = 2.0  # how long the event loop may take
CLOSE_SECONDS = 2 * ANSWER_SECONDS

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

    def __init__(
        self, address: str, routes: Mapping[str, Route], *, hosts: Collection[str] = (), seconds: float = 10.0
    ) -> None:
        """Bind. Raises ``OSError``.

        ``hosts`` are names that it may be asked by, beside its own. A client has ``seconds`` for all of
        a request and its answer.
        """
        self._loop = asyncio.get_running_loop()
        self._routes = routes
        self._rendering = threading.Semaphore(RENDERED_AT_ONCE)
        host, _, port = address.rpartition(":")
        self._hosts = {name.lower() for name in ("localhost", socket.gethostname(), host, *hosts)}
        self._server = Listener((host.strip("[]"), int(port)), self._respond, seconds)
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
            made = waiting.result(ANSWER_SECONDS)
            with self._rendering:
                return made()
        except concurrent.futures.TimeoutError:
            waiting.cancel()
            why = f"the event loop did not answer within {ANSWER_SECONDS:g} s\n"
            return Page(why.encode(), status=HTTPStatus.SERVICE_UNAVAILABLE)
        except Exception:  # a page that fails must not end its thread
            log.exception("event=page_failed path=%s", path)
            return Page(b"the page failed; see the daemon's log\n", status=HTTPStatus.INTERNAL_SERVER_ERROR)

    def _respond(self, request: Request) -> None:
        target = urlsplit(request.path)
        named = [*request.headers.get_all("Host", ()), *([target.netloc] if target.netloc else ())]
        if all(self._is_ours(host) for host in named):
            page = self.answer(target.path)
        else:
            why = "this daemon is not asked by that name; use its address, or add the name to http_hosts\n"
            page = Page(why.encode(), status=HTTPStatus.FORBIDDEN)
        request.respond(page.status, page.kind, page.body)

    def _is_ours(self, host: str) -> bool:
        """Whether a client may mean us by this name.

        Else a stranger's web page could make its own name mean this host, and read what we show. An
        address cannot be made to mean another host.
        """
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:
            return False
        if name.rstrip(".") in self._hosts:
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True

    async def close(self) -> None:
        """Stop listening, and wait for the answers at work."""
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
        self._server.finish(CLOSE_SECONDS)
