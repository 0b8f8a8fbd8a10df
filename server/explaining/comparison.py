"""Two prompts side by side."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvstore.hashing import as_tokens
from kvstore.layout import BLOCK_TOKENS
from server.explaining.hints import EARLY, Hint, Parting, hints_of, shared
from server.explaining.prompts import Prompt

_SHOWN = 400  # characters of what differs

EXTENDED = Hint(
    "extended", "one prompt begins with the whole of the other, as a next turn does: it can hit all of it"
)
EQUAL = Hint("equal", "the prompts are equal")
SHIFTED = Hint(
    "start_token",
    "the same tokens, one place on: one prompt has a token at its start that the other lacks; add it once,"
    " and always",
)
RETOKENISED = Hint(
    "retokenised",
    "the same text, other tokens: an answer was decoded to text and tokenised anew; send the answer's own"
    " token ids back, or expect hits to end where the answer begins",
)
CHANGED = Hint(
    "changed_field",
    "a short piece early on differs and what follows is the same: put what changes with every request"
    " behind the rest",
)


@dataclass(frozen=True, slots=True)
class Side:
    """One prompt: its length, how many of its tokens differ, and their text (shortened)."""

    tokens: int
    differing_tokens: int
    differs: str


@dataclass(frozen=True, slots=True)
class Comparison:
    """Where two prompts part. Positions in tokens; ``share`` is of the first prompt.

    ``shared_blocks`` can be hit by both; block ``shared_blocks`` is the first that differs, None if none
    does. ``resumes`` tokens at the end are the same again. Texts are empty without a tokenizer.
    """

    shared_tokens: int
    share: float
    shared_blocks: int
    diverging_block: int | None
    resumes: int
    ours: Side
    theirs: Side
    before: str
    hints: list[Hint]


def compare(ours: Prompt, theirs: Prompt, block_tokens: int = BLOCK_TOKENS) -> Comparison:
    """How far two prompts agree, what differs, and what the usual cause is. Raises ``InvalidTokens``."""
    a, b = as_tokens(ours.tokens), as_tokens(theirs.tokens)
    at = _shared(a, b)
    rest = _shared(a[at:][::-1], b[at:][::-1])
    equal = at == len(a) == len(b)
    return Comparison(
        shared_tokens=at,
        share=at / len(a),
        shared_blocks=at // block_tokens,
        diverging_block=None if equal else at // block_tokens,
        resumes=rest,
        ours=_side(ours, at, rest),
        theirs=_side(theirs, at, rest),
        before=ours.words_before(at),
        hints=_hints(ours, theirs, at, rest),
    )


def _shared(a: NDArray[np.uint32], b: NDArray[np.uint32]) -> int:
    least = min(len(a), len(b))
    differing = np.flatnonzero(a[:least] != b[:least])
    return int(differing[0]) if len(differing) else least


def _side(prompt: Prompt, at: int, rest: int) -> Side:
    count = len(prompt.tokens) - rest - at
    text = prompt.words(at, at + min(count, _SHOWN))
    return Side(len(prompt.tokens), count, text[:_SHOWN])


def _hints(ours: Prompt, theirs: Prompt, at: int, rest: int) -> list[Hint]:
    a, b = ours.tokens, theirs.tokens
    if at == min(len(a), len(b)):
        return [EQUAL if len(a) == len(b) else EXTENDED]
    if at <= 1 and _is_shifted(a[at:], b[at:]):
        return [SHIFTED]
    if _retokenised(ours, theirs, at):
        return [RETOKENISED]
    found = hints_of(*(_parting(prompt, at, rest) for prompt in (ours, theirs))) if ours.tokenizer else []
    least = min(len(a), len(b))
    return found or [CHANGED] * (at < EARLY * least and rest > least / 2)


def _is_shifted(a: list[int], b: list[int]) -> bool:
    longer, shorter = (a, b) if len(a) > len(b) else (b, a)
    return len(shorter) > 1 and longer[1:] == shorter[: len(longer) - 1]


def _retokenised(ours: Prompt, theirs: Prompt, at: int) -> bool:
    """Whether the texts go on alike for longer than the tokens that differ first."""
    first = max(len(prompt.words(at, at + 1)) for prompt in (ours, theirs))
    return 0 < first <= shared(ours.words_from(at), theirs.words_from(at))


def _parting(prompt: Prompt, at: int, rest: int) -> Parting:
    before, differs = prompt.words(0, at), prompt.words(at, len(prompt.tokens) - rest)
    after = prompt.words(len(prompt.tokens) - rest, len(prompt.tokens)) if rest else ""
    return Parting(before + differs + after, len(before), len(before) + len(differs))
