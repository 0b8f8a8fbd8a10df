"""Puts the latent pool behind transformers models: ``attach`` and ``detach``.

Since 5.15 the MLA models of transformers hand the cache the normed latent and the
rotated key, and expand them afterwards in a method ``expand_kv``. Attaching makes that
method the identity on each attention instance and selects our attention function, so
what ``LatentCache.update`` returns (pool layer, block table) arrives there as it is.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import causal_mask_function

from kvstore.errors import InvalidArgument, NotMLA
from kvstore.layout import LatentLayout
from kvstore.namespace import RopeLayout
from mla.absorb import UpProjection
from mla.attention import Context, DenseContext, PagedContext, latent_attention
from mla.errors import Unsupported
from mla.pool import TORCH_DTYPES
from mla.rope import ROPE_LAYOUTS, check_rope_length, rope_json, rope_limit

NAME = "latentkv"  # of the attention and mask functions in transformers' registries

_DTYPES = {torch_dtype: dtype for dtype, torch_dtype in TORCH_DTYPES.items()}
# What changes the scores or the softmax in a way that this attention does not know.
_UNKNOWN_TERMS = ("s_aux", "softcap", "position_bias", "sliding_window")

# Attached models and the attention they had before.
_attached: weakref.WeakKeyDictionary[PreTrainedModel, str] = weakref.WeakKeyDictionary()
# Their attention modules, and the longest sequence that each can serve.
_limits: weakref.WeakKeyDictionary[nn.Module, int | None] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class ModelInfo:
    """What a model caches: for ``LatentPool`` and ``Namespace``."""

    layout: LatentLayout
    rope: str
    rope_layout: RopeLayout
    max_tokens: int | None  # longest sequence for which cached keys are right; None is no limit


def inspect_model(model: PreTrainedModel) -> ModelInfo:
    """What ``model`` caches. Raises ``NotMLA``, or ``Unsupported`` with the reason."""
    modules = _attention_modules(model)
    config: Mapping[str, Any] = model.config.to_dict()
    _refuse_by_config(config)
    for module in modules:
        _refuse_by_module(module)
    dtype = _DTYPES.get(model.dtype)
    if dtype is None:
        raise Unsupported(f"model of dtype {model.dtype}: cast it to bfloat16, float16 or float32")
    return ModelInfo(
        layout=LatentLayout.from_hf_config({**config, "num_hidden_layers": len(modules)}, dtype),
        rope=rope_json(config),
        rope_layout=ROPE_LAYOUTS[type(modules[0]).__name__],
        max_tokens=rope_limit(config),
    )


def attach(model: PreTrainedModel) -> ModelInfo:
    """Let ``model`` attend to latents, in a ``LatentCache`` or any other cache.

    Weights and state dict stay as they are. Raises ``NotMLA`` or ``Unsupported`` with the
    reason, and then leaves the model as it was. Attaching twice is the same as once.
    """
    info = inspect_model(model)
    if model in _attached:
        return info
    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, padding_mask)
    _attached[model] = str(model.config._attn_implementation)
    model.set_attn_implementation(NAME)
    for module in _attention_modules(model):
        vars(module)["expand_kv"] = _as_they_are
        _limits[module] = info.max_tokens
    return info


def detach(model: PreTrainedModel) -> None:
    """Undo ``attach``. Raises ``InvalidArgument`` for a model that is not attached."""
    if model not in _attached:
        raise InvalidArgument(f"{type(model).__name__} is not attached; nothing to detach")
    for module in _attention_modules(model):
        del vars(module)["expand_kv"], _limits[module]
    model.set_attn_implementation(_attached.pop(model))


def cache_argument(model: PreTrainedModel) -> str:
    """Name of the cache argument of the model's ``forward`` and ``generate`` (it was renamed on the way)."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention over latents, as transformers calls it.

    ``query [B, H, S, dn + dr]``. ``key``, ``value`` are either a pool layer and a block table
    (from ``LatentCache``) or latents ``[B, 1, T, R]`` and rope keys ``[B, 1, T, dr]``.
    ``attention_mask [B, T]`` (bool) is False at padding. Returns ``[B, S, H, dv]``.
    """
    if module not in _limits:
        raise Unsupported(
            f"this {type(module).__name__} is not attached though its config says so (it is shared with an"
            " attached model, or the model is a copy of one): give each its own config, and attach it"
        )
    if module.training or dropout:
        raise Unsupported("latent attention has no backward pass and no dropout: call model.eval() first")
    unknown = [name for name in _UNKNOWN_TERMS if kwargs.get(name) is not None]
    if unknown or kwargs.get("is_causal") is False:
        raise Unsupported(f"attention with {unknown or 'is_causal=False'}: only plain causal MLA is served")
    if attention_mask is not None and attention_mask.dim() != 2:
        raise Unsupported(
            f"an attention mask of shape {tuple(attention_mask.shape)}: pass a [batch, tokens] padding mask"
        )
    mla = cast(Any, module)
    context: Context = DenseContext(key, value) if value.is_floating_point() else PagedContext(key, value)
    check_rope_length(_limits[module], context.length)
    up = UpProjection(
        projection=mla.kv_b_proj,
        heads=query.shape[1],
        nope=mla.qk_nope_head_dim,
        value=mla.v_head_dim,
        rank=mla.kv_lora_rank,
    )
    return latent_attention(query, context, up, scaling, attention_mask), None


def padding_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> Tensor | None:
    """The padding ``[B, kv_length]`` as bool, None where there is none.

    Causality comes from the positions, so no mask of queries times keys is made. Raises
    ``Unsupported`` for any other pattern (packed sequences, overlays).
    """
    if mask_function is not causal_mask_function:
        raise Unsupported(
            "an attention pattern that is not plainly causal (packed sequences or an overlay): pass the"
            " sequences as rows of a padded batch"
        )
    if attention_mask is None or bool(attention_mask[:, :kv_length].all()):
        return None
    if attention_mask.shape[-1] < kv_length:
        raise InvalidArgument(
            f"a padding mask for {attention_mask.shape[-1]} of {kv_length} tokens: cover the cache too"
        )
    return attention_mask[:, :kv_length].bool()


def _as_they_are(kv_nope: Tensor, k_rot: Tensor) -> tuple[Tensor, Tensor]:
    return kv_nope, k_rot


def _attention_modules(model: PreTrainedModel) -> list[nn.Module]:
    found = [m for m in model.modules() if "kv_b_proj" in dict(m.named_children())]
    if not found:
        raise NotMLA(f"{type(model).__name__} has no kv_b_proj: not an MLA model in transformers' form")
    return found


def _refuse_by_config(config: Mapping[str, Any]) -> None:
    kind = config.get("model_type")
    if config.get("text_config"):
        raise Unsupported(f"{kind}: a model of several parts; attach its language model alone")
    linear = {t for t in config.get("layer_types") or () if t != "full_attention"}
    if config.get("index_topk"):
        raise Unsupported(
            f"{kind}: sparse attention by an indexer (top {config['index_topk']}): its keys would have to be"
            " stored too, and past that many tokens attention is not dense"
        )
    if linear or config.get("linear_attn_config"):
        raise Unsupported(
            f"{kind}: a hybrid, whose layers {sorted(linear) or ''} keep a recurrent state that is no block"
            " of tokens; a prefix of it cannot be restored from latents"
        )


def _refuse_by_module(module: nn.Module) -> None:
    kind = type(module).__name__
    children, parameters = dict(module.named_children()), dict(module.named_parameters(recurse=False))
    if "sinks" in parameters:
        raise Unsupported(f"{kind} has attention sinks, which latent attention does not know")
    if kind not in ROPE_LAYOUTS or not callable(vars(type(module)).get("expand_kv")):
        raise Unsupported(
            f"attention class {kind} is not known to cache normed latents and expand them in `expand_kv`;"
            f" served are {', '.join(sorted(ROPE_LAYOUTS))} of transformers 5.15 and later"
        )
    if "bias" in dict(children["kv_b_proj"].named_parameters(recurse=False)):
        raise Unsupported(f"{kind}.kv_b_proj has a bias, which cannot be absorbed")
