"""Puts the latent pool behind transformers models: ``attach`` and ``detach``.

Since 5.15 the MLA models of transformers hand the cache the normed latent and the
rotated key, and expand them afterwards in a method ``expand_kv``. Attaching makes that
method the identity on each attention instance and selects our attention function, so
what ``LatentCache.update`` returns (pool layer, block table) arrives there as it is.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from types import MethodType
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel

from kvstore.errors import InvalidArgument, NotMLA
from kvstore.layout import LatentLayout
from kvstore.namespace import RopeLayout
from mla.absorb import UpProjection
from mla.attention import Context, DenseContext, PagedContext, latent_attention
from mla.entrance import NAME, Guard, attached, padding_mask
from mla.errors import Unsupported
from mla.pool import TORCH_DTYPES
from mla.projections import check_projections
from mla.rope import ROPE_LAYOUTS, check_rope_length, rope_json, rope_limit

_DTYPES = {torch_dtype: dtype for dtype, torch_dtype in TORCH_DTYPES.items()}
# What changes the scores or the softmax in a way that this attention does not know.
_UNKNOWN_TERMS = ("s_aux", "softcap", "position_bias", "sliding_window")

# Attention modules of attached models, and the longest sequence that each can serve.
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
    config: Mapping[str, Any] = _config_of(model).to_dict()
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
    """Let ``model`` attend to latents, in a ``LatentCache`` or a plain ``DynamicCache``.

    Weights and state dict stay as they are. Raises ``NotMLA`` or ``Unsupported`` with the
    reason, and then leaves the model as it was. Attaching twice is the same as once. From
    then on the model refuses what it cannot answer right (``mla.entrance``).
    """
    info = inspect_model(model)
    decoder, modules = decoder_of(model), _attention_modules(model)
    check_projections(model, modules)
    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, padding_mask)
    if _guards(decoder) == []:
        guard = Guard(str(decoder.config._attn_implementation))
        decoder.register_forward_pre_hook(guard.check, with_kwargs=True)
    if decoder.config._attn_implementation != NAME:
        model.set_attn_implementation(NAME)
    for module in modules:
        vars(module)["expand_kv"] = _as_they_are
        _limits[module] = info.max_tokens
    for part in _parts(model):
        vars(part)["init_continuous_batching"] = _no_continuous_batching
    attached.add(decoder)
    return info


def detach(model: PreTrainedModel) -> None:
    """Undo ``attach``. Raises ``InvalidArgument`` for a model that is not attached."""
    decoder = decoder_of(model)
    if decoder not in attached:
        raise InvalidArgument(f"{type(model).__name__} is not attached; nothing to detach")
    attached.discard(decoder)
    for module in _attention_modules(model):
        vars(module).pop("expand_kv", None)
        _limits.pop(module, None)
    for part in _parts(model):
        vars(part).pop("init_continuous_batching", None)
    for key, guard in _guards(decoder):
        del decoder._forward_pre_hooks[key], decoder._forward_pre_hooks_with_kwargs[key]
        if decoder.config._attn_implementation == NAME:  # else somebody has chosen another one since
            model.set_attn_implementation(guard.before)


def decoder_of(model: PreTrainedModel) -> PreTrainedModel:
    """The innermost model that holds the attention modules: it makes the mask and calls the layers."""
    modules = set(_attention_modules(model))
    return [part for part in _parts(model) if modules <= set(part.modules())][-1]


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
    if torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad):
        raise Unsupported("latent attention has no backward pass: call the model under torch.no_grad()")
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


def _as_they_are(kv_nope: Tensor, k_rot: Tensor) -> tuple[Tensor, Tensor]:
    return kv_nope, k_rot


def _no_continuous_batching(*args: Any, **kwargs: Any) -> None:
    raise Unsupported(
        "continuous batching (generate_batch, cache_implementation='paged') has pages of its own, which an"
        " attached model cannot read: call mla.detach(model) first"
    )


def _guards(decoder: nn.Module) -> list[tuple[int, Guard]]:
    hooks = decoder._forward_pre_hooks.items()
    methods = [(key, hook) for key, hook in hooks if isinstance(hook, MethodType)]
    return [(key, hook.__self__) for key, hook in methods if isinstance(hook.__self__, Guard)]


def _parts(model: nn.Module) -> list[PreTrainedModel]:
    # The model and what is a model of transformers inside it, from the outside in.
    return [part for part in model.modules() if isinstance(part, PreTrainedModel)]


def _config_of(model: nn.Module) -> PreTrainedConfig:
    try:
        config = cast(Any, model).config
    except AttributeError:  # DataParallel and its like hide the model
        config = None
    if not isinstance(config, PreTrainedConfig) or not _parts(model):
        raise Unsupported(f"{type(model).__name__} is no model of transformers: attach the model inside it")
    return config


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
