"""What a daemon says of itself to people: the JSON behind the status page, ``status`` and ``top``."""

from __future__ import annotations

import heapq
import json
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

from kvstore.api import Status, Tier
from kvstore.survey import NamespaceSurvey, Survey, UnitSurvey
from kvstore.trail import Trail
from server.faults import Fault
from server.history import Sample
from server.holdings import clip, kinds_of
from server.tally import Miss, TenantTally, Worth

TOP_UNITS = 10
TOP_NAMESPACES = 200  # the largest: a report stays below the limit of a message, whatever others do
TOP_TENANTS = 200


@dataclass(frozen=True, slots=True)
class TierReport:
    """Use of a tier, in bytes and blocks."""

    tier: str
    used_bytes: int
    capacity_bytes: int
    blocks: int


@dataclass(frozen=True, slots=True)
class TenantReport:
    """One tenant since the daemon's start; ``server.tally.TenantTally`` says what the tokens are."""

    tenant: str
    matches: int
    matched_tokens: int
    hit_tokens: int
    short_tokens: int
    miss_tokens: int
    loaded_tokens: int
    load_seconds: float
    break_even_rate: float  # tokens a second
    saved_seconds: float
    saved_money: float


@dataclass(frozen=True, slots=True)
class MissReport:
    """How often prompts fell short for one reason, and by how many tokens."""

    reason: str
    matches: int
    tokens: int


@dataclass(frozen=True, slots=True)
class NamespaceReport:
    """One namespace; ``digest`` is shortened."""

    tenant: str
    model: str
    digest: str
    blocks: int
    host_blocks: int
    disk_bytes: int
    units: int
    hits: int


@dataclass(frozen=True, slots=True)
class UnitReport:
    """One unit; ``hash`` is shortened. Times in unix seconds."""

    hash: str
    tenant: str
    model: str
    kinds: list[str]
    tokens: int
    nbytes: int
    hits: int
    saved_tokens: int
    created: float
    used: float


@dataclass(frozen=True, slots=True)
class Report:
    """Everything of one of the daemon's ``domains``, but ``faults`` of all.

    ``why_not`` says why it is not ready, None if it is; times in unix seconds.
    """

    release: str
    address: str
    domain: str
    domains: list[str]
    data: str
    at: float
    started: float
    why_not: str | None
    mode: str
    pinned: bool
    tiers: list[TierReport]
    dirty_blocks: int
    leases: int
    units: int
    totals: Sample
    tenants: list[TenantReport]
    misses: list[MissReport]
    recent_misses: list[Miss]
    namespaces: list[NamespaceReport]
    heaviest: list[UnitReport]
    most_valuable: list[UnitReport]
    history: list[Sample]
    faults: list[Fault]
    counters: dict[str, int]

    def to_json(self) -> str:
        """One JSON object with the fields above."""
        return json.dumps(asdict(self))


def tiers_of(status: Status) -> list[TierReport]:
    """HOST and DISK."""
    named = ((Tier.HOST, status.host), (Tier.DISK, status.disk))
    return [TierReport(tier.value, of.used_bytes, of.capacity_bytes, of.blocks) for tier, of in named]


def tenants_of(tenants: dict[str, TenantTally], worth: Worth) -> list[TenantReport]:
    """Those who asked for most, first."""
    found = [
        TenantReport(
            tenant=clip(name),
            matches=tally.matches.total(),
            matched_tokens=tally.matched_tokens.total(),
            hit_tokens=tally.hit_tokens.total(),
            short_tokens=tally.short_tokens,
            miss_tokens=tally.miss_tokens.total(),
            loaded_tokens=tally.loaded_tokens.total(),
            load_seconds=tally.load_seconds,
            break_even_rate=tally.break_even_rate,
            saved_seconds=tally.saved_seconds,
            saved_money=worth.money(tally.saved_seconds),
        )
        for name, tally in tenants.items()
    ]
    return sorted(found, key=lambda each: -(each.matched_tokens + each.miss_tokens))[:TOP_TENANTS]


def misses_of(tenants: dict[str, TenantTally]) -> list[MissReport]:
    """By reason, the costliest first; ``none`` are the tokens that are always computed."""
    matches: Counter[str] = Counter()
    tokens: Counter[str] = Counter()
    for tally in tenants.values():
        matches.update({reason.value: count for reason, count in tally.matches.items()})
        tokens.update({reason.value: count for reason, count in tally.miss_tokens.items()})
    return [MissReport(reason, matches[reason], count) for reason, count in tokens.most_common()]


def namespaces_of(survey: Survey) -> list[NamespaceReport]:
    """The largest on disk, first."""
    largest = heapq.nlargest(TOP_NAMESPACES, survey.namespaces, key=lambda each: each.disk_bytes)
    return [_namespace(each) for each in largest]


def _namespace(found: NamespaceSurvey) -> NamespaceReport:
    return NamespaceReport(
        tenant=clip(found.namespace.tenant),
        model=clip(found.namespace.model),
        digest=found.digest[:6].hex(),
        blocks=found.blocks,
        host_blocks=found.host_blocks,
        disk_bytes=found.disk_bytes,
        units=found.units,
        hits=found.hits,
    )


def unit_report(unit: UnitSurvey) -> UnitReport:
    """A unit in its JSON form."""
    return UnitReport(
        hash=unit.hash[:6].hex(),
        tenant=clip(unit.namespace.tenant),
        model=clip(unit.namespace.model),
        kinds=kinds_of(unit.kinds),
        tokens=unit.tokens,
        nbytes=unit.nbytes,
        hits=unit.hits,
        saved_tokens=unit.saved_tokens,
        created=unit.created,
        used=unit.used,
    )


def trail_report(trail: Trail) -> dict[str, Any]:
    """A trail in its JSON form: blocks of the match, the units by their ends in tokens."""
    match = trail.match
    return {
        "blocks": match.blocks,
        "host_blocks": match.host_blocks,
        "disk_blocks": match.disk_blocks,
        "unit_blocks": match.unit_blocks,
        "stored_blocks": match.stored_blocks,
        "seen_blocks": trail.seen,
        "reason": match.reason.value,
        "units": [asdict(unit) | {"kinds": kinds_of(unit.kinds)} for unit in trail.units],
        "beyond": list(trail.beyond),
        "gone": asdict(trail.gone) if trail.gone is not None else None,
    }
