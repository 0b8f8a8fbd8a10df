"""The pages of the daemon's HTTP port."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from http import HTTPStatus
from importlib.resources import files

from server.config import DOMAINS
from server.credentials import DEFAULT_DOMAIN
from server.health import MODES, Health
from server.metrics import exposition
from server.reporter import Reporter
from server.web import HTML, JSON, METRICS, Page, Route


class Pages:
    """Pages over what the daemon knows of itself and of its domains. Owned by the event loop."""

    def __init__(self, health: Health, reporters: Mapping[str, Reporter]) -> None:
        self._health = health
        self._reporters = reporters

    def routes(self) -> Mapping[str, Route]:
        """What each path shows."""
        shown: dict[str, Route] = {
            "/metrics": self._metrics,
            "/healthz": self._healthz,
            "/readyz": self._readyz,
        }
        for domain, reporter in self._reporters.items():
            base = "/" if domain == DEFAULT_DOMAIN else f"/{DOMAINS}/{domain}/"
            shown |= {base: self._status_page, base + "status.json": partial(self._status, reporter)}
        return shown

    async def _status_page(self) -> Callable[[], Page]:
        return lambda: Page(files("server").joinpath("status_page.html").read_bytes(), HTML)

    async def _status(self, reporter: Reporter) -> Callable[[], Page]:
        report = reporter.report()
        if report is None:
            return self._not_ready
        return lambda: Page(report.to_json().encode(), JSON)

    async def _metrics(self) -> Callable[[], Page]:
        taken = {domain: reporter.snapshot() for domain, reporter in self._reporters.items()}
        ready, started = self._health.ready, self._reporters[DEFAULT_DOMAIN].tally.started
        return lambda: Page(exposition(taken, ready=ready, started=started), METRICS)

    async def _healthz(self) -> Callable[[], Page]:
        return lambda: Page(b"ok\n")

    async def _readyz(self) -> Callable[[], Page]:
        if not self._health.ready:
            return self._not_ready
        notes = [MODES[reporter.mode] for reporter in self._reporters.values() if reporter.mode in MODES]
        return lambda: Page(f"ok, but {notes[0]}\n".encode() if notes else b"ok\n")

    def _not_ready(self) -> Page:
        return Page(f"{self._health.why_not}\n".encode(), status=HTTPStatus.SERVICE_UNAVAILABLE)
