"""A ``generate`` call before it begins: options that are not served, and how much the answer may need."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from transformers import GenerationConfig, PreTrainedConfig

from kvstore.errors import InvalidArgument
from mla.errors import PoolFull, Unsupported
from mla.options import IDLE, REFUSED, SERVED
from mla.pool import LatentPool
from mla.rope import check_rope_length

_DEFAULT_NEW_TOKENS = 20  # of transformers


@dataclass(frozen=True, slots=True)
class Decoding:
    """What decoding will ask of the pool."""

    rows: int  # sequences side by side
    new_tokens: int  # the most that each may get

    def cached(self, prompt: int) -> int:
        """Tokens of a row at its longest. The last one that is sampled has no latent."""
        return prompt + max(self.new_tokens - 1, 0)

    def blocks(self, prompt: int, block: int) -> int:
        """Blocks of ``block`` tokens that hold a prompt and all its answers at their longest."""
        first = -(-self.cached(prompt) // block)
        copies = self.rows // 2  # blocks that rows share are copied before they are let go
        return first + (self.rows - 1) * (first - prompt // block) + copies


def check_room(
    decoding: Decoding, prompt: int, config: PreTrainedConfig, rope_limit: int | None, pool: LatentPool
) -> None:
    """Raise ``Unsupported`` for too many tokens for the model, ``PoolFull`` for too many for the pool."""
    check_rope_length(rope_limit, decoding.cached(prompt))
    asked = f"a prompt of {prompt} tokens"
    if decoding.new_tokens:
        asked += f" and {decoding.new_tokens} new ones" + f" in {decoding.rows} rows" * (decoding.rows > 1)
    positions = positions_of(config)
    if positions is not None and decoding.cached(prompt) > positions:
        raise Unsupported(
            f"{asked}, but the model has {positions} positions (max_position_embeddings): shorten the prompt"
            " or pass a smaller max_new_tokens"
        )
    block = pool.layout.block_tokens
    need = decoding.blocks(prompt, block)
    if need > pool.num_blocks:
        raise PoolFull(
            f"{asked} need {need * block} tokens of the pool, which holds {pool.num_blocks * block}: make the"
            " pool larger (Session's pool_tokens), shorten the prompt or pass a smaller max_new_tokens"
        )


def positions_of(config: PreTrainedConfig) -> int | None:
    """How many positions a model has; None where its config does not say."""
    positions = config.to_dict().get("max_position_embeddings")
    return positions if isinstance(positions, int) else None


def plan_decoding(
    options: Mapping[str, Any],
    default: GenerationConfig,
    *,
    prompt: int,
    exact: bool,
    positions: int | None = None,
) -> Decoding:
    """Check the options of a ``generate`` call for a prompt of ``prompt`` tokens.

    ``positions`` is how many the model has: an answer of no stated length ends there.

    Raises ``Unsupported`` naming the one that is not right with a stored prefix, and
    ``InvalidArgument`` for values that mean nothing.
    """
    settings, further = _settings(options, default)
    _refuse_unserved(settings, further)
    _refuse_unanswerable(settings, options)
    rows = max(_count(settings, name, 1) for name in ("num_beams", "num_return_sequences"))
    if exact and rows > 1:
        raise Unsupported(f"{rows} beams or answers in exact mode: its bits are those of batch size 1")
    return Decoding(rows, _new_tokens(settings, prompt, positions))


def _settings(options: Mapping[str, Any], default: GenerationConfig) -> tuple[dict[str, Any], dict[str, Any]]:
    # What transformers goes by: keywords, then `generation_config`, then the model's own. Besides,
    # the keywords that are no setting.
    given = options.get("generation_config")
    if given is not None and not isinstance(given, GenerationConfig):
        raise InvalidArgument(f"generation_config is a {type(given).__name__}: pass a GenerationConfig")
    merged: Any = _unset() if given is None else copy.deepcopy(given)
    keywords = {name: value for name, value in options.items() if name != "generation_config"}
    try:
        merged.update(**default.to_dict(), defaults_only=True, allow_custom_entries=True)
        further = merged.update(**keywords)
    except (ValueError, TypeError) as error:
        raise InvalidArgument(f"transformers refuses these options: {error}") from error
    return vars(merged), further


def _refuse_unserved(settings: Mapping[str, Any], further: Mapping[str, Any]) -> None:
    everything = {**settings, **further}
    for name, value in everything.items():
        if name in REFUSED and _says_something(name, value):
            raise Unsupported(f"{name} in a stored session: {REFUSED[name]}")
    if settings.get("use_cache") is False:
        raise Unsupported("use_cache=False in a stored session: call the model's own generate")
    fields = vars(_unset())
    for name, value in everything.items():
        # A custom entry of a generation_config.json is no option: nothing reads it.
        optional = name in further or (name in fields and value != fields[name])
        if optional and name not in SERVED | IDLE | set(REFUSED) and not name.startswith("_"):
            raise Unsupported(
                f"{name} in a stored session: not known to be right with a loaded prefix, or misspelled"
            )


def _unset() -> Any:
    return GenerationConfig()  # type: ignore[no-untyped-call]


def _says_something(name: str, value: object) -> bool:
    if name == "num_beam_groups":
        return value not in (None, 1)
    return not (value is None or value is False or (isinstance(value, (int, float)) and value == 0))


def _refuse_unanswerable(settings: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    # What transformers would find only after the prompt was computed.
    beams = _count(settings, "num_beams", 1)
    if options.get("streamer") is not None and beams > 1:
        raise InvalidArgument(f"a streamer with num_beams={beams}: beams are known at the end only; pass one")
    if settings.get("stop_strings") is not None and options.get("tokenizer") is None:
        raise InvalidArgument("stop_strings without a tokenizer: pass tokenizer=... too")


def _default_length(prompt: int, positions: int | None) -> int:
    longest = prompt + _DEFAULT_NEW_TOKENS
    return longest if positions is None else min(longest, positions)


def _count(settings: Mapping[str, Any], name: str, default: int) -> int:
    value = settings.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InvalidArgument(f"{name}={value!r}: pass a positive whole number")
    return value


def _new_tokens(settings: Mapping[str, Any], prompt: int, positions: int | None) -> int:
    if settings.get("max_new_tokens") is not None:
        return _count(settings, "max_new_tokens", _DEFAULT_NEW_TOKENS)
    longest = _count(settings, "max_length", _default_length(prompt, positions))
    if longest <= prompt:
        raise InvalidArgument(
            f"max_length={longest} leaves no room after a prompt of {prompt} tokens: pass max_new_tokens"
        )
    return longest - prompt
