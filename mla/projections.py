"""Projections of a model, looked at when it is attached: served, or refused by name.

A plain ``nn.Linear`` says by its weight what it does. Anything else (quantised, parametrised,
offloaded, wrapped, handmade) is tried with a few rows. Two things must hold. What a module
makes of a token may depend on that token alone, or blocks would not be what their tokens
say. And ``kv_b_proj`` must be affine, or it could not be absorbed into query and output.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from mla.absorb import is_plain
from mla.errors import Unsupported

# Sums may differ by what a module that rounds each token's activations (int8, fp8) loses.
_ROUNDING = 0.05
_LOUD = 1000.0  # how much larger a neighbour is: a scale shared with it would round the row to nothing
# What a module may raise that does not take plain rows, or lacks a kernel or a package here.
_FAILURES = (
    RuntimeError,
    TypeError,
    ValueError,
    AttributeError,
    AssertionError,
    ImportError,
    LookupError,
    ArithmeticError,
)
_OF_HIDDEN = (".q_proj", ".q_a_proj", ".kv_a_proj_with_mqa")  # they take a token's hidden state
_ADVICE = "load the model with plain weights, or quantise the weights only"


def check_projections(model: PreTrainedModel, attentions: Sequence[nn.Module]) -> None:
    """Raise ``Unsupported`` naming the first module that cannot be served, its class and the reason."""
    names = {module: name for name, module in model.named_modules()}
    _refuse_meta(model)
    for attention in attentions:
        for child, module in attention.named_children():
            _refuse_dtype(f"{names[attention]}.{child}", module, model.dtype)
        up = attention.get_submodule("kv_b_proj")
        if not is_plain(up):
            mla = cast(Any, attention)
            width = int(mla.qk_nope_head_dim) + int(mla.v_head_dim)
            _Trial(names[up], up, model).check_up_projection(int(mla.kv_lora_rank), width)
    for name, module, width in _one_of_each_kind(model):
        _Trial(name, module, model).check_rows(width)


def _refuse_meta(model: nn.Module) -> None:
    # Offloading keeps weights on "meta" too, but replaces `forward` of the module or of one around it.
    moved = {name for name, module in model.named_modules() if "forward" in vars(module)}
    for name, weight in model.named_parameters():
        parts = name.split(".")
        if weight.is_meta and not any(".".join(parts[:end]) in moved for end in range(len(parts))):
            raise Unsupported(f"{name} is on the meta device, without numbers: load the weights first")


def _refuse_dtype(name: str, module: nn.Module, dtype: torch.dtype) -> None:
    if type(module) is nn.Linear and is_plain(module) and module.weight.dtype != dtype:
        raise Unsupported(
            f"{name}.weight is {module.weight.dtype} in a model of {dtype}: cast the whole model to one dtype"
        )


def _one_of_each_kind(model: PreTrainedModel) -> Iterator[tuple[str, nn.Module, int]]:
    # Modules that map rows of a known width, and are no plain nn.Linear.
    seen = set()
    for name, module in model.named_modules():
        of_hidden = model.config.hidden_size if name.endswith(_OF_HIDDEN) else None
        width = vars(module).get("in_features", of_hidden)
        weight = vars(module).get("_parameters", {}).get("weight")
        kind = (type(module), type(weight))
        if isinstance(width, int) and kind != (nn.Linear, nn.Parameter) and kind not in seen:
            seen.add(kind)
            yield name, module, width


class _Trial:
    """A module tried with a few rows."""

    def __init__(self, name: str, module: nn.Module, model: PreTrainedModel) -> None:
        self._name = f"{name} ({type(module).__module__}.{type(module).__qualname__})"
        self._module = module
        tensors = [*module.parameters(), *module.buffers()]
        devices = [tensor.device for tensor in tensors if not tensor.is_meta]
        self._device = devices[0] if devices else model.device
        self._dtype = model.dtype
        self._close = max(1e-3, torch.finfo(model.dtype).eps)

    def check_rows(self, width: int) -> None:
        """Refuse a module that makes of a row what depends on the rows beside it."""
        row, other = self._rows(2, width)
        alone, beside = self._apply(row), self._apply(row, _LOUD * other)[:1]
        if _off(beside, alone) > self._close:
            raise Unsupported(
                f"{self._name} rounds a token by the tokens beside it (as dynamic quantisation of a whole"
                f" batch does), so a cached block would not be what its tokens say: {_ADVICE}"
            )

    def check_up_projection(self, rank: int, width: int) -> None:
        """Refuse what is no affine map of ``rank`` numbers to a multiple of ``width``."""
        row, other = self._rows(2, rank)
        image = self._apply(row)
        if image.shape[-1] % width:
            raise Unsupported(
                f"{self._name} maps {rank} numbers to {image.shape[-1]}, no multiple of {width} (keys and"
                f" values of a head): {_ADVICE}"
            )
        bias = self._apply(torch.zeros_like(row))
        doubled, summed, beside = (self._apply(one) for one in (2 * row, row + other, other))
        far = _off(doubled - bias, 2 * (image - bias)) > self._close
        if far or _off(summed - bias, image + beside - 2 * bias) > _ROUNDING:
            raise Unsupported(f"{self._name} is no linear map, so it cannot be absorbed: {_ADVICE}")
        self.check_rows(rank)

    def _rows(self, count: int, width: int) -> tuple[Tensor, ...]:
        made = torch.randn(count, width, generator=torch.Generator().manual_seed(0))
        return made.to(self._device, self._dtype).tensor_split(count)

    def _apply(self, *rows: Tensor) -> Tensor:
        with torch.no_grad(), torch.autocast(self._device.type, enabled=False):
            try:
                made = self._module(torch.cat(rows))
            except _FAILURES as error:
                line = str(error).partition("\n")[0]
                raise Unsupported(
                    f"{self._name} failed when it was tried with {len(rows)} rows of {self._dtype}"
                    f" ({type(error).__name__}: {line}): {_ADVICE}"
                ) from error
        right = isinstance(made, Tensor) and made.dim() == 2 and made.shape[0] == len(rows)
        if not right or not made.is_floating_point() or not bool(made.isfinite().all()):
            raise Unsupported(f"{self._name} does not make finite rows of real numbers: {_ADVICE}")
        return cast(Tensor, made.float())


def _off(got: Tensor, want: Tensor) -> float:
    # Relative to what is wanted; anything is too much where that is nothing.
    return float((got - want).norm() / want.norm().clamp_min(torch.finfo(want.dtype).tiny))
