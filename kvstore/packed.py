"""The stored form of the catalogue's records: packed fields behind a key. The catalogue adds a checksum."""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np

from kvstore.hashing import HASH_BYTES

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
