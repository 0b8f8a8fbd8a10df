"""What usually makes two prompts part, told by how these two do."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

EARLY = 0.5  # of the shorter prompt: what differs before it costs most of the prompt


@dataclass(frozen=True, slots=True)
class Hint:
    """A usual cause, by name, and what to do about it."""

    cause: str
    advice: str


@dataclass(frozen=True, slots=True)
class Parting:
    """One prompt where it parts from another: its text in whole, and the part that differs."""

    text: str
    first: int  # characters before the part that differs
    last: int  # where it ends

    @property
    def differs(self) -> str:
        """The text that the other has not."""
        return self.text[self.first : self.last]


_TIMES = re.compile(
    r"\d{4}-\d{2}-\d{2}(?:[T ]\d{2}:\d{2}(?::\d{2})?)?|\b\d{1,2}:\d{2}(?::\d{2})?\b|\b1[5-9]\d{8}(?:\d{3})?\b"
    r"|\b\d{1,2}[./]\d{1,2}[./]\d{2,4}\b"
    r"|\b(?:\d{1,2} )?(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]*\.? \d{1,2}(?:,? \d{4})?"
    r"|\b(?:Mon|Tues|Wednes|Thurs|Fri|Satur|Sun)day\b|\d{4}年\d{1,2}月\d{1,2}日"
)
_IDS = re.compile(
    r"[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}|\b[0-9a-fA-F]{12,}\b|\b\d{6,}\b"
    r"|\b[a-z]+[-_](?=[A-Za-z]*\d)[A-Za-z0-9]{8,}\b"
)
_REASONING = re.compile(r"(?:<think>|<reasoning>|◁think▷).*?(?:</think>|</reasoning>|◁/think▷)\s*", re.DOTALL)
# Lines, and the items of a JSON list that is on one.
_PIECES = re.compile(r"\n+|(?<=[}\]])\s*,\s*(?=[{\[])|(?<=\[)\s*(?=[{\[])|(?<=[}\]])\s*(?=\])")
_AROUND = 48  # characters beside what differs: a date differs in one digit
_LONG = 200_000  # characters of a text that are looked at


def _same_kind(pattern: re.Pattern[str], ours: Parting, theirs: Parting) -> bool:
    """Whether both differ inside something of this kind."""
    return all(_touches(pattern, each) for each in (ours, theirs))


def _touches(pattern: re.Pattern[str], parting: Parting) -> bool:
    first = max(parting.first - _AROUND, 0)
    window = parting.text[first : parting.first + _AROUND]
    at = parting.first - first
    return any(found.start() <= at < found.end() for found in pattern.finditer(window))


def _reordered(ours: Parting, theirs: Parting) -> bool:
    a, b = (_PIECES.split(each.text[:_LONG]) for each in (ours, theirs))
    a, b = ([piece.strip(" \t[],") for piece in pieces] for pieces in (a, b))
    while a and b and a[0] == b[0]:
        del a[0], b[0]
    while a and b and a[-1] == b[-1]:
        del a[-1], b[-1]
    return len(a) > 1 and sorted(a) == sorted(b)


def _reasoning(ours: Parting, theirs: Parting) -> bool:
    texts = [each.text[:_LONG] for each in (ours, theirs)]
    without = [_REASONING.sub("", text) for text in texts]
    return without != texts and shared(*without) > shared(*texts)


def _spaces(ours: Parting, theirs: Parting) -> bool:
    a, b = ("".join(each.text[each.first : each.first + _AROUND].split()) for each in (ours, theirs))
    return bool(a and b) and shared(a, b) >= min(len(a), len(b), 8) and ours.differs != theirs.differs


_TESTS: tuple[tuple[Hint, Callable[[Parting, Parting], bool]], ...] = (
    (
        Hint(
            "timestamp",
            "a date or a time differs: put what changes with every request behind the documents, or round it",
        ),
        lambda ours, theirs: _same_kind(_TIMES, ours, theirs),
    ),
    (
        Hint("identifier", "an id differs: leave it out, or put it behind what is meant to be shared"),
        lambda ours, theirs: _same_kind(_IDS, ours, theirs),
    ),
    (
        Hint(
            "reordered",
            "the same pieces come in another order: sort tools and documents before rendering them",
        ),
        _reordered,
    ),
    (
        Hint(
            "reasoning",
            "one prompt has the reasoning that the other lacks: the template drops it from earlier turns, so"
            " each turn hits up to the last question only; keep it, or expect that",
        ),
        _reasoning,
    ),
    (
        Hint(
            "whitespace",
            "spaces or line breaks differ: render the prompt by one template, and do not trim it",
        ),
        _spaces,
    ),
)


CAUSES = tuple(hint for hint, _ in _TESTS)


def hints_of(ours: Parting, theirs: Parting) -> list[Hint]:
    """The causes that the texts of two prompts show."""
    return [hint for hint, holds in _TESTS if holds(ours, theirs)]


def shared(a: str, b: str) -> int:
    """Leading characters that two texts have in common."""
    least = min(len(a), len(b))
    if a[:least] == b[:least]:
        return least
    return next(at for at in range(least) if a[at] != b[at])
