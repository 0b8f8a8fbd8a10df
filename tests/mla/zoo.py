"""Small random models of every served class, and how the tests run them."""

import math
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from mla import LatentCache, LatentPool
from mla.adapters.transformers import cache_argument

MLA = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 20,
    "max_position_embeddings": 4096,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
MOE = {"moe_intermediate_size": 32, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1}
GROUPS = {"n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 1024,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "short_factor": [1.0] * 8,
    "long_factor": [2.0] * 8,
    "original_max_position_embeddings": 1024,
}
_LONGCAT = {k: v for k, v in MLA.items() if k not in ("intermediate_size", "num_hidden_layers")} | {
    "num_layers": 1,
    "head_dim": 16,
    "ffn_hidden_size": 96,
    "expert_ffn_hidden_size": 32,
    "n_routed_experts": 4,
    "moe_topk": 2,
    "zero_expert_num": 2,
}

# name of the class in transformers without "Config" / "ForCausalLM", and its config
MODELS = {
    "deepseek_v2": ("DeepseekV2", MLA | MOE | {"first_k_dense_replace": 1, "topk_method": "greedy"}),
    "deepseek_v2_no_q_lora": ("DeepseekV2", MLA | MOE | {"q_lora_rank": None, "topk_method": "greedy"}),
    "deepseek_v3": ("DeepseekV3", MLA | MOE | GROUPS),
    "deepseek_v3_yarn": ("DeepseekV3", MLA | MOE | GROUPS | {"rope_parameters": YARN}),
    "deepseek_v3_plain_rope": ("DeepseekV3", MLA | MOE | GROUPS | {"rope_interleave": False}),
    "glm4_moe_lite": ("Glm4MoeLite", MLA | MOE | {"mlp_layer_types": ["dense", "sparse"]}),
    "youtu": ("Youtu", MLA),
    "mistral4": ("Mistral4", MLA | MOE | GROUPS),
    "minicpm3": ("MiniCPM3", MLA),
    "minicpm3_longrope": ("MiniCPM3", MLA | {"rope_parameters": LONGROPE}),
    "axk1": ("AXK1", MLA | MOE | GROUPS),
    "longcat_flash": ("LongcatFlash", _LONGCAT),
}


def build(name: str, **changes) -> PreTrainedModel:
    """A fp32 model in eval mode whose attention picks tokens out instead of averaging."""
    family, config = MODELS[name]
    config_class = getattr(transformers, f"{family}Config")
    model = getattr(transformers, f"{family}ForCausalLM")(config_class(**config | changes))
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for key, weight in sorted(model.named_parameters()):
            noise = torch.randn(weight.shape, generator=generator)
            if weight.dim() > 1:
                gain = 8.0 if "embed" in key else 1.5
                weight.copy_(noise * gain / math.sqrt(weight.shape[-1]))
            else:
                weight.add_(0.1 * noise)
    return model.eval()


def tokens(count: int, seed: int = 0, rows: int = 1, vocab: int = 128) -> Tensor:
    return torch.randint(0, vocab, (rows, count), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def forward(model: PreTrainedModel, ids: Tensor, cache=None, **kwargs) -> Tensor:
    """Logits ``[B, S, vocab]``."""
    return model(ids, **{cache_argument(model): cache}, **kwargs).logits


def move_blocks(pool: LatentPool, blocks: list[int]) -> list[int]:
    """Copies of blocks at other, shuffled places, through their bytes as a store would move them."""
    order = torch.randperm(len(blocks), generator=torch.Generator().manual_seed(3)).tolist()
    fresh = pool.allocate(len(blocks))
    targets = [fresh[i] for i in order]
    for source, target in zip(blocks, targets, strict=True):
        data = memoryview(bytearray(pool.layout.block_bytes))
        pool.read_blocks([source], [data], pool.mark())
        pool.write_block(target, data.toreadonly())
    return targets


def loaded_prefix(model: PreTrainedModel, pool: LatentPool, ids: Tensor, length: int) -> LatentCache:
    """A cache over moved copies of the blocks that a first request left for ``ids[:, :length]``."""
    with LatentCache(pool) as first:
        forward(model, ids[:, :length], first)
        return LatentCache.from_prefix(pool, move_blocks(pool, first.block_table()), length)


def relative(got: Tensor, want: Tensor) -> float:
    return float((got - want).abs().max() / want.abs().max())


def save_checkpoint(name: str, directory: Path) -> None:
    """A model and a tokenizer that knows every byte as a token of its own, where they can be loaded from."""
    build(name, vocab_size=256).save_pretrained(directory)
    byte_tokenizer().save_pretrained(directory)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Every byte is a token; the marks, digits and letters of ASCII are the first 94 of the 256."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: index for index, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)
