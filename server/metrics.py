"""The tally and the store's status as Prometheus metrics.

A scrape asks the event loop for a ``Snapshot`` of each domain; turning them into text happens in
the thread of the scrape.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector, CollectorRegistry

from kvstore.api import MissReason, Status
from server.credentials import DEFAULT_DOMAIN
from server.tally import Tally, TenantTally, Worth

# The store's counters that exist from the start, so that their first step shows as an increase.
COUNTERS = {
    "stored_blocks": "Blocks that workers stored",
    "written_blocks": "Blocks written to disk",
    "disk_read_blocks": "Blocks read from disk",
    "disk_evicted_blocks": "Blocks evicted from a full disk",
    "expired_blocks": "Blocks that were not used for too long, or stored too long ago",
    "deleted_blocks": "Blocks that an operator deleted",
    "unadmitted_blocks": "Blocks that stayed in memory only, for they were not seen before",
    "quota_declined_blocks": "Blocks that stayed in memory only, for their tenant's quota was full",
    "disk_declined_blocks": "Blocks that stayed in memory only, for the disk has no room for their document",
    "unwritable_blocks": "Blocks that stayed in memory only, for they cannot be written though others can",
    "task_failures": "Background tasks that failed, and were started again or ended the daemon",
    "bad_places": "Places on the disk that could not be written or read, and are used no more",
    "unopened_files": "Files of payloads that could not be opened at the start, and are left alone",
    "host_evicted_blocks": "Blocks whose place in the arena was given to another",
    "host_lost_blocks": "Blocks that left a full arena unwritten, for the disk failed",
    "checksum_failures": "Payloads that did not verify; each was a miss",
    "read_errors": "Reads of payloads that failed",
    "write_failures": "Batches that could not be written",
    "lost_payloads": "Payloads that the catalogue names and that were gone",
    "catalog_skipped": "Damaged records that the catalogue skipped",
    "clock_steps": "How often the wall clock was set by more than a second",
    "retired_namespaces": "Namespaces that held nothing and were given up",
    "expired_leases": "Leases that ended by the clock",
    "loads": "Loads begun",
}
_GAUGES = {
    "latentkv_ready": "1 while the daemon accepts calls",
    "latentkv_start_time_seconds": "When the daemon started, in unix time",
    "latentkv_dirty_blocks": "Blocks that are readable and not on disk yet",
    "latentkv_units": "Units that can be hit",
    "latentkv_leases": "Leases that are held",
    "latentkv_namespaces": "Open namespaces",
    "latentkv_arena_locked": "1 if the arena is locked in memory",
    "latentkv_host_only": "1 while the disk cannot be written",
    "latentkv_degraded": "1 while a background task that failed is being started again",
}


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What one scrape shows of a domain, taken on the event loop."""

    status: Status | None  # None until the store is open
    calls: dict[tuple[str, str], int]
    tenants: dict[str, TenantTally]
    worth: Worth
    histograms: CollectorRegistry  # with locks of its own


def snapshot(tally: Tally, status: Status | None) -> Snapshot:
    """Copy what the event loop goes on to change."""
    tenants = copy.deepcopy(tally.tenants)
    return Snapshot(status, dict(tally.calls), tenants, tally.worth, tally.registry)


def exposition(taken: Mapping[str, Snapshot], *, ready: bool, started: float) -> bytes:
    """The metrics page, in the text format of Prometheus, from a snapshot of each domain."""
    page = CollectorRegistry()
    page.register(_Families(taken, {"latentkv_ready": ready, "latentkv_start_time_seconds": started}))
    return generate_latest(page)


class _Families(Collector):
    def __init__(self, taken: Mapping[str, Snapshot], whole: Mapping[str, float]) -> None:
        self._taken = taken
        self._whole = whole

    def collect(self) -> Iterator[Metric]:
        """All families; a series of another domain than the first has its name as a label."""
        yield InfoMetricFamily("latentkv_build", "The daemon's release", {"version": release()})
        yield from _gauges(self._whole)
        merged: dict[str, Metric] = {}
        for domain, taken in self._taken.items():
            label = {} if domain == DEFAULT_DOMAIN else {"domain": domain}
            for family in _domain_families(taken):
                samples = [each._replace(labels=label | each.labels) for each in family.samples]
                known = merged.setdefault(family.name, family)
                known.samples = samples if known is family else known.samples + samples
        yield from merged.values()


def _domain_families(taken: Snapshot) -> Iterator[Metric]:
    yield from _call_families(taken)
    yield from _tenant_families(taken)
    if taken.status is not None:
        yield from _status_gauges(taken.status)
        yield from _tier_families(taken.status)
        yield from _store_counters(taken.status)
    yield from taken.histograms.collect()


@functools.cache
def release() -> str:
    """Version of the installed package."""
    return version("latentkv")


def _call_families(taken: Snapshot) -> Iterator[Metric]:
    calls = CounterMetricFamily(
        "latentkv_requests", "Calls by verb and gRPC status", labels=("verb", "status")
    )
    for (verb, status), count in sorted(taken.calls.items()):
        calls.add_metric((verb, status), count)
    yield calls


def _tenant_families(taken: Snapshot) -> Iterator[Metric]:
    matches, found, hits, short, misses, loads, even, seconds, money = families = (
        CounterMetricFamily("latentkv_matches", "Prompts matched", labels=("tenant", "reason")),
        CounterMetricFamily("latentkv_matched_tokens", "Tokens that Match found", labels=("tenant", "tier")),
        CounterMetricFamily(
            "latentkv_hit_tokens", "Tokens that loads delivered, once a request", labels=("tenant", "tier")
        ),
        CounterMetricFamily(
            "latentkv_short_tokens",
            "Tokens that loads asked for and did not get, once a request",
            labels=("tenant",),
        ),
        CounterMetricFamily(
            "latentkv_miss_tokens", "Tokens that Match did not find", labels=("tenant", "reason")
        ),
        CounterMetricFamily("latentkv_loaded_tokens", "Tokens that were loaded", labels=("tenant", "tier")),
        GaugeMetricFamily(
            "latentkv_break_even_prefill_rate",
            "Tokens that a second of loading brought: what prefills as fast gains nothing",
            labels=("tenant",),
        ),
        CounterMetricFamily(
            "latentkv_saved_prefill_seconds", "Prefill time that loads made needless", labels=("tenant",)
        ),
        CounterMetricFamily(
            "latentkv_saved_money", "Price of that time, in the money of gpu_hour_price", labels=("tenant",)
        ),
    )
    for tenant, figures in sorted(taken.tenants.items()):
        for family, counts in (
            (matches, figures.matches),
            (found, figures.matched_tokens),
            (hits, figures.hit_tokens),
            (misses, figures.miss_tokens),
            (loads, figures.loaded_tokens),
        ):
            for label, count in counts.items():
                family.add_metric((tenant, label.value), count)
        short.add_metric((tenant,), figures.short_tokens)
        even.add_metric((tenant,), figures.break_even_rate)
        seconds.add_metric((tenant,), figures.saved_seconds)
        money.add_metric((tenant,), taken.worth.money(figures.saved_seconds))
    yield from families


def _status_gauges(status: Status) -> Iterator[Metric]:
    return _gauges(
        {
            "latentkv_dirty_blocks": status.dirty_blocks,
            "latentkv_units": status.units,
            "latentkv_leases": status.leases,
            "latentkv_namespaces": status.namespaces,
            "latentkv_arena_locked": status.pinned,
            "latentkv_host_only": status.mode == "host_only",
            "latentkv_degraded": status.mode == "degraded",
        }
    )


def _gauges(values: Mapping[str, float]) -> Iterator[Metric]:
    for name, value in values.items():
        yield GaugeMetricFamily(name, _GAUGES[name], value)


def _tier_families(status: Status) -> Iterator[Metric]:
    used = GaugeMetricFamily("latentkv_tier_used_bytes", "Bytes in use", labels=("tier",))
    capacity = GaugeMetricFamily("latentkv_tier_capacity_bytes", "Bytes that may be used", labels=("tier",))
    blocks = GaugeMetricFamily("latentkv_tier_blocks", "Blocks in the tier", labels=("tier",))
    for name, tier in (("host", status.host), ("disk", status.disk)):
        used.add_metric((name,), tier.used_bytes)
        capacity.add_metric((name,), tier.capacity_bytes)
        blocks.add_metric((name,), tier.blocks)
    yield from (used, capacity, blocks)


def _store_counters(status: Status) -> Iterator[Metric]:
    shown = {"matches", *(f"miss_{reason}" for reason in MissReason)}  # by tenant above
    for name in sorted({*COUNTERS, *status.counters} - shown):
        if not name.startswith("rpc_"):
            text = COUNTERS.get(name, f"The store's counter {name}")
            yield CounterMetricFamily(f"latentkv_{name}", text, status.counters.get(name, 0))
