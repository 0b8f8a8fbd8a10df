"""A checkpoint of which only config and file contents matter, and damage to what a daemon has on disk."""

from __future__ import annotations

import json
from pathlib import Path

LAYERS = 2
RANK, ROPE = 32, 16
VOCABULARY = 1000

CONFIG = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "hidden_size": 64,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "num_hidden_layers": LAYERS,
    "first_k_dense_replace": LAYERS,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "q_lora_rank": None,
    "kv_lora_rank": RANK,
    "qk_rope_head_dim": ROPE,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 262144,
    "torch_dtype": "bfloat16",
}


def checkpoint(directory: Path, weights: bytes = b"weights") -> Path:
    """Files that name a model."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(CONFIG))
    (directory / "model.safetensors").write_bytes(weights)
    return directory


def damage(data: Path, block: bytes) -> None:
    """Flip a bit of a block in a daemon's payloads."""
    (payloads,) = [file for file in data.rglob("data.mdb") if block in file.read_bytes()]
    with payloads.open("r+b") as file:
        at = len(block) // 2
        file.seek(payloads.read_bytes().find(block) + at)
        file.write(bytes([block[at] ^ 1]))


def damage_first_blocks(data: Path) -> None:
    """Flip bits all over what a daemon's payloads hold, so that the first block of each chain has one."""
    (payloads,) = (data / "payloads").rglob("data.mdb")
    used = len(payloads.read_bytes().rstrip(b"\0"))
    with payloads.open("r+b") as file:
        for at in range(used // 40, used, used // 40):
            file.seek(at)
            (byte,) = file.read(1)
            file.seek(at)
            file.write(bytes([byte ^ 1]))
