"""Options of ``generate``: what a stored session refuses, and how much the answer may need."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from transformers import GenerationConfig

from mla.errors import Unsupported

_DRAFTS = "drafts are cut off the cache again, which is wrong for one that starts with a loaded prefix"
_IDS = "blocks are named by token ids alone; pass one unpadded prompt of them"
_CACHE = "the session brings its own cache"
_REFUSED = {
    "prompt_lookup_num_tokens": _DRAFTS,
    "assistant_model": _DRAFTS,
    "assistant_early_exit": _DRAFTS,
    "use_mtp": _DRAFTS,
    "custom_generate": "what another way of decoding does with the cache is not known",
    "attention_mask": _IDS,
    "position_ids": _IDS,
    "token_type_ids": _IDS,
    "inputs": _IDS,
    "inputs_embeds": _IDS,
    "past_key_values": _CACHE,
    "cache": _CACHE,
    "cache_implementation": _CACHE,
    "prefill_chunk_size": "the session splits the prompt; give Session a prefill_chunk",
}
_DEFAULT_NEW_TOKENS = 20  # of transformers


@dataclass(frozen=True, slots=True)
class Decoding:
    """What decoding will ask of the pool."""

    rows: int  # sequences side by side
    new_tokens: int  # the most that each may get


def plan_decoding(
    options: Mapping[str, Any], default: GenerationConfig, *, prompt: int, exact: bool
) -> Decoding:
    """Check the options of a ``generate`` call for a prompt of ``prompt`` tokens.

    Raises ``Unsupported`` naming the one that is not right with a stored prefix.
    """
    settings = _settings(options, default)
    for name, reason in _REFUSED.items():
        if settings.get(name) is not None and settings[name] is not False:
            raise Unsupported(f"{name} in a stored session: {reason}")
    if settings.get("use_cache") is False:
        raise Unsupported("use_cache=False in a stored session: call the model's own generate")
    rows = max(int(settings.get(name) or 1) for name in ("num_beams", "num_return_sequences"))
    if exact and rows > 1:
        raise Unsupported(f"{rows} beams or answers in exact mode: its bits are those of batch size 1")
    return Decoding(rows, _new_tokens(settings, prompt))


def _settings(options: Mapping[str, Any], default: GenerationConfig) -> dict[str, Any]:
    # What transformers goes by: keywords, then `generation_config`, then the model's own.
    given = options.get("generation_config")
    merged = {name: value for name, value in default.to_dict().items() if value is not None}
    if isinstance(given, GenerationConfig):
        merged |= {name: value for name, value in given.to_dict().items() if value is not None}
    return merged | dict(options)


def _new_tokens(settings: Mapping[str, Any], prompt: int) -> int:
    if settings.get("max_new_tokens") is not None:
        return int(settings["max_new_tokens"])
    if settings.get("max_length") is not None:
        return max(int(settings["max_length"]) - prompt, 0)
    return _DEFAULT_NEW_TOKENS
