"""Who may share blocks, and the digest that keeps everybody else out.

The digest is the key of the hash chain (``kvstore.hashing``): two namespaces that
differ in any one field have unrelated block hashes, so they cannot hit each other.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from kvstore.errors import InvalidArgument
from kvstore.layout import LatentLayout
from kvstore.showing import require_showable

DIGEST_BYTES = 32
_PERSON = b"latentkv-ns-v1"

RopeLayout = Literal["interleaved", "halves"]


@dataclass(frozen=True, slots=True)
class Namespace:
    """Everything on which the bytes of a block depend besides its tokens.

    ``revision`` is by default a fingerprint of all of the weights; ``rope`` the
    canonical JSON of the rope parameters; ``numerics`` is empty except in exact mode.
    """

    layout: LatentLayout
    model: str = ""
    revision: str = ""
    tenant: str = "default"
    rope: str = ""
    rope_layout: RopeLayout = "halves"
    adapter: str = ""
    salt: str = ""
    numerics: str = ""

    def __post_init__(self) -> None:
        for field in fields(self):
            if field.name != "layout":
                _require_text(field.name, self._text(field.name))
        if self.rope_layout not in ("interleaved", "halves"):
            raise InvalidArgument(f"rope_layout={self.rope_layout!r}: use 'interleaved' or 'halves'")

    def _text(self, name: str) -> object:
        return object.__getattribute__(self, name)

    def require_showable(self) -> None:
        """Raises ``InvalidArgument`` for a name that people or terminals would read as something else."""
        for field in fields(self):
            if field.name != "layout":
                require_showable(field.name, str(self._text(field.name)))

    def to_json(self) -> str:
        """Canonical form: equal namespaces, and only they, have equal text."""
        raw = {f.name: self._text(f.name) for f in fields(self) if f.name != "layout"}
        return json.dumps(raw | {"layout": self.layout.to_dict()}, sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Namespace:
        """Inverse of ``to_json``. Raises ``InvalidArgument`` on malformed input."""
        try:
            raw: Any = json.loads(text)
            if not isinstance(raw, Mapping):
                raise TypeError("no JSON object")
            return cls(**{**raw, "layout": LatentLayout.from_dict(raw["layout"])})
        except (TypeError, KeyError, ValueError, OverflowError, RecursionError) as error:
            raise InvalidArgument(f"not a namespace: {text[:200]!r} ({error})") from error

    def digest(self, secret: bytes) -> bytes:
        """Keyed blake2b-256 of the canonical form; ``secret`` is the tenant's (at most 64 bytes)."""
        return hashlib.blake2b(
            self.to_json().encode(), key=secret, digest_size=DIGEST_BYTES, person=_PERSON
        ).digest()


def _require_text(name: str, value: object) -> None:
    if not isinstance(value, str) or len(value) > 4096:
        raise InvalidArgument(f"{name}={str(value)[:80]!r} is no text of at most 4096 characters")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise InvalidArgument(f"{name}={value[:80]!r} is no text in UTF-8 ({error.reason})") from None
