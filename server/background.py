"""What runs in the daemon beside the calls, as long as it lives: supervised, as its stores' own tasks are.

When one of them is given up, of a store or of the daemon, the daemon ends unready, so that whoever
started it starts it anew.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping

from kvstore.errors import KVStoreError
from server.credentials import DEFAULT_DOMAIN
from server.domains import Domain
from server.events import event
from server.handover import Handover
from server.health import Health
from server.history import STEP_SECONDS
from server.reporter import Reporter
from server.web import WebServer

log = logging.getLogger(__name__)

_WEB_SECONDS = 5.0  # between looks at the HTTP port's thread


class BackgroundFailed(KVStoreError):
    """A background task failed again and again, or in a way that may have left tables wrong."""


class Background:
    """The daemon's own tasks, in the care of its first store's supervisor. Owned by the event loop."""

    def __init__(
        self,
        domains: Mapping[str, Domain],
        reporters: Mapping[str, Reporter],
        health: Health,
        stop: Callable[[], None],
        *,
        sweep_seconds: float,
    ) -> None:
        """``stop`` is called when the daemon has to end; workers are looked at every ``sweep_seconds``."""
        self._domains = domains
        self._reporters = reporters
        self._health = health
        self._stop = stop
        self._sweep_seconds = sweep_seconds
        self._web: WebServer | None = None
        self._names: list[str] = []
        self._watching: list[asyncio.Task[None]] = []
        self._why: str | None = None

    def start(self, web: WebServer | None, handover: Handover | None) -> None:
        """The domains are open, and all listen."""
        self._web = web
        work = {"workers": self._sweep, "history": self._sample}
        if web is not None:
            work["web"] = self._look_at_web
        if handover is not None:
            work["handover"] = handover.accept
        supervisor = self._domains[DEFAULT_DOMAIN].store.supervisor
        for name, run in work.items():
            supervisor.start(name, run)
        self._names = list(work)
        self._watching = [asyncio.create_task(self._watch(domain)) for domain in self._domains.values()]

    async def _watch(self, domain: Domain) -> None:
        supervisor = domain.store.supervisor
        await supervisor.gave_up.wait()
        self._why = supervisor.why
        event(log, logging.CRITICAL, "ending_unready", domain=domain.reporter.domain, reason=self._why)
        await self._health.fail(f"failed: {self._why}")
        self._stop()

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(self._sweep_seconds)
            for domain in self._domains.values():
                domain.workers.sweep(time.monotonic())

    async def _sample(self) -> None:
        while True:
            for reporter in self._reporters.values():
                reporter.history.keep(time.time())
            await asyncio.sleep(STEP_SECONDS)

    async def _look_at_web(self) -> None:
        while self._web is not None:
            if not self._web.alive:
                raise BackgroundFailed("the thread behind the HTTP port has ended")
            await asyncio.sleep(_WEB_SECONDS)

    async def close(self) -> None:
        """End the daemon's own tasks; the stores end theirs."""
        for watching in self._watching:
            watching.cancel()
        if self._names:
            await self._domains[DEFAULT_DOMAIN].store.supervisor.stop(*self._names)

    def require_sound(self) -> None:
        """Raises ``BackgroundFailed`` if that is why the daemon ended."""
        if self._why is not None:
            raise BackgroundFailed(f"ended, for {self._why}; see the log, and start it again")
