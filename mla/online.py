"""Causal softmax attention summed up piece by piece (online softmax).

Tiles are cut at places that depend on positions and shapes alone, so the same query
over the same keys is the same arithmetic to the bit wherever the keys lie.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

# Tokens of context that are gathered at once, and scores of a tile. On CPUs both should stay
# in a core's cache (1024 decodes 1.7 times as fast as 4096); GPUs want enough work a launch.
_CPU_CHUNK, _DEVICE_CHUNK = 1024, 4096
_CPU_SCORES, _DEVICE_SCORES = 1 << 19, 1 << 26
_ROWS = 512


def chunk_tokens(device: torch.device) -> int:
    """Tokens of a chunk of context; chunks are cut at absolute multiples of it."""
    return _CPU_CHUNK if device.type == "cpu" else _DEVICE_CHUNK


@dataclass(frozen=True)
class Tiling:
    """Sizes of a tile of scores: heads x rows x keys."""

    heads: int
    rows: int
    keys: int

    @classmethod
    def of(cls, device: torch.device, heads: int, rows: int) -> Tiling:
        """The tiling for ``heads`` heads of ``rows`` queries each; a function of shapes alone."""
        budget = _CPU_SCORES if device.type == "cpu" else _DEVICE_SCORES
        tile = min(rows, _ROWS)
        keys = min(chunk_tokens(device), max(64, budget // tile // 64 * 64))
        return cls(heads=min(heads, max(1, budget // (tile * keys))), rows=tile, keys=keys)


@dataclass(frozen=True)
class Span:
    """Where a piece of keys lies relative to the queries.

    Row r holds the query at position ``first + r // fold``; key j is at ``key_start + j``.
    ``valid [n]`` (bool) marks the keys that are no padding; None means all.
    """

    first: int
    fold: int
    key_start: int
    valid: Tensor | None = None


class RunningSoftmax:
    """Softmax-weighted sums of ``rows`` queries in ``heads`` heads over the keys seen so far.

    Invariant: ``total`` and ``sums`` are scaled by ``exp(-top)``, ``top`` being the largest
    score so far (the lowest finite number while there was none).
    """

    def __init__(self, heads: int, rows: int, width: int, like: Tensor) -> None:
        self.top = like.new_full((heads, rows, 1), torch.finfo(like.dtype).min)
        self.total = like.new_zeros((heads, rows, 1))
        self.sums = like.new_zeros((heads, rows, width))

    def add(self, rows: slice, scores: Tensor, values: Tensor) -> None:
        """Add keys: ``scores [heads, rows, n]`` (overwritten), ``values [heads, n, width]``."""
        old = self.top[:, rows]
        top = torch.maximum(old, scores.amax(dim=-1, keepdim=True))
        shrink = (old - top).exp_()
        weights = scores.sub_(top).exp_()
        self.total[:, rows].mul_(shrink).add_(weights.sum(dim=-1, keepdim=True))
        self.sums[:, rows].mul_(shrink).baddbmm_(weights, values)
        old.copy_(top)

    def result(self) -> Tensor:
        """``[heads, rows, width]``; zero for a query that saw no key (padding)."""
        return self.sums / self.total.clamp_min(torch.finfo(self.total.dtype).tiny)


def add_keys(state: RunningSoftmax, query: Tensor, key: Tensor, value: Tensor, span: Span) -> None:
    """Let ``query [heads, rows, d]`` (scaled) attend to ``key [heads, n, d]``, ``value [heads, n, w]``."""
    tiling = Tiling.of(query.device, query.shape[0], query.shape[1])
    for rows, keys in _visible(query.shape[1], key.shape[1], tiling, span):
        scores = torch.bmm(query[:, rows], key[:, keys].transpose(1, 2))
        _mask(scores, rows, keys, span)
        state.add(rows, scores, value[:, keys])


def _visible(rows: int, keys: int, tiling: Tiling, span: Span) -> Iterator[tuple[slice, slice]]:
    # Tiles that hold at least one key not in the future of their last query.
    for a in range(0, rows, tiling.rows):
        b = min(a + tiling.rows, rows)
        seen = min(keys, span.first + (b - 1) // span.fold + 1 - span.key_start)
        for k in range(0, seen, tiling.keys):
            yield slice(a, b), slice(k, min(k + tiling.keys, seen))


def _mask(scores: Tensor, rows: slice, keys: slice, span: Span) -> None:
    if span.key_start + keys.stop - 1 > span.first + rows.start // span.fold:
        at = span.first + torch.arange(rows.start, rows.stop, device=scores.device) // span.fold
        of = span.key_start + torch.arange(keys.start, keys.stop, device=scores.device)
        scores.masked_fill_(of[None, :] > at[:, None], -torch.inf)
    if span.valid is not None:
        scores.masked_fill_(~span.valid[keys], -torch.inf)
