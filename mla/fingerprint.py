"""A name for a model's weights, sampled from the weights themselves."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn

from mla.errors import Unsupported

_SAMPLES = 256  # numbers of each tensor


def weights_fingerprint(model: nn.Module) -> str:
    """blake2b-128 (hex) over name, shape, dtype and an even sample of every tensor of the state dict.

    Equal for equal weights on any device; for ``Namespace.revision``. Raises
    ``Unsupported`` when a tensor has no data here (offloaded or on "meta").
    """
    digest = hashlib.blake2b(digest_size=16, person=b"latentkv-weights")
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
        if tensor.device.type == "meta":
            raise Unsupported(
                f"weight {name} has no data on this machine's devices: pass the revision by name"
            )
        digest.update(_sample(tensor))
    return digest.hexdigest()


def _sample(tensor: Tensor) -> bytes:
    flat = tensor.detach().reshape(-1)
    step = max(1, flat.numel() // _SAMPLES)
    return flat[::step].contiguous().cpu().view(torch.uint8).numpy().tobytes()
