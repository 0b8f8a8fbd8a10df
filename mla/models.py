"""A model and its tokenizer by name: the built-in tiny one, or a checkpoint's directory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from kvstore.errors import InvalidArgument
from kvstore.layout import LatentLayout
from mla.tiny import tiny_model

TINY = "tiny"

Tokenize = Callable[[bytes], NDArray[np.uint32]]


@dataclass(frozen=True)
class NamedModel:
    """A model on its device, and how it reads text."""

    name: str
    model: PreTrainedModel
    tokenize: Tokenize


def open_device(name: str | None) -> torch.device:
    """A device by name; by default a GPU if there is one. Raises ``InvalidArgument``."""
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:  # torch without CUDA asserts
        line = str(error).partition("\n")[0]
        raise InvalidArgument(f"--device {name}: {line}; try cpu") from None
    return device


def load_tiny(device: torch.device) -> NamedModel:
    """The built-in model of random weights; a token for each byte."""
    model = tiny_model()
    nn.Module.to(model, device)
    return NamedModel(TINY, model, bytes_as_tokens)


def bytes_as_tokens(text: bytes) -> NDArray[np.uint32]:
    """A token id for each byte."""
    return np.frombuffer(text, np.uint8).astype(np.uint32)


def load_checkpoint(directory: Path, device: torch.device) -> NamedModel:
    """A Hugging Face checkpoint. Raises ``InvalidArgument``, ``NotMLA``, and what transformers raises."""
    if not (directory / "config.json").is_file():
        raise InvalidArgument("no config.json in it; name the directory of a Hugging Face checkpoint")
    # Before the weights, which may take minutes to read.
    LatentLayout.from_hf_config(AutoConfig.from_pretrained(directory).to_dict())
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(directory, dtype="auto")
    nn.Module.to(model, device)
    nn.Module.eval(model)
    tokenizer: Any = AutoTokenizer.from_pretrained(directory)

    def tokenize(text: bytes) -> NDArray[np.uint32]:
        ids = tokenizer(text.decode(errors="replace"), verbose=False)["input_ids"]
        return np.asarray(ids, np.uint32)

    return NamedModel(directory.resolve().name, model, tokenize)
