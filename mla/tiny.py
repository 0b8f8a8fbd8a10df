"""The built-in ``tiny`` model: DeepseekV3 classes, the true 512 + 64 cache geometry, bytes as tokens."""

from __future__ import annotations

import math

import torch
from torch import nn
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

MAX_TOKENS = 1 << 18


def tiny_config() -> DeepseekV3Config:
    """4 layers (the first dense, three MoE), 4 heads, hidden size 256, a token for each byte."""
    return DeepseekV3Config(
        vocab_size=256,
        hidden_size=256,
        intermediate_size=512,
        moe_intermediate_size=128,
        num_hidden_layers=4,
        first_k_dense_replace=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_shared_experts=1,
        n_group=2,
        topk_group=1,
        q_lora_rank=128,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        qk_nope_head_dim=32,
        v_head_dim=32,
        max_position_embeddings=MAX_TOKENS,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )


def tiny_model(seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> DeepseekV3ForCausalLM:
    """The model in eval mode, with random weights that ``seed`` and the names alone determine.

    Scaled so that attention picks out tokens instead of averaging: what lies far back
    changes the logits.
    """
    model = DeepseekV3ForCausalLM(tiny_config())
    fill_weights(model, seed)
    nn.Module.to(model, dtype)
    nn.Module.eval(model)
    return model


@torch.no_grad()
def fill_weights(model: nn.Module, seed: int) -> None:
    """Random weights, made on the device of each, that ``seed`` and the names alone determine."""
    for index, (name, weight) in enumerate(sorted(model.named_parameters())):
        if weight.dim() > 1:
            generator = torch.Generator(weight.device).manual_seed(seed * 10_007 + index)
            noise = torch.randn(weight.shape, generator=generator, device=weight.device)
            weight.copy_(noise * (_gain(name, weight) / math.sqrt(weight.shape[-1])))


def _gain(name: str, weight: nn.Parameter) -> float:
    if "embed_tokens" in name:
        return math.sqrt(weight.shape[-1])  # unit variance: a row is looked up, not summed over
    return 2.0 if "q_b_proj" in name or "q_proj" in name or "o_proj" in name else 1.0
