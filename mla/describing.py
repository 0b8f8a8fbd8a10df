"""A model in words: its modules, their classes, and all that they hold beside parameters and buffers.

An adapter's scaling, which adapters are active, an expert count, a constant that somebody changed: what
a module computes depends on plain attributes too, and no state dict has those. Here they are
written down so that two models with equal words and equal tensors compute the same.
"""

from __future__ import annotations

import enum
import hashlib
import logging
import sys
import threading
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, MethodWrapperType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers import PreTrainedConfig, PreTrainedModel

from mla.errors import Unsupported
from mla.numerics import config_digest

# Packages whose code is known by its name. Other code is told apart by what it does.
_KNOWN = frozenset({"torch", "transformers", "peft", "accelerate", "mla", "numpy"})
_PLAIN_TENSORS = (Tensor, nn.Parameter, nn.Buffer)
_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.Size, np.generic)
# Where a tensor lies, and what only serves the process, says nothing about the computation.
_IDLE = (
    torch.device,
    torch.Generator,
    logging.Logger,
    type(threading.Lock()),
    type(threading.RLock()),
    weakref.ReferenceType,
)
# What torch keeps on every module.
_MACHINERY = frozenset(vars(nn.Module())) - {"training"}
# Bookkeeping of transformers, accelerate and PEFT: where weights came from and where they lie.
_BOOKKEEPING = frozenset(
    {
        "config",
        "generation_config",
        "name_or_path",
        "warnings_issued",
        "all_tied_weights_keys",
        "hf_device_map",
        "hf_quantizer",
        "gradient_checkpointing",
        "is_gradient_checkpointing",
        "kernel_config",
        "loss_type",
        "peft_config",  # what matters of it (rank, scaling, names) is in each layer
        "_peft_config",
        "_is_hf_initialized",
        "_hf_hook",  # moves weights and inputs, or is refused
        "_old_forward",
        "_compiled_call_impl",
        "prepare_inputs_for_generation",  # which PEFT puts back onto the instance
    }
)
_UNTOLD = _MACHINERY | _BOOKKEEPING


def root(name: str | None) -> str:
    """The package of a dotted name."""
    return (name or "").partition(".")[0]


def is_known(package: str) -> bool:
    """Whether code of a package is known by its name."""
    return package in _KNOWN or package == "builtins" or package in sys.stdlib_module_names


@dataclass
class Description:
    """What ``describe`` found. ``tensors`` has parameters, buffers and plain tensors by their path."""

    lines: list[str] = field(default_factory=list)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    modules: dict[str, nn.Module] = field(default_factory=dict)  # each once

    def digest(self) -> str:
        """blake2b-64 (hex) of the words; the tensors are not in it."""
        return hashlib.blake2b("\n".join(self.lines).encode(), digest_size=8).hexdigest()


def describe(model: nn.Module) -> Description:
    """Every module of a model. Raises ``Unsupported`` for an attribute that has no words."""
    writer = _Writer()
    writer.module("", model)
    writer.classes()
    return writer.found


class _Writer:
    def __init__(self) -> None:
        self.found = Description()
        self._seen: dict[int, str] = {}
        self._kept: list[object] = []  # so that no two objects have one id
        self._classes: dict[type, None] = {}

    def module(self, path: str, module: nn.Module) -> None:
        if self._again(path, module):
            return
        if isinstance(module, torch.jit.ScriptModule):
            raise Unsupported(
                f"{_at(path)} is a script: what it computes cannot be named; use the module itself"
            )
        self.found.modules[path] = module
        self._write(path, self._class(type(module)))
        own = vars(module)
        for name, tensor in (module._parameters | module._buffers).items():
            if tensor is not None:
                self._tensor(_join(path, name), tensor)
        stock = isinstance(module, PreTrainedModel) and root(type(module).__module__) == "transformers"
        for name, value in own.items():
            if name not in _UNTOLD and not (stock and _is_private(name, value)):
                self.value(_join(path, name), value)
        for name, child in module._modules.items():
            if child is not None:
                self.module(_join(path, name), child)

    def value(self, path: str, value: object) -> None:
        """An attribute, with all that it holds."""
        if isinstance(value, enum.Enum):
            self._write(path, f"{self._class(type(value))}.{value.name}")
        elif isinstance(value, _PLAIN):
            self._write(path, f"{type(value).__name__} {value!r}")
        elif isinstance(value, _IDLE):
            self._write(path, type(value).__name__)
        elif isinstance(value, Tensor):
            self._tensor(path, value)
        elif isinstance(value, nn.Module):
            self.module(path, value)
        elif isinstance(value, PreTrainedConfig):
            self._write(path, config_digest(value))
        elif isinstance(value, np.ndarray):
            self._write(path, f"{value.dtype} {value.shape} {hashlib.blake2b(value.tobytes()).hexdigest()}")
        elif isinstance(value, type):
            self._write(path, self._class(value))
        elif not self._again(path, value):
            self._whole(path, value)

    def _whole(self, path: str, value: object) -> None:
        """What may hold further values."""
        if isinstance(value, Mapping):
            self._write(path, f"{type(value).__name__} of {len(value)}")
            for key, one in value.items():
                self.value(f"{path}[{key!r}]", one)
        elif isinstance(value, set | frozenset):
            self._write(path, f"{type(value).__name__} {sorted(map(repr, value))}")
        elif isinstance(value, list | tuple):
            self._write(path, f"{type(value).__name__} of {len(value)}")
            self._each(path, value)
        elif isinstance(value, FunctionType):
            self._function(path, value)
        elif isinstance(value, BuiltinFunctionType | MethodWrapperType | ModuleType):
            self._write(path, f"builtin {value.__name__}")
        elif isinstance(value, MethodType):
            self._each(path, (value.__func__, value.__self__))
        elif isinstance(value, partial):
            self._each(path, (value.func, value.args, value.keywords))
        else:
            self._object(path, value)

    def _each(self, path: str, values: Iterable[object]) -> None:
        for index, one in enumerate(values):
            self.value(f"{path}[{index}]", one)

    def _object(self, path: str, value: object) -> None:
        kind = type(value)
        try:
            own = vars(value)
        except TypeError:
            own = None
        if own is None or root(kind.__module__) == "builtins" or kind.__module__.startswith("torch._C"):
            raise Unsupported(
                f"{_at(path)} is a {kind.__module__}.{kind.__qualname__}: what it does to the computation"
                " cannot be named, so nothing can be shared safely"
            )
        self._write(path, self._class(kind))
        for name, one in own.items():
            self.value(f"{path}.{name}", one)

    def _function(self, path: str, function: FunctionType) -> None:
        name = f"{function.__module__}.{function.__qualname__}"
        code = "" if is_known(root(function.__module__)) else code_digest(function.__code__)
        self._write(path, f"function {name} {code}")
        cells = [cell.cell_contents for cell in function.__closure__ or ()]
        self._each(path, (cells, function.__defaults__, function.__kwdefaults__))

    def _tensor(self, path: str, tensor: Tensor) -> None:
        if type(tensor) in _PLAIN_TENSORS:
            self._write(path, f"tensor {tuple(tensor.shape)} {tensor.dtype}")
            self.found.tensors[path] = tensor
            return
        self._write(path, f"{self._class(type(tensor))} {tuple(tensor.shape)} {tensor.dtype}")
        if is_traceable_wrapper_subclass(tensor):  # such as torchao's: scales and numbers side by side
            names, context = tensor.__tensor_flatten__()
            self.value(f"{path}.context", context)
            for name in names:
                self._tensor(_join(path, name), attrgetter(name)(tensor))
            return
        self.found.tensors[path] = tensor
        for name, value in vars(tensor).items():  # such as the state of a quantised weight
            self.value(f"{path}.{name}", value)

    def _class(self, kind: type) -> str:
        self._classes[kind] = None
        return f"{kind.__module__}.{kind.__qualname__}"

    def classes(self) -> None:
        """The code of classes that are known by no package's name, and of methods put into those that are."""
        for kind in list(self._classes):
            for base in kind.__mro__:
                if base in (nn.Module, object):
                    continue
                for name, value in vars(base).items():
                    self._method(f"class {base.__module__}.{base.__qualname__}.{name}", base, value)

    def _method(self, path: str, base: type, value: object) -> None:
        if isinstance(value, property):
            for one in (value.fget, value.fset):
                self._method(path, base, one)
        elif isinstance(value, classmethod | staticmethod):
            self._method(path, base, value.__func__)
        elif isinstance(value, FunctionType):
            if not is_known(root(value.__module__)):
                self._write(path, code_digest(value.__code__))
            elif value.__module__ != base.__module__:
                self._write(path, f"{value.__module__}.{value.__qualname__}")

    def _again(self, path: str, value: object) -> bool:
        if id(value) in self._seen:
            self._write(path, f"is {self._seen[id(value)]}")
            return True
        self._seen[id(value)] = path
        self._kept.append(value)
        return False

    def _write(self, path: str, words: str) -> None:
        self.found.lines.append(f"{path} {words}")


def code_digest(code: CodeType) -> str:
    """blake2b-64 (hex) of what a function does, wherever its file lies."""
    digest = hashlib.blake2b(digest_size=8)
    digest.update(code.co_code)
    digest.update(repr((code.co_names, code.co_freevars)).encode())
    for constant in code.co_consts:
        digest.update((code_digest(constant) if isinstance(constant, CodeType) else repr(constant)).encode())
    return digest.hexdigest()


def _is_private(name: str, value: Any) -> bool:
    # The root of a stock model computes nothing of its own; its private names are bookkeeping.
    return name.startswith("_") and not isinstance(value, Tensor)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _at(path: str) -> str:
    return path or "the model"
