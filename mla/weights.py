"""The name of what a model computes, asked for before each request and remembered between them."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass

from torch import Tensor, nn
from transformers import PreTrainedModel

from mla.describing import Description, describe, root
from mla.fingerprint import fingerprint, require_data
from mla.numerics import config_digest
from mla.steering import only_watched, refuse_steering
from mla.tensor_sums import size_of, tensor_sums

log = logging.getLogger(__name__)

# What of the weights is read again before each request, though nothing says that it has changed.
CHECKED_BYTES = 32 << 20
CHECKED_SHARE = 16  # at least one part in so many
_LEAST = 128 << 10  # bytes that a tensor counts for, since to look at it takes a while too
_STOCK = ("torch", "transformers", "transformers_modules")  # packages whose modules a checkpoint fills
_REPLACED = "base_layer"  # PEFT's name for the module that an adapter stands in place of


@dataclass(frozen=True, slots=True)
class _State:
    """Of a tensor, when it was read; equal unless it was written to or replaced."""

    tensor: weakref.ref[Tensor]
    version: int
    place: int

    @classmethod
    def of(cls, tensor: Tensor) -> _State | None:
        """None for tensors made in inference mode, which count no versions."""
        if tensor.is_inference():
            return None
        return cls(weakref.ref(tensor), tensor._version, tensor.data_ptr())

    def holds(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` is the one that was read, as it was."""
        if self.tensor() is not tensor or tensor.is_inference():
            return False
        return self.version == tensor._version and self.place == tensor.data_ptr()


class _Sums:
    """Sums of tensors, remembered by their versions.

    Writes through ``tensor.data`` count no version. Therefore some of the tensors are read
    again with each call, in turn; one that differs has all of them read.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[_State, bytes]] = {}
        self._turn = 0

    def forget(self) -> None:
        """Read all of them with the next call."""
        self._known.clear()

    def of(self, tensors: list[Tensor]) -> list[bytes]:
        """The sum of each."""
        unique = {id(tensor): tensor for tensor in tensors}
        again = [t for t in self._in_turn(list(unique.values())) if self._is_known(t)]
        before = [self._known[id(tensor)][1] for tensor in again]
        if tensor_sums(again) != before:
            log.warning("weights were written to through .data, which no version tells: all are read again")
            self.forget()
        missing = [tensor for tensor in unique.values() if not self._is_known(tensor)]
        states = [_State.of(tensor) for tensor in missing]
        read = dict(zip(map(id, missing), tensor_sums(missing), strict=True))
        sums = [read.get(id(t)) or self._known[id(t)][1] for t in tensors]
        self._known = {name: known for name, known in self._known.items() if name in unique}
        for tensor, state in zip(missing, states, strict=True):
            self._known.pop(id(tensor), None)
            if state is not None:
                self._known[id(tensor)] = (state, read[id(tensor)])
        return sums

    def _is_known(self, tensor: Tensor) -> bool:
        known = self._known.get(id(tensor))
        return known is not None and known[0].holds(tensor)

    def _in_turn(self, tensors: list[Tensor]) -> Iterator[Tensor]:
        budget = max(CHECKED_BYTES, sum(map(size_of, tensors)) // CHECKED_SHARE)
        for _ in tensors:
            if budget <= 0:
                return
            tensor = tensors[self._turn % len(tensors)]
            self._turn += 1
            budget -= max(size_of(tensor), _LEAST)
            yield tensor


class Weights:
    """Names a model's weights, modules and config as they are now.

    ``revision`` names the weights in place of their numbers: then only what adapters add to
    them is read, and the rest only once it has changed.
    """

    def __init__(self, model: PreTrainedModel, revision: str | None) -> None:
        self._model = model
        self._revision = revision
        self._sums = _Sums()
        self._words = ""
        self._named: dict[int, _State | None] | None = None  # weights that the revision names
        if revision is not None:
            log.info("the weights are named %r by whoever opened the session; they are not read", revision)

    def name(self) -> str:
        """For ``Namespace.revision``. Raises ``Unsupported`` for a model that no name can hold."""
        found = describe(self._model)
        refuse_steering(found.modules, self._model.get_input_embeddings())
        words = found.digest()
        if words != self._words:  # merging an adapter, say, writes to weights through .data
            self._words = words
            self._sums.forget()
        return f"{self._weights(found)} modules {words} config {config_digest(self._model.config)}"

    def read_again(self) -> None:
        """Have every number read before the next request."""
        self._sums.forget()

    def only_watched(self) -> AbstractContextManager[None]:
        """For the computation: hooks on the input embedding may watch it, and nothing else."""
        return only_watched(self._model.get_input_embeddings())

    def _weights(self, found: Description) -> str:
        tensors = found.tensors
        if self._revision is None:
            return self._fingerprint(tensors)
        added = _added(found)
        named = {name: tensor for name, tensor in tensors.items() if name not in added}
        if self._named is None:
            self._named = {id(tensor): _State.of(tensor) for tensor in named.values()}
        if not all(self._is_named(tensor) for tensor in named.values()):
            return f"{self._revision} changed {self._fingerprint(tensors)}"
        return f"{self._revision} adapters {self._fingerprint(added)}" if added else self._revision

    def _is_named(self, tensor: Tensor) -> bool:
        if tensor.device.type == "meta":  # offloaded: fetched anew with each call
            return True
        assert self._named is not None
        if id(tensor) not in self._named:
            return False
        state = self._named[id(tensor)]
        return state is None or state.holds(tensor)

    def _fingerprint(self, tensors: dict[str, Tensor]) -> str:
        require_data(tensors)
        return fingerprint(tensors, self._sums.of(list(tensors.values())))


def _added(found: Description) -> dict[str, Tensor]:
    """Tensors of modules that no revision of a checkpoint can mean: an adapter's, a stranger's."""
    return {name: tensor for name, tensor in found.tensors.items() if _is_added(name, found.modules)}


def _is_added(name: str, modules: Mapping[str, nn.Module]) -> bool:
    path, _, part = name.rpartition(".")
    while path:
        module = modules.get(path)
        if isinstance(module, PreTrainedModel):  # what stands around it adds nothing to its layers
            return False
        if module is not None and root(type(module).__module__) not in _STOCK and part != _REPLACED:
            return True
        path, _, part = path.rpartition(".")
    return False
