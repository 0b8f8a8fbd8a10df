"""Text of others, shown so that nobody takes it for more than text.

A name may hold what a terminal obeys (escape sequences, a bell), what turns a line around (marks of
writing direction), what begins a new line of a log, or what no UTF-8 can say. ``shown`` is how such
text gets to people; ``require_showable`` is how a name that holds it is kept out.
"""

from __future__ import annotations

import json

from kvstore.errors import InvalidArgument

# Letters and signs that every screen shows as nothing: Hangul fillers, and the empty Braille pattern.
_BLANK = frozenset("\u115f\u1160\u3164\uffa0\u2800")


def escaped(text: str) -> str:
    """The text on one line; what is not seen as itself is written as ``\\n``, ``\\x1b`` or ``\\u202e``."""
    if _seen_whole(text):
        return text
    return "".join(each if _seen(each) else each.encode("unicode_escape").decode() for each in text)


def shown(text: str) -> str:
    """A name as people see it: escaped, and in quotes if it begins or ends with a space."""
    return f'"{escaped(text)}"' if text != text.strip() else escaped(text)


def field(value: object) -> str:
    """A value of a ``key=value`` line of a log: as JSON if it could be read as more than one value."""
    text = f"{value:.3f}" if isinstance(value, float) else str(value)
    plain = text and _seen_whole(text) and not set(text) & set(' "=')
    return text if plain else json.dumps(text)


def require_showable(name: str, text: str) -> None:
    """Raises ``InvalidArgument`` for text that people, a terminal or UTF-8 would read as something else."""
    if _seen_whole(text):
        return
    wrong = next(each for each in text if not _seen(each))
    raise InvalidArgument(
        f"{name}={text[:80]!r} holds U+{ord(wrong):04X}, which is not seen as itself;"
        " use letters, digits, signs and plain spaces"
    )


def _seen_whole(text: str) -> bool:
    return text.isprintable() and not _BLANK.intersection(text)


def _seen(each: str) -> bool:
    return each.isprintable() and each not in _BLANK
