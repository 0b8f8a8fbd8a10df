"""The entrance of an attached model: what cannot be answered right is refused before anything is computed.

``attach`` hangs a ``Guard`` in front of the decoder, the module that makes the mask and calls
the layers. It looks at the model's state and at the arguments of each call. What it lets in
is what ``mla.adapters.transformers.attention_forward`` computes right.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache, DynamicLayer
from transformers.masking_utils import causal_mask_function

from mla.cache import LatentCache
from mla.errors import Unsupported

NAME = "latentkv"  # of the attention and mask functions in transformers' registries

# Decoders of attached models. A copy of one carries its guard along, but is not among them.
attached: weakref.WeakSet[nn.Module] = weakref.WeakSet()

_PACKED = ("cu_seq_lens_q", "cu_seq_lens_k")


class Guard:
    """Stands in front of the decoder of an attached model; ``check`` is its forward pre-hook."""

    def __init__(self, before: str) -> None:
        self.before = before  # the attention implementation to go back to

    def check(self, decoder: PreTrainedModel, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Raises ``Unsupported`` for a call that would not be answered right."""
        check_state(decoder)
        if torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
            raise Unsupported(
                "tracing an attached model would fix the lengths of its cache: mla.detach(model)"
            )
        names = inspect.signature(decoder.forward).parameters if args else ()
        given = dict(zip(names, args, strict=False)) | dict(kwargs)
        _check_gradients(decoder, given.get("inputs_embeds"))
        for name in ("cache", "past_key_values"):  # it was renamed on the way
            _check_cache(given.get(name))
        _check_mask(given.get("attention_mask"))
        if given.get("output_attentions") or decoder.config.output_attentions:
            raise Unsupported(
                "output_attentions: latent attention never holds the weights as a whole; detach the model"
                " (mla.detach) and have them computed by the implementation 'eager'"
            )
        if given.get("is_causal") is False or any(given.get(name) is not None for name in _PACKED):
            raise Unsupported(
                "attention that is not plainly causal (is_causal=False, or packed sequences by cu_seq_lens):"
                " pass the sequences as rows of a padded batch"
            )


def check_state(decoder: PreTrainedModel) -> None:
    """Raise ``Unsupported`` unless this decoder is attached and set up as ``attach`` has left it."""
    kind = type(decoder).__name__
    if decoder not in attached:
        raise Unsupported(
            f"this {kind} is not attached (it was detached, or it is a copy of an attached model): call"
            " mla.attach(model) first"
        )
    chosen = decoder.config._attn_implementation
    if chosen != NAME:
        raise Unsupported(
            f"the attention implementation of an attached {kind} was switched to {chosen!r}, which cannot"
            " read latents: call mla.detach(model) to use it, or mla.attach(model) to go back to latents"
        )
    if decoder.training:
        raise Unsupported("latent attention has no backward pass and no dropout: call model.eval() first")


def check_unmoved(model: PreTrainedModel, pool: Tensor, *, exact: bool) -> None:
    """Raise ``Unsupported`` for a model that computes elsewhere, or in other numbers, than its pool has.

    Autocast is another arithmetic under the same name, unless an ``exact`` session names that too.
    """
    if model.dtype != pool.dtype or model.device != pool.device:
        raise Unsupported(
            f"the model is {model.dtype} on {model.device} now, the session's pool {pool.dtype} on"
            f" {pool.device}: make a new session after the model was cast or moved"
        )
    kind = pool.device.type
    if not exact and torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) != pool.dtype:
        raise Unsupported(
            f"autocast to {torch.get_autocast_dtype(kind)} in a session over {pool.dtype}: its blocks would"
            " be stored as if computed without; cast the model, or make the session exact"
        )


def _check_gradients(decoder: nn.Module, embeds: Tensor | None) -> None:
    if not torch.is_grad_enabled():
        return
    if (embeds is not None and embeds.requires_grad) or any(p.requires_grad for p in decoder.parameters()):
        raise Unsupported(
            "latent attention has no backward pass, so gradients through it would be wrong: call the model"
            " under torch.no_grad() or torch.inference_mode(), or mla.detach(model) to train it"
        )


def _check_cache(cache: object) -> None:
    if cache is None or isinstance(cache, LatentCache):
        return
    plain = type(cache) is DynamicCache and all(type(layer) is DynamicLayer for layer in cache.layers)
    if not plain:
        raise Unsupported(
            f"a {type(cache).__name__} as the cache of an attached model: what it gives back besides the"
            " tokens so far is not known; use a LatentCache or a plain DynamicCache (no cache_implementation)"
        )


def _check_mask(mask: object) -> None:
    if mask is None:
        return
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        shape = f"of shape {tuple(mask.shape)}" if isinstance(mask, Tensor) else f"that is a {type(mask)}"
        raise Unsupported(f"an attention mask {shape}: pass a [batch, tokens] padding mask")


def padding_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> Tensor | None:
    """The padding ``[B, tokens]`` as bool, None where there is none; transformers asks before any layer.

    Causality comes from the positions, so no mask of queries times keys is made: each of the
    ``kv_length`` places that the cache has must hold a token. Raises ``Unsupported`` where that
    is not so (a cache with unused places) and for a pattern that is not causal (packed
    sequences, overlays), ``InvalidArgument`` for a mask of another shape.
    """
    if mask_function is not causal_mask_function:
        raise Unsupported(
            "an attention pattern that is not plainly causal (packed sequences or an overlay): pass the"
            " sequences as rows of a padded batch"
        )
    tokens = int(q_offset) + q_length
    if attention_mask is not None:
        rows, covered = attention_mask.shape
        if rows != batch_size:
            raise Unsupported(f"a padding mask of {rows} rows for a batch of {batch_size}: one row for each")
        if covered < tokens:
            raise Unsupported(f"a padding mask for {covered} of {tokens} tokens: cover the cache too")
    if kv_length != tokens or kv_offset:
        raise Unsupported(
            f"{kv_length} places from {kv_offset} on for {tokens} tokens: the mask is longer than the tokens,"
            " or the cache has places that hold none; use a LatentCache or a plain DynamicCache"
        )
    if attention_mask is None or bool(attention_mask[:, :tokens].all()):
        return None
    return attention_mask[:, :tokens].bool()
