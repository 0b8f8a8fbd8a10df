"""What the bits of a latent depend on besides tokens and weights."""

from __future__ import annotations

import hashlib
import json
import platform
from functools import cache
from pathlib import Path

import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel

ATTENTION_VERSION = 1  # raise it with every change to the arithmetic of the attention

# Entries of a config that say nothing about the computation.
_IDLE_ENTRIES = {"transformers_version", "architectures", "dtype", "use_cache", "id2label", "label2id"}
_CPU_LINES = ("model name", "flags", "cache size", "CPU implementer", "CPU part", "Features")


def config_digest(config: PreTrainedConfig) -> str:
    """blake2b-64 (hex) of a config: equal weights with, say, other experts a token make other latents."""
    entries = {
        name: value
        for name, value in config.to_dict().items()
        if not name.startswith("_") and name not in _IDLE_ENTRIES
    }
    text = json.dumps(entries, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def numerics(prefill_chunk: int, model: PreTrainedModel) -> str:
    """Text that is equal only where an exact session makes bit-identical blocks; ``Namespace.numerics``.

    Chunk length, versions of torch, transformers and our attention, device, instruction
    set, thread count, and the settings of torch that choose or round products. To be asked
    anew for each request, since some of it can change in between.
    """
    device = model.device
    parts = (
        f"chunk {prefill_chunk}",
        f"torch {torch.__version__}",
        f"transformers {transformers.__version__}",
        f"attention {ATTENTION_VERSION}",
        f"experts {model.config._experts_implementation}",
        _cuda(device) if device.type == "cuda" else _cpu(),
        f"matmul {torch.get_float32_matmul_precision()}",
        f"deterministic {torch.are_deterministic_algorithms_enabled()}",
        _autocast(device.type),
    )
    return "; ".join(parts)


def _cuda(device: torch.device) -> str:
    reduced = torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
    return f"{torch.cuda.get_device_name(device)} cuda {torch.version.cuda} bf16 reduction {reduced}"


def _cpu() -> str:
    isa = torch.backends.cpu.get_cpu_capability()
    threads = torch.get_num_threads()
    return (
        f"{platform.machine()} {isa} {_processor()} threads {threads} mkldnn {torch.backends.mkldnn.enabled}"
    )


@cache
def _processor() -> str:
    # Torch's instruction set is too coarse: kernels are chosen by AMX, bf16 products and cache sizes too.
    try:
        first = Path("/proc/cpuinfo").read_text().partition("\n\n")[0]
    except OSError:
        return platform.processor()
    lines = [line for line in first.splitlines() if line.startswith(_CPU_LINES)]
    return hashlib.blake2b("\n".join(lines).encode(), digest_size=8).hexdigest()


def _autocast(device_type: str) -> str:
    if not torch.is_autocast_enabled(device_type):
        return "autocast off"
    return f"autocast {torch.get_autocast_dtype(device_type)}"
