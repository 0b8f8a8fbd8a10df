"""What vLLM's requests and blocks mean in ours: pure arithmetic, no import of the engine."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvstore.api import Match
from kvstore.layout import BLOCK_TOKENS
from kvstore.units import PersistPoint, UnitKind, plan_output
from mla.adapters.paged import Place

PAGE_TOKENS = (16, 32, 64)  # vLLM block sizes of which a block of ours is a whole number


@dataclass(frozen=True, slots=True)
class Feature:
    """An input behind placeholder tokens (an image): its content's hash and where they lie."""

    identifier: str
    offset: int
    length: int


def extra_keys(salt: str, features: Iterable[Feature]) -> dict[int, bytes]:
    """What token ids don't say, by index of the block: for ``hashing.block_hashes``.

    A salt goes into the first block, and so into the whole chain.
    """
    keys: dict[int, list[object]] = {}
    if salt:
        keys.setdefault(0, []).append(["salt", salt])
    for feature in features:
        first, last = feature.offset // BLOCK_TOKENS, (feature.offset + feature.length - 1) // BLOCK_TOKENS
        for index in range(first, last + 1):
            # The offset inside the block tells two places of one image apart.
            keys.setdefault(index, []).append([feature.identifier, feature.offset - index * BLOCK_TOKENS])
    return {index: json.dumps(parts).encode() for index, parts in keys.items()}


def external_tokens(match: Match, computed: int) -> int:
    """Tokens that a match adds to ``computed`` ones that the engine has itself."""
    return max(match.blocks * BLOCK_TOKENS - computed, 0)


def places(pages: Sequence[int], first: int, last: int, page_tokens: int, keep: int = 0) -> tuple[Place, ...]:
    """Places of blocks ``first`` to ``last`` of a request whose pages are ``pages``.

    Pages below ``keep`` tokens are the engine's own already and not to be touched.
    """
    ratio = BLOCK_TOKENS // page_tokens
    start, stop = first * ratio, last * ratio
    begin = min(max(keep // page_tokens, start), stop)
    flat = iter([*[-1] * (begin - start), *pages[begin:stop]])
    return tuple(zip(*[flat] * ratio, strict=True))  # a long document has thousands, and the scheduler waits


def savable(prompt: int, known: int, computed: int) -> int:
    """Blocks that may be stored once ``computed`` tokens are in the cache, ``known`` of them final.

    An answer's last full block is kept back: which one its unit ends at shows when it ends.
    """
    whole = min(computed, known) // BLOCK_TOKENS
    return whole if whole <= prompt // BLOCK_TOKENS else max(prompt // BLOCK_TOKENS, whole - 1)


def input_units(points: Iterable[PersistPoint]) -> dict[int, UnitKind]:
    """Depth in blocks -> kinds of the units that a prompt leaves."""
    return {point.tokens // BLOCK_TOKENS: point.kinds for point in points}


def answer_units(prompt: int, total: int, interval: int, *, ended: bool) -> dict[int, UnitKind]:
    """The same for the answer, of which ``total - 1`` tokens (with the prompt) are in the cache."""
    points = plan_output(prompt, total, interval=interval)
    kinds = {point.tokens // BLOCK_TOKENS: point.kinds for point in points}
    if not ended:
        kinds = {depth: kind & UnitKind.INTERVAL for depth, kind in kinds.items() if kind & UnitKind.INTERVAL}
    return kinds


def first_failed(pages: Sequence[int], failed: set[int], page_tokens: int) -> int | None:
    """Index of the first block with a failed page; None if there is none."""
    return next((at * page_tokens // BLOCK_TOKENS for at, page in enumerate(pages) if page in failed), None)
