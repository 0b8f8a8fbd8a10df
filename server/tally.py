"""What the daemon has seen since its start: who asked, what hit, what moved, what it saved.

Written by the event loop (``read`` and ``wrote`` also by I/O threads), a few plain
additions for each call; whoever shows it takes a copy.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, Histogram, disable_created_metrics

from kvstore.api import Match, MissReason, Tier
from kvstore.loading import Outcome
from kvstore.observer import Departure

# A gauge beside each histogram, of no use here.
disable_created_metrics()  # type: ignore[no-untyped-call]

KEPT_MISSES = 50
_SECONDS = (1e-4, 3e-4, 1e-3, 3e-3, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 60)
_BYTES = tuple(4.0**power for power in range(8, 18))  # 64 KiB to 16 GiB
_AGES = (60, 600, 3600, 6 * 3600, 86400, 3 * 86400, 7 * 86400, 30 * 86400)
_HITS = (0, 1, 2, 5, 10, 20, 50, 100, 1000)


@dataclass(frozen=True, slots=True)
class Worth:
    """What a loaded token is worth: ``prefill_rate`` in tokens a second, ``gpu_hour_price`` in your money.

    0 stands for unknown; then nothing is said of what was saved.
    """

    prefill_rate: float = 0.0
    gpu_hour_price: float = 0.0

    def saved_seconds(self, tokens: int, load_seconds: float) -> float:
        """Prefill time that a load made needless, less the time it took."""
        return max(tokens / self.prefill_rate - load_seconds, 0.0) if self.prefill_rate else 0.0

    def money(self, seconds: float) -> float:
        """Price of so many seconds on a GPU."""
        return seconds / 3600 * self.gpu_hour_price


@dataclass(slots=True)
class TenantTally:
    """One tenant's requests. Tokens by tier and by the reason why a match fell short.

    Matched is what Match found; a worker whose own pool has it does not even load it. Hit is what loads
    delivered of it, short what they were asked for and did not: both once a request, however many ranks
    it has. Loaded is what moved, for every rank.
    """

    matches: Counter[MissReason] = field(default_factory=Counter)
    matched_tokens: Counter[Tier] = field(default_factory=Counter)
    hit_tokens: Counter[Tier] = field(default_factory=Counter)
    short_tokens: int = 0
    miss_tokens: Counter[MissReason] = field(default_factory=Counter)
    loaded_tokens: Counter[Tier] = field(default_factory=Counter)
    load_seconds: float = 0.0
    saved_seconds: float = 0.0

    @property
    def break_even_rate(self) -> float:
        """Tokens that a second of loading brought: a model that prefills as fast gains nothing. Or 0."""
        return self.loaded_tokens.total() / self.load_seconds if self.load_seconds else 0.0


@dataclass(frozen=True, slots=True)
class Asked:
    """A prompt that was matched; an earlier Match of its request was ``counted`` for so many tokens of it."""

    tokens: int
    counted: int
    block_tokens: int


@dataclass(frozen=True, slots=True)
class Loaded:
    """A load that has ended: what came of it, in blocks of so many tokens, and what it took."""

    outcome: Outcome
    block_tokens: int
    nbytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Miss:
    """A prompt of which Match found ``matched_tokens`` only. ``at`` in unix seconds."""

    at: float
    tenant: str
    tokens: int
    matched_tokens: int
    reason: MissReason


class Histograms:
    """Distributions: bytes and seconds of each step, and what left the disk."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.seconds = Histogram(
            "latentkv_step_duration_seconds",
            "Time of one step",
            ("step",),
            registry=registry,
            buckets=_SECONDS,
        )
        self.nbytes = Histogram(
            "latentkv_step_size_bytes", "Bytes of one step", ("step",), registry=registry, buckets=_BYTES
        )
        self.idle = Histogram(
            "latentkv_evicted_block_idle_seconds",
            "Time since the last use of a block that left the disk",
            ("cause",),
            registry=registry,
            buckets=_AGES,
        )
        self.age = Histogram(
            "latentkv_evicted_unit_age_seconds",
            "Age of a unit that left the disk",
            ("cause",),
            registry=registry,
            buckets=_AGES,
        )
        self.hits = Histogram(
            "latentkv_evicted_unit_hits",
            "How often a unit was hit until it left the disk",
            ("cause",),
            registry=registry,
            buckets=_HITS,
        )
        # Made once: looking a labelled child up costs more than observing it.
        self.idle_of = {why: self.idle.labels(why) for why in Departure}
        self.age_of = {why: self.age.labels(why) for why in Departure}
        self.hits_of = {why: self.hits.labels(why) for why in Departure}
        self.seconds_of = {step: self.seconds.labels(step) for step in STEPS}
        self.bytes_of = {step: self.nbytes.labels(step) for step in ("load", "disk_read", "disk_write")}


STEPS = ("match", "load", "reserve", "commit", "disk_read", "disk_write")


class Tally:
    """A ``kvstore.observer.Observer`` that also hears of the calls themselves."""

    def __init__(self, worth: Worth | None = None) -> None:
        self.worth = worth or Worth()
        self.registry = CollectorRegistry()
        self.started = time.time()
        self.calls: Counter[tuple[str, str]] = Counter()  # (verb, gRPC status)
        self.tenants: dict[str, TenantTally] = {}
        self.misses: deque[Miss] = deque(maxlen=KEPT_MISSES)
        self.loaded_bytes = 0
        self._histograms = Histograms(self.registry)

    def tenant(self, name: str) -> TenantTally:
        """The tenant's own figures."""
        found = self.tenants.get(name)
        if found is None:
            found = self.tenants[name] = TenantTally()
        return found

    # --- calls

    def answered(self, verb: str, status: str) -> None:
        """One call of ``verb`` ended with the gRPC status named ``status``."""
        self.calls[verb, status] += 1

    def took(self, step: str, seconds: float) -> None:
        """One of ``STEPS`` is done."""
        self._histograms.seconds_of[step].observe(seconds)

    def matched(self, tenant: str, asked: Asked, match: Match) -> None:
        """A prompt was matched."""
        figures = self.tenant(tenant)
        found, counted = match.blocks * asked.block_tokens, min(asked.counted, asked.tokens)
        fresh = max(found - counted, 0)
        # Where each of them lies is known as a sum over the whole match only.
        disk = min(fresh, match.disk_blocks * asked.block_tokens)
        figures.matched_tokens[Tier.HOST] += fresh - disk
        figures.matched_tokens[Tier.DISK] += disk
        figures.miss_tokens[match.reason] += asked.tokens - max(found, counted)
        if counted:
            return
        figures.matches[match.reason] += 1
        if match.reason is not MissReason.NONE:
            self.misses.append(Miss(time.time(), tenant, asked.tokens, found, match.reason))

    def loaded(self, tenant: str, load: Loaded) -> None:
        """A load has ended, whole or short."""
        figures, came, size = self.tenant(tenant), load.outcome, load.block_tokens
        figures.loaded_tokens[Tier.HOST] += (came.delivered - came.disk) * size
        figures.loaded_tokens[Tier.DISK] += came.disk * size
        figures.hit_tokens[Tier.HOST] += (came.fresh - came.fresh_disk) * size
        figures.hit_tokens[Tier.DISK] += came.fresh_disk * size
        figures.short_tokens += came.missing * size
        figures.load_seconds += load.seconds
        figures.saved_seconds += self.worth.saved_seconds(came.fresh * size, load.seconds)
        self.loaded_bytes += load.nbytes
        self._histograms.bytes_of["load"].observe(load.nbytes)
        self.took("load", load.seconds)

    # --- behind the verbs

    def read(self, nbytes: int, seconds: float) -> None:
        """See ``Observer``."""
        self._histograms.bytes_of["disk_read"].observe(nbytes)
        self.took("disk_read", seconds)

    def wrote(self, nbytes: int, seconds: float) -> None:
        """See ``Observer``."""
        self._histograms.bytes_of["disk_write"].observe(nbytes)
        self.took("disk_write", seconds)

    def block_left(self, why: Departure, idle_seconds: float) -> None:
        """See ``Observer``."""
        self._histograms.idle_of[why].observe(idle_seconds)

    def unit_left(self, why: Departure, age_seconds: float, hits: int) -> None:
        """See ``Observer``."""
        self._histograms.age_of[why].observe(age_seconds)
        self._histograms.hits_of[why].observe(hits)

    # --- sums

    def step_bytes(self, step: str) -> int:
        """All bytes that a step has moved."""
        samples = self._histograms.bytes_of[step].collect()
        return int(sum(s.value for metric in samples for s in metric.samples if s.name.endswith("_sum")))

    def call_counters(self) -> dict[str, int]:
        """Calls by verb and status, named ``rpc_match_ok`` and the like."""
        return {f"rpc_{verb}_{status}".lower(): count for (verb, status), count in self.calls.items()}
