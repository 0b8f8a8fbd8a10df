"""Cache prefix units and the planner that says where a request leaves them.

A unit is a whole prefix ``[0, n)`` that was persisted and can be hit. It is a mark on
a chain of blocks, not a copy, and is named by the hash of its last block.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntFlag
from typing import NamedTuple

from kvstore.errors import InvalidArgument
from kvstore.layout import BLOCK_TOKENS

DEFAULT_INTERVAL = 2048  # tokens


class UnitKind(IntFlag):
    """Why a unit exists; one unit may have several reasons."""

    NONE = 0
    REQUEST_END = 1
    COMMON_PREFIX = 2
    INTERVAL = 4


class PersistPoint(NamedTuple):
    """A position at which a request should leave a unit."""

    tokens: int
    kinds: UnitKind


@dataclass(frozen=True, slots=True)
class UnitMark:
    """A unit to be made: the hash of its last block, and why."""

    hash: bytes
    kinds: UnitKind


def check_interval(interval: int, block_tokens: int = BLOCK_TOKENS) -> int:
    """``interval`` if it is 0 (off) or a positive multiple of the block; else ``InvalidArgument``."""
    if interval < 0 or interval % block_tokens:
        raise InvalidArgument(
            f"interval={interval} is neither 0 (off) nor a multiple of {block_tokens} tokens"
        )
    return interval


def plan_input(
    tokens: int, *, interval: int, common: Iterable[int] = (), block_tokens: int = BLOCK_TOKENS
) -> tuple[PersistPoint, ...]:
    """Persist points of an input of ``tokens`` tokens, in order of position.

    ``common`` are positions of detected common prefixes. The input's end, rounded down
    to a block, always is one unless it is 0.
    """
    end = tokens - tokens % block_tokens
    points = dict.fromkeys(range(interval, end + 1, interval) if interval else (), UnitKind.INTERVAL)
    for position in common:
        if 0 < position <= end:
            points[position] = points.get(position, UnitKind.NONE) | UnitKind.COMMON_PREFIX
    if end:
        points[end] = points.get(end, UnitKind.NONE) | UnitKind.REQUEST_END
    return tuple(map(PersistPoint._make, sorted(points.items())))


def plan_output(
    prompt: int, total: int, *, interval: int, block_tokens: int = BLOCK_TOKENS
) -> tuple[PersistPoint, ...]:
    """Persist points of an answer: interval marks behind the prompt, and its end.

    The last sampled token has no latent yet, so the answer's unit ends at
    ``floor64(total - 1)``; it is left out where that lies inside the prompt.
    """
    cached = max(total - 1, 0)
    end = cached - cached % block_tokens
    if end <= prompt - prompt % block_tokens:
        return ()
    inside = plan_input(end, interval=interval, block_tokens=block_tokens)
    return tuple(point for point in inside if point.tokens > prompt - prompt % block_tokens)


def units_by_depth(points: Iterable[PersistPoint], whole: int, block: int) -> dict[int, UnitKind]:
    """Depths in blocks at which a prompt leaves units, whose first ``whole`` tokens are stored.

    In exact mode the last, partial chunk is not stored, so the prompt's end moves before it.
    """
    units: dict[int, UnitKind] = {}
    for point in points:
        at, kinds = point.tokens, point.kinds
        if at > whole:
            at, kinds = whole, kinds & UnitKind.REQUEST_END
        if at and kinds:
            units[at // block] = units.get(at // block, UnitKind.NONE) | kinds
    return units
