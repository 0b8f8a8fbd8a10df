"""What callers pass in: checked alike by the embedded store, by a daemon's client, and by the daemon."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.errors import InvalidArgument
from kvstore.hashing import check_hashes
from kvstore.layout import BLOCK_TOKENS
from kvstore.namespace import DIGEST_BYTES

MAX_HASHES = 1 << 17  # in one call: a prompt of eight million tokens
MAX_TOKENS = MAX_HASHES * BLOCK_TOKENS


def digest(value: bytes) -> bytes:
    """``value`` if it can be a namespace's digest, or a block's hash; else ``InvalidArgument``."""
    if not isinstance(value, bytes) or len(value) != DIGEST_BYTES:
        raise InvalidArgument(f"{value!r:.120} is no digest of {DIGEST_BYTES} bytes")
    return value


def unsigned(name: str, value: int, bits: int = 64) -> int:
    """``value`` if it fits the field; else ``InvalidArgument``."""
    if not isinstance(value, int) or not 0 <= value < 1 << bits:
        raise InvalidArgument(f"{name}={value!r} is no integer in [0, 2**{bits})")
    return value


def bounded_hashes(hashes: Sequence[bytes]) -> Sequence[bytes]:
    """``hashes`` if they are such, and not too many for one call; else ``InvalidArgument``."""
    if len(hashes) > MAX_HASHES:
        raise InvalidArgument(f"{len(hashes)} hashes in one call; send at most {MAX_HASHES}")
    check_hashes(hashes)
    return hashes


def bounded_tokens(tokens: int) -> int:
    """A prompt's length. Raises ``InvalidArgument``: persist points are planned for each interval of it."""
    if unsigned("tokens", tokens) > MAX_TOKENS:
        raise InvalidArgument(f"tokens={tokens} is more than {MAX_TOKENS}; match a shorter prompt")
    return tokens
