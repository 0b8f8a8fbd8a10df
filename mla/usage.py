"""What a request cost and what it got from the cache."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from kvstore.api import MissReason, Tier


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one request. Hit tokens are those that came, and with the missed ones the prompt's.

    ``miss_reason`` is that of the match, or ``LOST`` if the load brought less than it had found.
    """

    prompt_tokens: int
    completion_tokens: int
    prompt_cache_hit_tokens: int
    prompt_cache_miss_tokens: int
    hit_tokens_by_tier: dict[Tier, int] = field(default_factory=dict)
    miss_reason: MissReason = MissReason.NONE


@dataclass(frozen=True, slots=True)
class Prefilled:
    """Tokens of a prompt that was prefilled ahead: how many were computed, and how many are stored now.

    ``unit`` is the hash of the last whole block, by which its unit is named; None without one.
    """

    tokens: int
    computed_tokens: int
    stored_tokens: int
    unit: bytes | None


@dataclass(frozen=True, slots=True)
class Generation:
    """Result of ``Session.generate``.

    ``tokens``: the new tokens of the best sequence. ``sequences [rows, prompt + new]``:
    everything that ``model.generate`` returned. ``logits``: one ``[rows, vocabulary]`` for
    each new token, where asked for by ``output_logits=True``, and ``scores`` the same as the
    processors left them, by ``output_scores=True``.
    """

    tokens: list[int]
    sequences: Tensor
    usage: Usage
    logits: tuple[Tensor, ...] | None = None
    scores: tuple[Tensor, ...] | None = None
