"""What the bits of a latent depend on besides tokens and weights: the key of exact mode."""

from __future__ import annotations

import platform

import torch

ATTENTION_VERSION = 1  # raise it with every change to the arithmetic of the attention


def numerics(prefill_chunk: int, device: torch.device) -> str:
    """Text that is equal only where an exact session makes bit-identical blocks.

    Chunk length, torch version, device, instruction set, thread count and the version of
    our attention.
    """
    if device.type == "cuda":
        where = f"{torch.cuda.get_device_name(device)} cuda {torch.version.cuda}"
    else:
        isa = torch.backends.cpu.get_cpu_capability()
        where = f"{platform.machine()} {isa} threads {torch.get_num_threads()}"
    parts = (f"chunk {prefill_chunk}", f"torch {torch.__version__}", device.type, where)
    return "; ".join((*parts, f"attention {ATTENTION_VERSION}"))
