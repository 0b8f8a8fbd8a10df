"""What people pass as a prompt: token ids in any flat form, or all of what a tokenizer returns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from kvstore.errors import InvalidArgument, InvalidTokens
from kvstore.hashing import Tokens, as_tokens
from mla.errors import Unsupported

Prompt = Tokens | Tensor | Mapping[str, Any]

_SEGMENTS = ("token_type_ids", "mm_token_type_ids")


def read_prompt(
    prompt: Prompt | None, options: Mapping[str, Any], vocabulary: int
) -> tuple[NDArray[np.uint32], dict[str, Any]]:
    """The token ids of one prompt, and the options without what describes these tokens.

    ``prompt`` may be the mapping that a tokenizer or ``apply_chat_template`` returns; what it
    holds besides the ids counts as options. A mask of ones and segments that are all 0 say
    nothing and are dropped. Raises ``InvalidTokens`` for what are no ids of the vocabulary,
    ``Unsupported`` for padding, for several segments and for several prompts.
    """
    rest = dict(options)
    if isinstance(prompt, Mapping):  # a BatchEncoding is one
        twice = sorted(set(prompt) & set(rest))
        if twice:
            raise InvalidArgument(
                f"{', '.join(twice)} is passed twice, beside the prompt and in it: pass it once"
            )
        rest |= prompt
        prompt = rest.pop("input_ids", None)
    tokens = as_tokens(_flat(prompt))
    high = int(tokens.max())
    if high >= vocabulary:
        raise InvalidTokens(f"token id {high} is outside the model's vocabulary of {vocabulary}")
    _drop(
        rest, "attention_mask", 1, len(tokens), "the mask has zeros: pass the tokens alone, without padding"
    )
    for name in _SEGMENTS:
        _drop(rest, name, 0, len(tokens), "blocks are named by token ids alone: pass one segment")
    return tokens, rest


def vocabulary_of(model: nn.Module) -> int:
    """How many token ids a model knows."""
    embedding = cast(Any, model).get_input_embeddings()
    if isinstance(embedding, nn.Embedding):
        return embedding.num_embeddings
    return int(cast(Any, model).config.vocab_size)


def _drop(options: dict[str, Any], name: str, idle: int, tokens: int, otherwise: str) -> None:
    value = options.pop(name, None)
    if value is None:
        return
    row = value.cpu() if isinstance(value, Tensor) else torch.as_tensor(np.asarray(value))
    if row.numel() != tokens or row.dim() not in (1, 2):
        raise Unsupported(
            f"{name} of shape {tuple(row.shape)} for a prompt of {tokens} tokens in a stored session: pass"
            " one for each token of the prompt, or none"
        )
    if bool((row != idle).any()):
        raise Unsupported(f"{name} in a stored session: {otherwise}")


def _flat(prompt: Any) -> Tokens:
    if isinstance(prompt, (str, bytes)):
        raise InvalidTokens(f"a {type(prompt).__name__} is no sequence of token ids: tokenize it first")
    if prompt is None:
        raise InvalidTokens("there are no token ids: pass input_ids")
    if isinstance(prompt, Tensor):
        return _row(_array(prompt))
    try:
        return _row(np.asarray(prompt))
    except (ValueError, OverflowError, TypeError) as error:
        raise InvalidTokens(f"token ids are no flat sequence of integers ({error}); pass one") from None


def _array(ids: Tensor) -> NDArray[Any]:
    if ids.is_floating_point() or ids.is_complex() or ids.is_meta or ids.layout is not torch.strided:
        raise InvalidTokens(
            f"token ids are a {ids.layout} tensor of {ids.dtype} on {ids.device}; pass plain integers"
        )
    return ids.cpu().numpy()


def _row(ids: NDArray[Any]) -> Tokens:
    # Tokenizers return a batch; one of one row is that row.
    if ids.ndim == 2 and ids.shape[0] != 1:
        raise Unsupported(
            f"a batch of {ids.shape[0]} prompts in a stored session: pass one prompt at a time, unpadded"
        )
    return cast(Tokens, ids[0] if ids.ndim == 2 else ids)
