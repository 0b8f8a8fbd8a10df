"""What the daemon shows an operator: the pages of its HTTP port."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from http import HTTPStatus

from kvstore.store import Store
from server.health import Health
from server.metrics import exposition, snapshot
from server.tally import Tally
from server.web import METRICS, Page, Route


class Pages:
    """Pages over the tally, the health and, once it is open, the store. Owned by the event loop."""

    def __init__(self, tally: Tally, health: Health) -> None:
        self._tally = tally
        self._health = health
        self._store: Store | None = None

    def serve(self, store: Store) -> None:
        """The store is open."""
        self._store = store

    def routes(self) -> Mapping[str, Route]:
        """What each path shows."""
        return {"/metrics": self._metrics, "/healthz": self._healthz, "/readyz": self._readyz}

    async def _metrics(self) -> Callable[[], Page]:
        status = self._store.status() if self._store is not None else None
        taken = snapshot(self._tally, status, ready=self._health.ready)
        return lambda: Page(exposition(self._tally, taken), METRICS)

    async def _healthz(self) -> Callable[[], Page]:
        return lambda: Page(b"ok\n")

    async def _readyz(self) -> Callable[[], Page]:
        why_not = self._health.why_not
        if why_not is not None:
            return lambda: Page(f"{why_not}\n".encode(), status=HTTPStatus.SERVICE_UNAVAILABLE)
        degraded = self._store is not None and self._store.status().mode == "host_only"
        note = b"ok, but the disk cannot be written: new blocks stay in memory only\n"
        return lambda: Page(note if degraded else b"ok\n")
