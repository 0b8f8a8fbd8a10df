"""The stored form of the catalogue's records: a key, packed fields, and a checksum of both."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from kvstore.hashing import HASH_BYTES

_CHECK = struct.Struct("<Q")
_BLOCK = struct.Struct(f"<{HASH_BYTES}sIIQIQBQd")
_UNIT = struct.Struct("<IIIddQ")
BLOCK_DTYPE = np.dtype(
    [
        ("hash", f"V{HASH_BYTES}"),
        ("parent", f"V{HASH_BYTES}"),
        ("namespace", "<u4"),
        ("depth", "<u4"),
        ("place", "<u8"),
        ("page", "<u4"),
        ("length", "<u8"),
        ("codec", "u1"),
        ("checksum", "<u8"),
        ("used", "<f8"),
    ]
)
UNIT_DTYPE = np.dtype(
    [
        ("hash", f"V{HASH_BYTES}"),
        ("namespace", "<u4"),
        ("tokens", "<u4"),
        ("kinds", "<u4"),
        ("created", "<f8"),
        ("used", "<f8"),
        ("hits", "<u8"),
    ]
)


@dataclass(frozen=True, slots=True)
class BlockRecord:
    """One stored block. ``checksum`` is the xxh3-64 of the decoded block."""

    hash: bytes
    parent: bytes
    namespace: int  # id from ``add_namespace``
    depth: int  # blocks of the chain up to and with this one
    place: int  # key of the payload
    page: int  # where it starts in its file, 0 if unknown
    length: int  # stored (encoded) bytes
    codec: int
    checksum: int
    used: float  # the store's time, when it was stored: later uses are noted with the units

    def pack(self) -> bytes:
        """The fields behind the hash, in their stored form."""
        return _BLOCK.pack(
            self.parent,
            self.namespace,
            self.depth,
            self.place,
            self.page,
            self.length,
            self.codec,
            self.checksum,
            self.used,
        )


@dataclass(frozen=True, slots=True)
class UnitRecord:
    """One unit, named by the hash of its last block."""

    hash: bytes
    namespace: int
    tokens: int
    kinds: int
    created: float  # the store's time
    used: float
    hits: int

    def pack(self) -> bytes:
        """The fields behind the hash, in their stored form."""
        return _UNIT.pack(self.namespace, self.tokens, self.kinds, self.created, self.used, self.hits)


def seal(key: bytes, body: bytes) -> bytes:
    """What is stored under ``key``."""
    return body + _CHECK.pack(xxh3_64_intdigest(key + body))


def sound(pairs: Sequence[tuple[bytes, bytes]], fields: np.dtype[np.void]) -> NDArray[np.void]:
    """Those pairs of key and value that are whole records and verify. At start there may be millions."""
    sealed = np.dtype([("record", fields), ("check", "<u8")])
    parts = list(chain.from_iterable(pairs))
    rest = sealed.itemsize - HASH_BYTES
    if not (set(map(len, parts[::2])) <= {HASH_BYTES} and set(map(len, parts[1::2])) <= {rest}):
        whole = (pair for pair in pairs if len(pair[0]) == HASH_BYTES and len(pair[1]) == rest)
        parts = list(chain.from_iterable(whole))
    found = np.frombuffer(b"".join(parts), sealed)
    bodies = found["record"].view(f"V{fields.itemsize}").tolist()
    digests = np.fromiter(map(xxh3_64_intdigest, bodies), np.uint64, len(bodies))
    whole_ones: NDArray[np.void] = found["record"][digests == found["check"]]
    return whole_ones


def unseal(key: bytes, value: bytes) -> bytes:
    """Inverse of ``seal``. Raises ``ValueError`` for what does not verify."""
    body, check = value[: -_CHECK.size], value[-_CHECK.size :]
    if check != _CHECK.pack(xxh3_64_intdigest(key + body)):
        raise ValueError("checksum")
    return body
