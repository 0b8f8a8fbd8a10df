"""A checkpoint of which only config and file contents matter, and damage to what a daemon has on disk."""

from __future__ import annotations

import json
import mmap
from contextlib import closing
from pathlib import Path

from kvstore.checking import check
from kvstore.records import CheckedCatalog, Records

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
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "q_lora_rank": None,
    "kv_lora_rank": RANK,
    "qk_rope_head_dim": ROPE,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 524288,
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


def damage_block(data: Path, depth: int) -> None:
    """Flip a bit of one block of a daemon that is down: of those at this depth, the one stored first."""
    file = data / "catalog" / "data.mdb"
    with closing(CheckedCatalog.open(file.parent, file.stat().st_size)) as catalog:
        blocks = [block for block in Records(catalog).blocks.values() if block.depth == depth]
    block = min(blocks, key=lambda block: block.place)
    (payloads,) = (data / "payloads").rglob("data.mdb")
    at = block.page * mmap.PAGESIZE + block.length // 2
    with payloads.open("r+b") as bytes_on_disk:
        bytes_on_disk.seek(at)
        (byte,) = bytes_on_disk.read(1)
        bytes_on_disk.seek(at)
        bytes_on_disk.write(bytes([byte ^ 1]))
    faults = check(data).faults
    assert [(fault.kind, fault.subject) for fault in faults] == [("payload_wrong", block.hash.hex())]
