"""A name for a model's weights, from every number of them: those in a process, and a checkpoint's files."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from torch import Tensor, nn

from mla.describing import describe
from mla.errors import Unsupported
from mla.file_sums import checkpoint_fingerprint
from mla.tensor_sums import tensor_sums

__all__ = ["checkpoint_fingerprint", "fingerprint", "require_data", "weights_fingerprint"]


def weights_fingerprint(model: nn.Module) -> str:
    """blake2b-128 (hex) over name, shape, dtype and every number of every tensor of a model.

    Parameters, buffers (those that are not saved too) and tensors that are plain attributes. Equal
    for equal weights on any device. Read anew with each call; ``mla.weights.Weights``
    remembers. Raises ``Unsupported`` when a tensor has no data here (offloaded or on "meta").
    """
    tensors = describe(model).tensors
    require_data(tensors)
    unique = {id(tensor): tensor for tensor in tensors.values()}  # tied ones are read once
    sums = dict(zip(unique, tensor_sums(list(unique.values())), strict=True))
    return fingerprint(tensors, [sums[id(tensor)] for tensor in tensors.values()])


def require_data(tensors: Mapping[str, Tensor]) -> None:
    """Raises ``Unsupported`` for a tensor on "meta"."""
    for name, tensor in tensors.items():
        if tensor.device.type == "meta":
            raise Unsupported(
                f"weight {name} has no data on this machine's devices: pass the revision by name"
            )


def fingerprint(tensors: Mapping[str, Tensor], sums: list[bytes]) -> str:
    """The name that follows from tensors by their path, and their sums in the same order."""
    digest = hashlib.blake2b(digest_size=16, person=b"latentkv-weights")
    for (name, tensor), one in sorted(zip(tensors.items(), sums, strict=True), key=lambda pair: pair[0][0]):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode() + one)
    return digest.hexdigest()
