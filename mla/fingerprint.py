"""A name for a model's weights, sampled from the weights themselves."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch
from torch import Tensor, nn

from mla.errors import Unsupported

_SAMPLES = 256  # numbers of each tensor; places in each file
_SAMPLE_BYTES = 4096
_WEIGHT_FILES = ("*.safetensors", "*.bin", "*.pt", "*.gguf")


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


def checkpoint_fingerprint(directory: Path) -> str:
    """blake2b-128 (hex) over name, size and an even sample of every weight file in a directory.

    For engines, whose scheduler never holds the weights. Raises ``Unsupported`` when there
    is no weight file.
    """
    files = sorted(path for pattern in _WEIGHT_FILES for path in directory.glob(pattern))
    if not files:
        raise Unsupported(f"{directory} has no weight file to name the weights by: pass the revision by name")
    digest = hashlib.blake2b(digest_size=16, person=b"latentkv-files")
    for path in files:
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            for at in range(0, size, max(_SAMPLE_BYTES, size // _SAMPLES)):
                file.seek(at)
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()
