"""How far a prompt's chain is stored and what is known of the place where it stops, for people."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from kvstore.api import Match
from kvstore.ghosts import GhostList, Gone
from kvstore.matching import Matcher, Prompt
from kvstore.prefix_index import NONE, PrefixIndex, Walk, view
from kvstore.units import UnitKind

LOOK_BLOCKS = 32  # how far behind the last stored block of a prompt other prompts' units are looked for


@dataclass(frozen=True, slots=True)
class UnitAt:
    """A unit of the prompt's own chain. ``tokens`` is where it ends; times in unix seconds."""

    tokens: int
    kinds: UnitKind
    created: float
    used: float
    hits: int


@dataclass(frozen=True, slots=True)
class Trail:
    """A prompt's way through the index.

    ``beyond``: tokens at which units of prompts end that share all that is stored of this one and
    go on, as far as ``LOOK_BLOCKS``. ``gone``: what became of the first block that is not stored.
    ``seen``: leading blocks that were stored or seen lately.
    """

    match: Match
    units: tuple[UnitAt, ...]
    beyond: tuple[int, ...]
    gone: Gone | None
    seen: int


def trail(
    index: PrefixIndex,
    ghosts: GhostList,
    matcher: Matcher,
    prompt: Prompt,
    walk: Walk,
    to_wall: Callable[[float], float],
) -> Trail:
    """Follow a walked prompt. Changes nothing; some ten milliseconds among 100,000 units.

    ``to_wall`` makes wall times of the store's.
    """
    hashes, size = prompt.hashes, prompt.block_tokens
    rows: list[int] = walk.rows.tolist()
    seen = len(rows)
    while seen < len(hashes) and (hashes[seen] in ghosts or ghosts.gone(hashes[seen])):
        seen += 1
    gone = ghosts.gone(hashes[len(rows)]) if len(rows) < len(hashes) else None
    return Trail(
        match=matcher.match(prompt, walk, matcher.common_prefix(prompt, walk)),
        units=tuple(_unit(index, row, size, to_wall) for row in rows if index.kinds[row]),
        beyond=tuple(size * depth for depth in _units_below(index, rows[-1])) if rows else (),
        gone=None if gone is None else replace(gone, at=to_wall(gone.at)),
        seen=seen,
    )


def _unit(index: PrefixIndex, row: int, block_tokens: int, to_wall: Callable[[float], float]) -> UnitAt:
    use = index.units[row]
    tokens = index.depth[row] * block_tokens
    return UnitAt(tokens, UnitKind(index.kinds[row]), to_wall(use.created), to_wall(use.used), use.hits)


def _units_below(index: PrefixIndex, top: int) -> list[int]:
    """Depths of the units that stand on row ``top``, at most ``LOOK_BLOCKS`` below it."""
    depth, parent = view(index.depth), view(index.parent)
    marked = np.flatnonzero(view(index.kinds))
    near = marked[(depth[marked] > depth[top]) & (depth[marked] <= depth[top] + LOOK_BLOCKS)]
    at: NDArray[np.intp] = near.copy()
    found: set[int] = set()
    while len(near):
        at = parent[at]
        found.update(depth[near[at == top]].tolist())
        going = (at != NONE) & (at != top)
        going[going] = depth[at[going]] > depth[top]
        near, at = near[going], at[going]
    return sorted(found)
