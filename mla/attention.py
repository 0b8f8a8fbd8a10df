"""MLA over cached latents: absorbed for few queries, expanded chunk by chunk for many.

Both forms walk the context in chunks (``online.chunk_tokens``) at absolute multiples, so
memory does not grow with it, with scores, weights and sums in fp32 (scores rounded to
bf16 cost 5-10 times the error).
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from typing import Protocol

import torch
from torch import Tensor

from kvstore.errors import InvalidArgument
from mla.absorb import UpProjection, fold_output, fold_query
from mla.online import RunningSoftmax, Span, Tiling, add_keys, chunk_tokens

# Queries from which expanding the context is cheaper than R-wide scores and sums. The
# FLOPs cross at R(dn+dv)/(2R-dn-dv) = 171 for DeepSeek's sizes; CPUs measured 300-900.
EXPAND_FROM = 256


class Form(Enum):
    """How a chunk of queries meets the cached latents."""

    ABSORBED = "absorbed"
    EXPANDED = "expanded"


def choose_form(query_len: int) -> Form:
    """The form for a chunk of ``query_len`` queries.

    By the length alone, so a chunk is computed the same way whatever precedes it.
    """
    return Form.EXPANDED if query_len >= EXPAND_FROM else Form.ABSORBED


class Context(Protocol):
    """Cached entries (latent, then rope key) of a batch of equally long sequences."""

    @property
    def length(self) -> int:
        """Tokens of every row, the queries' own included."""

    def read(self, row: int, start: int, stop: int) -> Tensor:
        """Entries ``[stop - start, R + dr]`` of one row, in the cache's dtype, contiguous."""


class PagedContext:
    """Blocks of a pool layer ``[num_blocks, block, R + dr]`` by a table.

    ``table [B, n + 1]`` (int): n block numbers of each row, and its length in tokens.
    """

    def __init__(self, layer: Tensor, table: Tensor) -> None:
        self._layer = layer
        self._block = layer.shape[1]
        self._blocks = table[:, :-1].to(layer.device)
        self.length = int(table[0, -1])

    def read(self, row: int, start: int, stop: int) -> Tensor:
        """See ``Context``; ``start`` is a multiple of the block."""
        blocks = self._blocks[row, start // self._block : -(-stop // self._block)]
        return self._layer.index_select(0, blocks).flatten(0, 1)[: stop - start]


class DenseContext:
    """Entries as the model computed them: ``latent [B, 1, T, R]``, ``rope [B, 1, T, dr]``."""

    def __init__(self, latent: Tensor, rope: Tensor) -> None:
        self._latent, self._rope = latent, rope
        self.length = latent.shape[2]

    def read(self, row: int, start: int, stop: int) -> Tensor:
        """See ``Context``."""
        return torch.cat((self._latent[row, 0, start:stop], self._rope[row, 0, start:stop]), dim=-1)


def latent_attention(
    query: Tensor, context: Context, up: UpProjection, scaling: float, valid: Tensor | None = None
) -> Tensor:
    """Causal attention of the last S tokens of each row over all of it.

    ``query [B, H, S, dn + dr]`` after RoPE; ``valid [B, T]`` (bool) is False at padding.
    Returns ``[B, S, H, dv]`` in the query's dtype. Rows are independent of each other.
    Raises ``InvalidArgument`` when the context is shorter than the queries.
    """
    batch, heads, queries, _ = query.shape
    if context.length < queries:
        raise InvalidArgument(
            f"{queries} queries over a context of {context.length} tokens: the cache lacks some"
        )
    forms = {Form.ABSORBED: _absorbed, Form.EXPANDED: _expanded}
    form = forms[choose_form(queries)]
    output = query.new_empty((batch, queries, heads, up.value))
    # Inside autocast the products below would silently be rounded to bf16.
    with torch.no_grad(), torch.autocast(query.device.type, enabled=False):
        for row in range(batch):
            padding = None if valid is None or bool(valid[row].all()) else valid[row]
            output[row] = form(
                query[row], _Row(context, row, chunk_tokens(query.device), padding), up, scaling
            ).transpose(0, 1)
    return output


class _Row:
    """One sequence of a context, cut in chunks."""

    def __init__(self, context: Context, row: int, chunk: int, valid: Tensor | None) -> None:
        self._context, self._row, self._chunk, self._valid = context, row, chunk, valid
        self.length = context.length

    def chunks(self, queries: int, fold: int) -> Iterator[tuple[Tensor, Span]]:
        """Entries of each chunk with their place relative to the last ``queries`` tokens."""
        for start in range(0, self.length, self._chunk):
            stop = min(start + self._chunk, self.length)
            valid = None if self._valid is None else self._valid[start:stop]
            yield (
                self._context.read(self._row, start, stop),
                Span(self.length - queries, fold, start, valid),
            )


def _compute_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _absorbed(query: Tensor, row: _Row, up: UpProjection, scaling: float) -> Tensor:
    # One key for all heads: rows are (query, head) pairs, query-major, of a single "head".
    heads, queries, _ = query.shape
    dtype = _compute_dtype(query.dtype)
    w_uk, w_uv, bias = up.halves(query, dtype)
    q_nope, q_rope = query.to(dtype).mul(scaling).tensor_split([up.nope], dim=-1)
    folded = (
        torch.cat((fold_query(q_nope, w_uk), q_rope), dim=-1)
        .transpose(0, 1)
        .reshape(1, -1, up.rank + q_rope.shape[-1])
    )
    state = RunningSoftmax(1, queries * heads, up.rank, folded)
    for entries, span in row.chunks(queries, fold=heads):
        key = entries.to(dtype)[None]
        add_keys(state, folded, key, key[..., : up.rank], span)
    latents = state.result().view(queries, heads, up.rank).transpose(0, 1)
    return fold_output(latents, w_uv, bias).to(query.dtype)


def _expanded(query: Tensor, row: _Row, up: UpProjection, scaling: float) -> Tensor:
    heads, queries, _ = query.shape
    dtype = _compute_dtype(query.dtype)
    scaled = query.to(dtype).mul(scaling)
    step = Tiling.of(query.device, heads, queries).heads
    groups = [slice(h, min(h + step, heads)) for h in range(0, heads, step)]
    states = [RunningSoftmax(g.stop - g.start, queries, up.value, scaled) for g in groups]
    for entries, span in row.chunks(queries, fold=1):
        keys, values = up.expand(entries[:, : up.rank])
        rope = entries[:, up.rank :].to(dtype)
        for group, state in zip(groups, states, strict=True):
            key = _join(keys[group], rope)
            add_keys(state, scaled[group], key, values[group].to(dtype), span)
    return torch.cat([state.result() for state in states]).to(query.dtype)


def _join(nope: Tensor, rope: Tensor) -> Tensor:
    # Keys [heads, n, dn + dr] in the dtype of `rope`, converted while copying.
    heads, tokens, width = nope.shape
    key = rope.new_empty((heads, tokens, width + rope.shape[-1]))
    key[..., :width] = nope
    key[..., width:] = rope
    return key
