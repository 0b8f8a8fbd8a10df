"""What the bytes of a block mean. All byte arithmetic of the project lives here.

A block holds 64 consecutive tokens of one sequence for every layer of the layout:
``[layers, block_tokens, entry]``, contiguous and layer-major, followed by one such
region per extra strip. An entry is the normed latent and then the roped key.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any

from kvstore.errors import InvalidArgument, NotMLA

BLOCK_TOKENS = 64
_DS_MLA_TILE = 128  # fp8_ds_mla (FlashMLA, vLLM): one fp32 scale per 128 latent numbers


class DType(StrEnum):
    """Number format of an entry."""

    BF16 = "bf16"
    FP16 = "fp16"
    FP32 = "fp32"
    FP8 = "fp8"
    FP8_DS_MLA = "fp8_ds_mla"

    @property
    def itemsize(self) -> int:
        """Bytes of one number; 1 for both fp8 formats, whose entries are opaque bytes."""
        return {"bf16": 2, "fp16": 2, "fp32": 4}.get(self.value, 1)


_HF_DTYPES = {"bfloat16": DType.BF16, "float16": DType.FP16, "float32": DType.FP32}


@dataclass(frozen=True, slots=True)
class Strip:
    """Extra bytes per token and layer stored behind the entries, e.g. an indexer's keys."""

    name: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class LatentLayout:
    """Layer range, widths and number format of a block.

    Raises ``InvalidArgument`` when a width is out of range.
    """

    num_layers: int
    latent_rank: int = 512
    rope_dim: int = 64
    dtype: DType = DType.BF16
    first_layer: int = 0
    strips: tuple[Strip, ...] = ()
    block_tokens: int = BLOCK_TOKENS

    def __post_init__(self) -> None:
        _require("num_layers", self.num_layers, 1)
        _require("latent_rank", self.latent_rank, 1)
        _require("block_tokens", self.block_tokens, 1)
        _require("rope_dim", self.rope_dim, 0)
        _require("first_layer", self.first_layer, 0)
        for strip in self.strips:
            _require(f"strip {strip.name!r} nbytes", strip.nbytes, 1)
        if self.block_tokens % 16:
            raise InvalidArgument(f"block_tokens={self.block_tokens} is no multiple of 16")
        if self.dtype is DType.FP8_DS_MLA and self.latent_rank % _DS_MLA_TILE:
            raise InvalidArgument(
                f"fp8_ds_mla needs latent_rank % {_DS_MLA_TILE} == 0, got {self.latent_rank}"
            )

    @property
    def width(self) -> int:
        """Numbers of an entry: latent rank plus rope dim (576 for DeepSeek)."""
        return self.latent_rank + self.rope_dim

    @property
    def entry_bytes(self) -> int:
        """Bytes of one entry (one token, one layer), without strips."""
        if self.dtype is DType.FP8_DS_MLA:
            return self.latent_rank + 4 * (self.latent_rank // _DS_MLA_TILE) + 2 * self.rope_dim
        return self.width * self.dtype.itemsize

    @property
    def entries_bytes(self) -> int:
        """Bytes of the ``[layers, block_tokens, entry]`` region of a block."""
        return self.num_layers * self.block_tokens * self.entry_bytes

    @property
    def token_bytes(self) -> int:
        """Bytes that one token costs over all layers and strips."""
        return self.num_layers * (self.entry_bytes + sum(s.nbytes for s in self.strips))

    @property
    def block_bytes(self) -> int:
        """Bytes of a whole block."""
        return self.token_bytes * self.block_tokens

    def blocks(self, tokens: int) -> int:
        """Number of full blocks in ``tokens`` tokens."""
        return tokens // self.block_tokens

    def floor(self, tokens: int) -> int:
        """``tokens`` rounded down to a multiple of the block."""
        return tokens - tokens % self.block_tokens

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form; ``from_dict`` reads it back."""
        return asdict(self)

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> LatentLayout:
        """Inverse of ``to_dict``. Raises ``InvalidArgument`` on malformed input."""
        try:
            fields = dict(raw)
            fields["dtype"] = DType(fields.get("dtype", "bf16"))
            fields["strips"] = tuple(
                Strip(str(s["name"]), int(s["nbytes"])) for s in fields.get("strips", ())
            )
            return cls(**fields)
        except (TypeError, KeyError, ValueError, OverflowError, RecursionError) as error:
            raise InvalidArgument(f"not a layout: {dict(raw)!r} ({error})") from error

    @classmethod
    def from_hf_config(cls, config: Mapping[str, Any], dtype: DType | None = None) -> LatentLayout:
        """Layout of a Hugging Face config dict (its ``text_config`` if it has one).

        Raises ``NotMLA`` when the config has no ``kv_lora_rank`` / ``qk_rope_head_dim``.
        """
        text = config.get("text_config")
        text = text if isinstance(text, Mapping) else config
        rank, rope, layers = (
            text.get(name) for name in ("kv_lora_rank", "qk_rope_head_dim", "num_hidden_layers")
        )
        if not rank or rope is None or not layers:
            raise NotMLA(
                f"model_type {text.get('model_type')!r} has kv_lora_rank={rank!r}, qk_rope_head_dim={rope!r},"
                f" num_hidden_layers={layers!r}: not an MLA model; use a DeepSeek-style one"
            )
        named = str(text.get("dtype") or text.get("torch_dtype") or "bfloat16").removeprefix("torch.")
        return cls(
            num_layers=int(layers),
            latent_rank=int(rank),
            rope_dim=int(rope),
            dtype=dtype or _HF_DTYPES.get(named, DType.BF16),
        )


def _require(name: str, value: object, least: int) -> None:
    # JSON and the wire may bring anything, so the type is checked too.
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value < 1 << 20:
        raise InvalidArgument(f"{name}={value!r} is no integer in [{least}, 2**20)")


DEEPSEEK_V3 = LatentLayout(num_layers=61)
DEEPSEEK_V2_LITE = LatentLayout(num_layers=27)
KIMI_K2 = LatentLayout(num_layers=61)
TINY = LatentLayout(num_layers=4)

PRESETS: dict[str, LatentLayout] = {
    "deepseek-v3": DEEPSEEK_V3,
    "deepseek-v2-lite": DEEPSEEK_V2_LITE,
    "kimi-k2": KIMI_K2,
    "tiny": TINY,
}


def preset(name: str, **changes: Any) -> LatentLayout:
    """A preset by name with fields replaced. Raises ``InvalidArgument`` for an unknown name."""
    if name not in PRESETS:
        raise InvalidArgument(f"layout {name!r} is unknown; one of {', '.join(PRESETS)}")
    return replace(PRESETS[name], **changes)
