"""Rotary position embedding: what a cached key depends on, and what is refused.

The rope key is cached after its rotation. That is sound only while the rotation of a
position does not depend on how long the sequence will become.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from kvstore.namespace import RopeLayout
from mla.errors import Unsupported

# Order of the rotated numbers in the cached key, by attention class of transformers.
# DeepseekV2 multiplies complex pairs in place; the others put real halves side by side.
ROPE_LAYOUTS: Mapping[str, RopeLayout] = {
    "DeepseekV2Attention": "interleaved",
    "DeepseekV3Attention": "halves",
    "Glm4MoeLiteAttention": "halves",
    "YoutuAttention": "halves",
    "Mistral4Attention": "halves",
    "MiniCPM3Attention": "halves",
    "AXK1Attention": "halves",
    "LongcatFlashMLA": "halves",
}


def rope_json(config: Mapping[str, Any]) -> str:
    """Canonical JSON of everything in a Hugging Face config dict that shapes the rope key.

    For ``Namespace.rope``. Raises ``Unsupported`` for a rope type whose frequencies
    depend on the longest position seen (``dynamic``).
    """
    parameters = _parameters(config)
    rope_type = _rope_type(parameters)
    if "dynamic" in rope_type:
        raise Unsupported(
            f"rope type {rope_type!r}: its frequencies change with the sequence's length,"
            " so a cached key fits no longer request; use a checkpoint with default or yarn rope"
        )
    shape = {
        "parameters": parameters,
        "dim": config.get("qk_rope_head_dim"),
        "interleaved_weights": bool(config.get("rope_interleave", False)),
    }
    return json.dumps(shape, sort_keys=True, separators=(",", ":"))


def engine_rope_layout(config: Mapping[str, Any]) -> RopeLayout:
    """Order of the rotated numbers in the keys that vLLM and SGLang cache, by a Hugging Face config dict."""
    return "interleaved" if config.get("rope_interleave", True) else "halves"


def rope_limit(config: Mapping[str, Any]) -> int | None:
    """Longest sequence (tokens) for which cached keys are right; None is no limit.

    ``longrope`` switches to other frequencies past its original length.
    """
    parameters = _parameters(config)
    if _rope_type(parameters) != "longrope":
        return None
    original = parameters.get("original_max_position_embeddings") or config.get("max_position_embeddings")
    return int(original) if original else 0


def check_rope_length(limit: int | None, tokens: int) -> None:
    """Raise ``Unsupported`` when a sequence of ``tokens`` tokens is longer than ``limit``."""
    if limit is not None and tokens > limit:
        raise Unsupported(
            f"{tokens} tokens with longrope of original length {limit}: past it the frequencies change and"
            f" cached keys are wrong; keep prompt and answer within {limit} tokens"
        )


def _parameters(config: Mapping[str, Any]) -> Mapping[str, Any]:
    parameters = config.get("rope_parameters")
    return parameters if isinstance(parameters, Mapping) else {}


def _rope_type(parameters: Mapping[str, Any]) -> str:
    return str(parameters.get("rope_type") or parameters.get("type") or "default")
