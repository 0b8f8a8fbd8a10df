"""What the daemon shows an operator: the pages of its HTTP port, and the report behind them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from http import HTTPStatus
from importlib.resources import files

from kvstore.store import Store
from server.config import Config
from server.faults import FaultLog
from server.health import Health
from server.history import History
from server.metrics import exposition, release, snapshot
from server.report import (
    TOP_UNITS,
    Report,
    misses_of,
    namespaces_of,
    tenants_of,
    tiers_of,
    unit_report,
)
from server.tally import Tally
from server.web import HTML, JSON, METRICS, Page, Route

_SURVEY_SECONDS = 5.0  # a look at all units takes a while; many viewers share one


class Pages:
    """Pages over what the daemon knows and, once it is open, the store. Owned by the event loop."""

    def __init__(
        self, config: Config, tally: Tally, health: Health, history: History, faults: FaultLog
    ) -> None:
        self._config = config
        self._tally = tally
        self._health = health
        self._history = history
        self._faults = faults
        self._store: Store | None = None
        self._address = config.address
        self._surveyed = -_SURVEY_SECONDS

    def serve(self, store: Store, address: str) -> None:
        """The store is open, and workers find it at this address."""
        self._store = store
        self._address = address

    def routes(self) -> Mapping[str, Route]:
        """What each path shows."""
        return {
            "/": self._status_page,
            "/status.json": self._status,
            "/metrics": self._metrics,
            "/healthz": self._healthz,
            "/readyz": self._readyz,
        }

    def report(self) -> Report | None:
        """Everything an operator may want to see; None until the store is open."""
        store = self._store
        if store is None:
            return None
        now, status, tally = time.time(), store.status(), self._tally
        if time.monotonic() - self._surveyed >= _SURVEY_SECONDS:
            self._survey = store.survey(TOP_UNITS)
            self._surveyed = time.monotonic()
        return Report(
            release=release(),
            address=self._address,
            data=str(self._config.data),
            at=now,
            started=tally.started,
            why_not=self._health.why_not,
            mode=status.mode,
            pinned=status.pinned,
            tiers=tiers_of(status),
            dirty_blocks=status.dirty_blocks,
            leases=status.leases,
            units=status.units,
            totals=self._history.sample(now),
            tenants=tenants_of(tally.tenants, tally.worth),
            misses=misses_of(tally.tenants),
            recent_misses=list(tally.misses)[::-1],
            namespaces=namespaces_of(self._survey),
            heaviest=[unit_report(unit) for unit in self._survey.heaviest],
            most_valuable=[unit_report(unit) for unit in self._survey.most_valuable],
            history=self._history.samples(),
            faults=self._faults.recent(),
            counters=status.counters | tally.call_counters(),
        )

    async def _status_page(self) -> Callable[[], Page]:
        return lambda: Page(files("server").joinpath("status_page.html").read_bytes(), HTML)

    async def _status(self) -> Callable[[], Page]:
        report = self.report()
        if report is None:
            return self._not_ready
        return lambda: Page(report.to_json().encode(), JSON)

    async def _metrics(self) -> Callable[[], Page]:
        status = self._store.status() if self._store is not None else None
        taken = snapshot(self._tally, status, ready=self._health.ready)
        return lambda: Page(exposition(self._tally, taken), METRICS)

    async def _healthz(self) -> Callable[[], Page]:
        return lambda: Page(b"ok\n")

    async def _readyz(self) -> Callable[[], Page]:
        if not self._health.ready:
            return self._not_ready
        degraded = self._store is not None and self._store.status().mode == "host_only"
        note = b"ok, but the disk cannot be written: new blocks stay in memory only\n"
        return lambda: Page(note if degraded else b"ok\n")

    def _not_ready(self) -> Page:
        return Page(f"{self._health.why_not}\n".encode(), status=HTTPStatus.SERVICE_UNAVAILABLE)
