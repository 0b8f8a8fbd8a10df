"""What changes a model's computation from outside of its modules: refused, since no name can hold it.

A hook may add a vector to a layer's output, and then the layer's latents are another model's. So
hooks and replaced methods are refused before anything is computed. Left alone are those of
transformers, which record, and of accelerate, which move weights. Hooks on the input embedding, and
torch's on every module, may watch: counters and profilers do. That they change nothing is seen at
each call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from mla.describing import root
from mla.errors import Unsupported

_OURS = ("transformers", "mla")  # functions of these may be hooks
_MOVERS = frozenset({"AlignDevicesHook", "CpuOffload", "UserCpuOffloadHook"})  # of accelerate
_ADVICE = "remove it, or generate without a session"


def refuse_steering(modules: Mapping[str, nn.Module], embedding: nn.Module) -> None:
    """Raises ``Unsupported`` for modules whose computation somebody has changed from outside.

    ``modules`` are a model's by path. Hooks on ``embedding`` and on every module of the process
    are for ``only_watched``.
    """
    for path, module in modules.items():
        where = path or "the model"
        if module is not embedding:
            _refuse_hooks(where, (*module._forward_pre_hooks.values(), *module._forward_hooks.values()))
        _refuse_methods(where, module)
        _refuse_dropout(where, module)
        if vars(module).get("_is_prompt_learning"):  # PEFT's own name for it
            raise Unsupported(
                f"{where} puts learned tokens or keys before each prompt (PEFT's prompt learning): they are"
                " no tokens, so latents behind them cannot be shared"
            )


def _refuse_hooks(where: str, hooks: Iterable[object]) -> None:
    for hook in hooks:
        if not _is_ours(hook):
            raise Unsupported(
                f"{where} has a forward hook, {_name(hook)}, which may change what the model computes"
                f" without its weights' name saying so: {_ADVICE}"
            )


def _refuse_methods(where: str, module: nn.Module) -> None:
    """Methods replaced on the instance; our own and accelerate's are known."""
    own = vars(module)
    if (hook := own.get("_hf_hook")) is not None and not _moves(hook):
        raise Unsupported(f"{where} has accelerate's hook {_name(hook)}, which may change numbers: {_ADVICE}")
    for name, value in own.items():
        if not callable(value) or not _is_method(type(module), name):
            continue
        if not _is_ours(value) and not (name == "forward" and _is_moving(own)):
            raise Unsupported(
                f"{where} has a {name} of its own, {_name(value)}, in place of its class's; what it computes"
                f" is not in the weights' name: {_ADVICE}"
            )


def _is_method(kind: type, name: str) -> bool:
    return any(isinstance(vars(base).get(name), FunctionType) for base in kind.__mro__)


def _refuse_dropout(where: str, module: nn.Module) -> None:
    if module.training and isinstance(module, torch.nn.modules.dropout._DropoutNd) and module.p > 0:
        raise Unsupported(f"{where} drops numbers at random (p={module.p}): call model.eval() first")


def _is_ours(hook: object) -> bool:
    function = hook.__func__ if isinstance(hook, MethodType) else hook
    return isinstance(function, FunctionType) and root(function.__module__) in _OURS


def _moves(hook: object) -> bool:
    """Whether an accelerate hook only moves weights and inputs between devices."""
    kind = type(hook)
    if root(kind.__module__) != "accelerate":
        return False
    if kind.__name__ == "SequentialHook":
        return all(_moves(one) for one in vars(hook)["hooks"])
    return kind.__name__ in _MOVERS


def _is_moving(own: Mapping[str, Any]) -> bool:
    """Whether a module's ``forward`` is what accelerate put around the class's own."""
    forward, before = own["forward"], own.get("_old_forward")
    function = forward.func if isinstance(forward, partial) else forward
    return (
        isinstance(function, FunctionType)
        and root(function.__module__) == "accelerate"
        and isinstance(before, MethodType)
        and before.__func__ is _class_forward(type(before.__self__))
    )


def _class_forward(kind: type) -> object:
    return next((vars(base)["forward"] for base in kind.__mro__ if "forward" in vars(base)), None)


def _name(value: object) -> str:
    if isinstance(value, FunctionType | MethodType):
        return f"{value.__module__}.{value.__qualname__}"
    return f"a {type(value).__module__}.{type(value).__qualname__}"


@contextmanager
def only_watched(embedding: nn.Module) -> Iterator[None]:
    """While it is open, hooks on ``embedding`` and on every module may look at numbers, not change them.

    One that does raises ``Unsupported`` inside of the call, so nothing that follows from it is kept.
    """
    tables: tuple[tuple[dict[int, Any], int], ...] = (
        (torch_module._global_forward_pre_hooks, 0),
        (torch_module._global_forward_hooks, -1),
        (embedding._forward_pre_hooks, 0),
        (embedding._forward_hooks, -1),
    )
    guarded = [(table, at, number, hook) for table, at in tables for number, hook in table.items()]
    try:
        for table, at, number, hook in guarded:
            table[number] = _Guard(hook, at)
        yield
    finally:
        for table, _, number, hook in guarded:
            if number in table:  # it may have been removed meanwhile
                table[number] = hook


class _Guard:
    """A hook that is called as before, and whose tensors are compared before and after."""

    def __init__(self, hook: Callable[..., Any], at: int) -> None:
        """``at``: where among its arguments is what its answer would replace."""
        self._hook = hook
        self._at = at

    def __call__(self, module: nn.Module, *seen: Any) -> None:
        before = [(tensor, tensor.clone()) for tensor in _tensors(seen)]
        given = self._hook(module, *seen)
        if not (given is None or given is seen[self._at]) or not all(_same(*pair) for pair in before):
            raise Unsupported(
                f"a hook, {_name(self._hook)}, changes what a {type(module).__name__} computes, so that the"
                f" model is another than its weights' name says: {_ADVICE}"
            )


def _tensors(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from (tensor for one in value.values() for tensor in _tensors(one))
    elif isinstance(value, list | tuple):
        yield from (tensor for one in value for tensor in _tensors(one))


def _same(tensor: Tensor, copy: Tensor) -> bool:
    """Bit by bit, for NaN is no other than itself."""
    return tensor.shape == copy.shape and torch.equal(
        tensor.contiguous().view(torch.uint8), copy.contiguous().view(torch.uint8)
    )
