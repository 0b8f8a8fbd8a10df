"""Tokens to chained block hashes.

``hash = blake2b-256(parent + 64 token ids as u32 little-endian + extra keys)``, keyed
with the namespace digest. Equal hash means equal whole prefix, in the same namespace.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from kvstore.errors import InvalidArgument, InvalidTokens
from kvstore.layout import BLOCK_TOKENS
from kvstore.namespace import DIGEST_BYTES

HASH_BYTES = 32
ROOT = bytes(HASH_BYTES)  # the parent of a first block

Tokens = Sequence[int] | NDArray[np.integer]


def as_tokens(tokens: Tokens) -> NDArray[np.uint32]:
    """Token ids as a flat u32 array.

    Raises ``InvalidTokens`` for an empty prompt and for ids that are no integers,
    negative, or beyond u32.
    """
    try:
        array = np.asarray(tokens)
    except (ValueError, OverflowError) as error:
        raise InvalidTokens(f"token ids are no flat sequence of integers ({error}); pass one") from None
    if array.ndim != 1:
        raise InvalidTokens(f"token ids have shape {array.shape}; pass one flat sequence")
    if array.size == 0:
        raise InvalidTokens("the prompt is empty; pass at least one token id")
    if array.dtype.kind not in "iu":
        raise InvalidTokens(f"token ids have type {array.dtype}; pass integers that fit into u32")
    low, high = int(array.min()), int(array.max())
    if low < 0 or high >= 1 << 32:
        raise InvalidTokens(f"token id {low if low < 0 else high} is outside [0, 2**32)")
    return array.astype("<u4")


def block_hashes(
    key: bytes,
    tokens: Tokens,
    *,
    parent: bytes = ROOT,
    extra: Mapping[int, bytes] | None = None,
    block_tokens: int = BLOCK_TOKENS,
) -> list[bytes]:
    """Hashes of the full blocks of ``tokens``, first to last; a partial last block has none.

    ``key`` is the namespace digest. ``parent`` is the hash before the first of these
    blocks. ``extra`` maps a block's index to what its token ids don't say (an image
    behind placeholder tokens). Raises ``InvalidTokens`` and ``InvalidArgument``.
    """
    if len(key) != DIGEST_BYTES or len(parent) != HASH_BYTES:
        raise InvalidArgument(f"key has {len(key)} and parent {len(parent)} bytes; both need {HASH_BYTES}")
    data = as_tokens(tokens).tobytes()
    step = 4 * block_tokens
    hashes: list[bytes] = []
    keyed = hashlib.blake2b(key=key, digest_size=HASH_BYTES)  # a copy costs less than another one
    for index in range(len(data) // step):
        hasher = keyed.copy()
        hasher.update(parent)
        hasher.update(data[index * step : (index + 1) * step])
        if extra and index in extra:
            hasher.update(extra[index])
        parent = hasher.digest()
        hashes.append(parent)
    return hashes


def split_hashes(blob: bytes) -> list[bytes]:
    """Cut a concatenation of hashes. Raises ``InvalidArgument`` for a wrong length."""
    if len(blob) % HASH_BYTES:
        raise InvalidArgument(f"{len(blob)} bytes are no whole number of {HASH_BYTES}-byte hashes")
    hashes: list[bytes] = np.frombuffer(blob, f"V{HASH_BYTES}").tolist()
    return hashes


def check_hashes(hashes: Sequence[bytes]) -> None:
    """Raises ``InvalidArgument`` for what is no block hash."""
    # In one go first: a prompt has thousands, and hardly ever a wrong one.
    if list(map(type, hashes)).count(bytes) == len(hashes) == list(map(len, hashes)).count(HASH_BYTES):
        return
    for block in hashes:
        if not isinstance(block, bytes) or len(block) != HASH_BYTES:
            raise InvalidArgument(f"{block!r:.80} is no block hash: {HASH_BYTES} bytes")
