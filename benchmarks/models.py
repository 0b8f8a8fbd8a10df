"""The model under test: the built-in tiny one, random weights at a real geometry, or a checkpoint."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    PreTrainedModel,
)

from benchmarks.documents import Tokenize
from benchmarks.options import BenchmarkError
from kvstore.errors import InvalidArgument
from mla import ModelInfo, Unsupported, inspect_model
from mla.models import NamedModel, bytes_as_tokens, load_checkpoint, load_tiny, open_device
from mla.tiny import fill_weights

V2_LITE = "deepseek-v2-lite"


@dataclass(frozen=True)
class Subject:
    """A model, what it caches, and how it reads text."""

    name: str
    model: PreTrainedModel
    info: ModelInfo
    tokenize: Tokenize

    def require_positions(self, tokens: int) -> None:
        """Raises ``BenchmarkError`` for a document that the model has no positions for."""
        limit = int(self.model.config.max_position_embeddings)
        if tokens >= limit:
            raise BenchmarkError(
                f"--tokens {tokens}: the model has {limit} positions, one for the answer; ask for less"
            )


def load_subject(checkpoint: Path | None, device: str | None) -> Subject:
    """The model of a run. Raises ``BenchmarkError`` for a checkpoint that cannot be used."""
    logging.getLogger("transformers").setLevel(logging.ERROR)  # sampling options that a greedy run ignores
    try:
        target = open_device(device)
    except InvalidArgument as error:
        raise BenchmarkError(str(error)) from None
    if checkpoint is None:
        return _subject(load_tiny(target))
    if str(checkpoint) == V2_LITE and not checkpoint.exists():
        return random_subject(V2_LITE, v2_lite_config(), target)
    try:
        return _subject(load_checkpoint(checkpoint, target))
    except (OSError, ValueError, Unsupported, KeyError) as error:
        line = str(error).strip().partition("\n")[0]
        raise BenchmarkError(f"--model {checkpoint}: {line}") from None


def _subject(named: NamedModel) -> Subject:
    return Subject(named.name, named.model, inspect_model(named.model), named.tokenize)


def v2_lite_config() -> DeepseekV2Config:
    """DeepSeek-V2-Lite: 27 layers, 16 heads, 64 experts; 15.7 billion weights, 31 GB in bf16."""
    yarn = {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 40.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
    }
    return DeepseekV2Config(
        hidden_size=2048,
        intermediate_size=10944,
        moe_intermediate_size=1408,
        num_hidden_layers=27,
        first_k_dense_replace=1,
        num_attention_heads=16,
        num_key_value_heads=16,
        num_experts_per_tok=6,
        q_lora_rank=None,
        max_position_embeddings=163840,
        rope_parameters=yarn,
        bos_token_id=None,
        eos_token_id=None,
    )


def random_subject(name: str, config: DeepseekV2Config, device: torch.device) -> Subject:
    """A model in bf16 with random weights, made on the device; it reads bytes as tokens."""
    with device:  # never whole on the host
        model: PreTrainedModel = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            config, dtype=torch.bfloat16
        )
    fill_weights(model, seed=0)
    nn.Module.eval(model)
    return Subject(name, model, inspect_model(model), bytes_as_tokens)
