"""The model under test: the built-in tiny one, or a Hugging Face checkpoint."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from benchmarks.documents import Tokenize, Tokens
from benchmarks.options import BenchmarkError
from kvstore.errors import InvalidArgument
from kvstore.layout import LatentLayout
from mla import ModelInfo, Unsupported, inspect_model
from mla.tiny import tiny_model


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
    target = _device(device)
    if checkpoint is None:
        return _tiny(target)
    try:
        return _checkpoint(checkpoint, target)
    except (OSError, ValueError, Unsupported, KeyError) as error:
        line = str(error).strip().partition("\n")[0]
        raise BenchmarkError(f"--model {checkpoint}: {line}") from None


def _device(name: str | None) -> torch.device:
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:  # torch without CUDA asserts
        line = str(error).partition("\n")[0]
        raise BenchmarkError(f"--device {name}: {line}; try cpu") from None
    return device


def _tiny(device: torch.device) -> Subject:
    model = tiny_model()
    nn.Module.to(model, device)
    return Subject("tiny", model, inspect_model(model), _bytes_as_tokens)


def _bytes_as_tokens(text: bytes) -> Tokens:
    return np.frombuffer(text, np.uint8).astype(np.uint32)


def _checkpoint(directory: Path, device: torch.device) -> Subject:
    if not (directory / "config.json").is_file():
        raise InvalidArgument("no config.json in it; name the directory of a Hugging Face checkpoint")
    # Before the weights, which may take minutes to read.
    LatentLayout.from_hf_config(AutoConfig.from_pretrained(directory).to_dict())
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(directory, dtype="auto")
    nn.Module.to(model, device)
    nn.Module.eval(model)
    tokenizer: Any = AutoTokenizer.from_pretrained(directory)

    def tokenize(text: bytes) -> Tokens:
        ids = tokenizer(text.decode(errors="replace"), verbose=False)["input_ids"]
        return np.asarray(ids, np.uint32)

    return Subject(directory.resolve().name, model, inspect_model(model), tokenize)
