"""What a daemon says of one of its domains: the report, and the figures of a scrape."""

from __future__ import annotations

import time

from kvstore.store import Store
from server.config import Config
from server.faults import FaultLog
from server.health import Health
from server.history import History
from server.metrics import Snapshot, release, snapshot
from server.report import (
    TOP_UNITS,
    Report,
    misses_of,
    namespaces_of,
    tenants_of,
    tiers_of,
    unit_report,
)
from server.tally import Tally, Worth

_SURVEY_SECONDS = 5.0  # a look at all units takes a while; many viewers share one


class Reporter:
    """Reports of a domain: what was seen, and once it is open, its store. Owned by the event loop."""

    def __init__(self, domain: str, config: Config, health: Health, faults: FaultLog) -> None:
        self.domain = domain
        self.tally = Tally(Worth(config.prefill_rate, config.gpu_hour_price))
        self.history = History(self.tally)
        self._domains = list(config.stores())
        self._data = str(config.store_settings(domain).data)
        self._health = health
        self._faults = faults
        self._store: Store | None = None
        self._address = config.address
        self._surveyed = -_SURVEY_SECONDS

    def serve(self, store: Store, address: str) -> None:
        """The store is open, and workers find it at this address."""
        self._store = store
        self._address = address

    @property
    def mode(self) -> str:
        """See ``kvstore.api.Status``; ``ok`` until the store is open."""
        return self._store.status().mode if self._store is not None else "ok"

    def snapshot(self) -> Snapshot:
        """For the metrics page."""
        return snapshot(self.tally, self._store.status() if self._store is not None else None)

    def report(self) -> Report | None:
        """Everything an operator may want to see; None until the store is open."""
        store = self._store
        if store is None:
            return None
        now, status, tally = time.time(), store.status(), self.tally
        if time.monotonic() - self._surveyed >= _SURVEY_SECONDS:
            self._survey = store.survey(TOP_UNITS)
            self._surveyed = time.monotonic()
        return Report(
            release=release(),
            address=self._address,
            domain=self.domain,
            domains=self._domains,
            data=self._data,
            at=now,
            started=tally.started,
            why_not=self._health.why_not,
            mode=status.mode,
            pinned=status.pinned,
            tiers=tiers_of(status),
            dirty_blocks=status.dirty_blocks,
            leases=status.leases,
            units=status.units,
            totals=self.history.sample(now),
            tenants=tenants_of(tally.tenants, tally.worth),
            misses=misses_of(tally.tenants),
            recent_misses=list(tally.misses)[::-1],
            namespaces=namespaces_of(self._survey),
            heaviest=[unit_report(unit) for unit in self._survey.heaviest],
            most_valuable=[unit_report(unit) for unit in self._survey.most_valuable],
            history=self.history.samples(),
            faults=self._faults.recent(),
            counters=status.counters | tally.call_counters(),
        )
