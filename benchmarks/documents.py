"""The text that the benchmarks read: real prose, cut to so many tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.options import BenchmarkError

Tokens = NDArray[np.uint32]
Tokenize = Callable[[bytes], Tokens]

_BYTES_A_TOKEN = 16  # more than any tokenizer needs for prose, so a huge file is not tokenized whole


@dataclass(frozen=True, slots=True)
class Prompt:
    """The first tokens of a document; ``copies`` > 1 if it was too short and is repeated."""

    tokens: Tokens
    document: str
    copies: int


def read_prompt(document: Path | None, tokenize: Tokenize, length: int) -> Prompt:
    """The first ``length`` tokens of a file, or of the reference texts that Python brings along.

    Raises ``BenchmarkError`` when there is nothing to read.
    """
    name, text = _python_reference() if document is None else _read(document)
    tokens = tokenize(text[: length * _BYTES_A_TOKEN])
    if not len(tokens):
        raise BenchmarkError(f"--document {name}: there is no text in it")
    copies = -(-length // len(tokens))
    return Prompt(np.tile(tokens, copies)[:length], name, copies)


def _read(document: Path) -> tuple[str, bytes]:
    try:
        return document.name, document.read_bytes()
    except OSError as error:
        raise BenchmarkError(f"--document {document}: {error.strerror}; name a readable text file") from None


def _python_reference() -> tuple[str, bytes]:
    # Some 460 kB of English, on every machine that has Python's standard library.
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise BenchmarkError("this Python lacks its pydoc texts; name a text file with --document") from None
    return "Python's language reference (pydoc_data)", "\n".join(topics.values()).encode()
