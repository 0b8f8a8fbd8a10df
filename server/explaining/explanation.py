"""How far a prompt matches in a namespace, why it stops there, and which other namespace has more."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol

from kvstore.errors import InvalidArgument
from kvstore.hashing import block_hashes
from kvstore.namespace import Namespace
from server.explaining.prompts import Prompt
from server.explaining.reasons import REASONS

Trail = dict[str, Any]  # as server.report.trail_report has it


@dataclass(frozen=True, slots=True)
class Opened:
    """An open namespace and its digest."""

    namespace: Namespace
    digest: bytes


class Daemon(Protocol):
    """What a daemon answers to an operator."""

    def namespaces(self) -> list[Opened]: ...

    def trail(self, namespace: bytes, hashes: Sequence[bytes], tokens: int, align: int) -> Trail: ...


@dataclass(frozen=True, slots=True)
class Stop:
    """The first block that is not stored: its number, its first and last token, and the words there."""

    block: int
    token: int
    last_token: int
    before: str
    after: str


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """Another namespace that has more of the prompt, and what of it is not ours: (ours, theirs) by name."""

    digest: str
    differs: dict[str, tuple[str, str]]
    stored_tokens: int
    hit_tokens: int


@dataclass(frozen=True, slots=True)
class Explanation:
    """Counts in tokens, times in unix seconds, digests shortened. ``gone``: ``{"why", "at"}`` or None.

    ``units`` end on the prompt's own chain; ``beyond`` are ends of units that go on from what is
    stored of it. ``stops_at`` is None when every full block of the prompt is stored.
    """

    namespace: dict[str, str]
    tokens: int
    hit_tokens: int
    host_tokens: int
    disk_tokens: int
    stored_tokens: int
    seen_tokens: int
    reason: str
    why: str
    advice: str
    stops_at: Stop | None
    gone: dict[str, Any] | None
    units: list[dict[str, Any]]
    beyond: list[int]
    elsewhere: list[Elsewhere]


def unavailable() -> dict[str, str]:
    """The explanation when no daemon answers."""
    reason = REASONS["unavailable"]
    return {"reason": "unavailable", "why": reason.why, "advice": reason.advice}


def choose(opened: Sequence[Opened], digest: str | None, tenant: str | None, model: str | None) -> Opened:
    """The one namespace that fits; raises ``InvalidArgument`` if none or several do."""
    fitting = [
        each
        for each in opened
        if (digest is None or each.digest.hex().startswith(digest.lower()))
        and (tenant is None or each.namespace.tenant == tenant)
        and (model is None or each.namespace.model == model)
    ]
    if len(fitting) == 1:
        return fitting[0]
    listed = "; ".join(_named(each) for each in (fitting or opened)) or "none is open"
    what = f"{len(fitting)} namespaces fit" if fitting else "no open namespace fits"
    raise InvalidArgument(f"{what}: choose one by --namespace DIGEST, --tenant or --model ({listed})")


def _named(each: Opened) -> str:
    return f"{each.digest[:6].hex()} tenant {each.namespace.tenant} model {each.namespace.model}"


def explain(daemon: Daemon, opened: Sequence[Opened], own: Opened, prompt: Prompt, align: int) -> Explanation:
    """Ask the daemon about a prompt, in its namespace and in the others. Raises what the daemon raises."""
    trail, size = _trail(daemon, own, prompt, align), own.namespace.layout.block_tokens
    reason = REASONS.get(trail["reason"], REASONS["unknown"])
    stored = trail["stored_blocks"] * size
    others = (each for each in opened if each.digest != own.digest)
    return Explanation(
        namespace=parts_of(own.namespace) | {"digest": own.digest[:6].hex()},
        tokens=len(prompt.tokens),
        hit_tokens=trail["blocks"] * size,
        host_tokens=trail["host_blocks"] * size,
        disk_tokens=trail["disk_blocks"] * size,
        stored_tokens=stored,
        seen_tokens=trail["seen_blocks"] * size,
        reason=trail["reason"],
        why=reason.why,
        advice=reason.advice,
        stops_at=_stop(prompt, trail["stored_blocks"], size),
        gone=trail["gone"],
        units=trail["units"],
        beyond=trail["beyond"],
        elsewhere=_elsewhere(daemon, own, others, prompt, align, stored),
    )


def _trail(daemon: Daemon, where: Opened, prompt: Prompt, align: int) -> Trail:
    size = where.namespace.layout.block_tokens
    hashes = block_hashes(where.digest, prompt.tokens, block_tokens=size)
    return daemon.trail(where.digest, hashes, len(prompt.tokens), max(align, size))


def _begins(daemon: Daemon, where: Opened, prompt: Prompt) -> bool:
    """Whether the first block is stored there: one hash, not thousands, for there may be many tenants."""
    size = where.namespace.layout.block_tokens
    first = prompt.tokens[:size]
    hashes = block_hashes(where.digest, first, block_tokens=size)
    return bool(hashes) and daemon.trail(where.digest, hashes, len(first), size)["stored_blocks"] > 0


def _stop(prompt: Prompt, stored: int, size: int) -> Stop | None:
    token = stored * size
    if token + size > len(prompt.tokens):
        return None
    return Stop(stored, token, token + size - 1, prompt.words_before(token), prompt.words_from(token))


def _elsewhere(
    daemon: Daemon, own: Opened, others: Iterable[Opened], prompt: Prompt, align: int, stored: int
) -> list[Elsewhere]:
    found = []
    for each in others:
        if not _begins(daemon, each, prompt):
            continue
        trail, size = _trail(daemon, each, prompt, align), each.namespace.layout.block_tokens
        if trail["stored_blocks"] * size > stored:
            differs = differences(own.namespace, each.namespace)
            held, hit = (trail[name] * size for name in ("stored_blocks", "blocks"))
            found.append(Elsewhere(each.digest[:6].hex(), differs, held, hit))
    return sorted(found, key=lambda each: (-each.stored_tokens, len(each.differs)))


def parts_of(namespace: Namespace) -> dict[str, str]:
    """Everything that keeps a namespace apart, by name."""
    text = {name: str(value) for name, value in json.loads(namespace.to_json()).items() if name != "layout"}
    layout = namespace.layout
    return text | {f"layout.{each.name}": str(layout.to_dict()[each.name]) for each in fields(layout)}


def differences(ours: Namespace, theirs: Namespace) -> dict[str, tuple[str, str]]:
    """What two namespaces do not have in common: (ours, theirs) by name."""
    a, b = parts_of(ours), parts_of(theirs)
    return {name: (a[name], b[name]) for name in a if a[name] != b[name]}
