"""Prompts from files: token ids, or text and the tokenizer that reads it."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from kvstore.errors import InvalidArgument

BYTES = "bytes"  # the tokenizer of the built-in tiny model: a token for each byte


class Tokenizer(Protocol):
    """Text to token ids and back. ``nearby`` tokens are enough to tell a place by."""

    nearby: int

    def encode(self, text: str) -> list[int]: ...

    def decode(self, tokens: Sequence[int]) -> str: ...


class ByteTokenizer:
    """A token for each byte."""

    nearby = 80

    def encode(self, text: str) -> list[int]:
        """See ``Tokenizer``."""
        return list(text.encode())

    def decode(self, tokens: Sequence[int]) -> str:
        """See ``Tokenizer``."""
        return bytes(token & 0xFF for token in tokens).decode(errors="replace")


class FileTokenizer:
    """A ``tokenizer.json`` as Hugging Face's fast tokenizers write it."""

    nearby = 20

    def __init__(self, path: Path, *, special: bool) -> None:
        """``special``: with the tokens that belong around a text, such as the one at its start.

        Raises ``InvalidArgument``.
        """
        try:
            # Inside: an extra, and needed for text alone.
            from tokenizers import Tokenizer as Reader
        except ImportError:
            raise InvalidArgument("text needs the package tokenizers: pip install tokenizers") from None
        file = path / "tokenizer.json" if path.is_dir() else path
        if not file.is_file():
            raise InvalidArgument(f"--tokenizer {path}: no such file, and no directory with a tokenizer.json")
        try:
            self._reader = Reader.from_buffer(file.read_bytes())
        except ValueError as error:
            raise InvalidArgument(f"--tokenizer {file}: {error}") from None
        self._special = special

    def encode(self, text: str) -> list[int]:
        """See ``Tokenizer``."""
        return list(self._reader.encode(text, add_special_tokens=self._special).ids)

    def decode(self, tokens: Sequence[int]) -> str:
        """See ``Tokenizer``."""
        return str(self._reader.decode(list(tokens), skip_special_tokens=False))


def open_tokenizer(name: str | None, *, special: bool) -> Tokenizer | None:
    """The tokenizer of that name: a file, a directory with one, or ``bytes``. Raises ``InvalidArgument``."""
    if name is None:
        return None
    return ByteTokenizer() if name == BYTES else FileTokenizer(Path(name), special=special)


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids, and what they say if there is a tokenizer."""

    tokens: list[int]
    tokenizer: Tokenizer | None

    def words(self, first: int, last: int) -> str:
        """The text of some tokens; empty without a tokenizer."""
        kept = self.tokens[max(first, 0) : last]
        return self.tokenizer.decode(kept) if self.tokenizer is not None else ""

    def words_before(self, token: int) -> str:
        """The text just before a token."""
        return self.words(token - self.tokenizer.nearby, token) if self.tokenizer is not None else ""

    def words_from(self, token: int) -> str:
        """The text from a token on."""
        return self.words(token, token + self.tokenizer.nearby) if self.tokenizer is not None else ""


def read_prompt(source: str, tokenizer: Tokenizer | None) -> Prompt:
    """A prompt out of a file, or of stdin for ``-``: a JSON list of token ids, else text.

    Raises ``InvalidArgument`` and ``OSError``.
    """
    raw = sys.stdin.buffer.read() if source == "-" else Path(source).read_bytes()
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        raise InvalidArgument(f"{source} is neither token ids nor UTF-8 text ({error})") from None
    tokens = _token_ids(text)
    if tokens is None:
        if tokenizer is None:
            raise InvalidArgument(
                f"{source} is no JSON list of token ids: give the text's --tokenizer (a checkpoint's"
                f" directory, a tokenizer.json, or {BYTES!r})"
            )
        tokens = tokenizer.encode(text)
    if not tokens:
        raise InvalidArgument(f"{source} has no tokens; an empty prompt is never cached")
    return Prompt(tokens, tokenizer)


def _token_ids(text: str) -> list[int] | None:
    try:
        raw = json.loads(text)
    except ValueError:
        return None
    if not isinstance(raw, list) or not all(type(token) is int for token in raw):
        return None
    return raw
