"""The DISK tier: one catalogue and the payload environments of a data directory.

Everything here blocks and runs in threads. Payload bytes are durable before the
catalogue names them, and a place is freed after the catalogue has forgotten it: so
after a crash the catalogue names whole payloads only, and what it doesn't name is free.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import xxhash

from kvstore.catalog import BlockRecord, Catalog, UnitRecord, lock_directory
from kvstore.codec import Codec, Raw, Zstd, codec_by_id
from kvstore.errors import CorruptBlock
from kvstore.layout import LatentLayout
from kvstore.namespace import Namespace
from kvstore.payloads import Payloads
from kvstore.payloads.lmdb import LmdbPayloads
from kvstore.settings import CodecName, StoreSettings

log = logging.getLogger(__name__)

BATCH_BLOCKS = 32
CODECS: dict[CodecName, Codec] = {"raw": Raw(), "zstd": Zstd()}


@dataclass(frozen=True, slots=True)
class Stored:
    """Where a payload lies, and what proves it."""

    place: int
    length: int  # stored bytes
    codec: int
    checksum: int  # xxh3-64 of the raw block


@dataclass(frozen=True, slots=True)
class NewBlock:
    """A block to be written: the record's fields that are known before, and its bytes."""

    hash: bytes
    parent: bytes
    namespace: int
    depth: int
    used: float
    data: memoryview


@dataclass(frozen=True, slots=True)
class Freed:
    """A block that leaves the disk."""

    hash: bytes
    block_bytes: int
    place: int


class DiskTier:
    """Catalogue and payloads. Reads come from several threads, writes from one at a time."""

    def __init__(self, settings: StoreSettings) -> None:
        settings.data.mkdir(parents=True, exist_ok=True)
        self._root = settings.data
        self._lock = lock_directory(settings.data)
        self.catalog = Catalog.open(settings.data, settings.catalog_bytes)
        self.readers = settings.readers
        self._codec = CODECS[settings.codec]
        self._map_bytes = settings.payload_bytes
        self._payloads: dict[int, Payloads] = {}

    def batch_blocks(self, block_bytes: int) -> int:
        """How many blocks of this size are written together."""
        return max(1, min(BATCH_BLOCKS, self._map_bytes // 16 // block_bytes))

    def limit_bytes(self, block_bytes: int) -> int:
        """Payload bytes that may be in use before a batch of this block size is written.

        LMDB gives freed pages back two commits later, so two batches and some slack stay free.
        """
        return self._map_bytes * 31 // 32 - 2 * self.batch_blocks(block_bytes) * block_bytes

    def open_payloads(self, block_bytes: int, first_free: int = 1) -> None:
        """Open the payload environment of a block size; ``first_free`` is behind all catalogued places.

        One for each size, for equal sizes keep LMDB's free list from fragmenting.
        """
        if block_bytes not in self._payloads:
            path = self._root / "payloads" / str(block_bytes)
            self._payloads[block_bytes] = LmdbPayloads(path, self._map_bytes, first_free)

    def payloads(self, block_bytes: int) -> Payloads:
        """The open payload environment of a block size."""
        return self._payloads[block_bytes]

    def add_namespace(self, namespace: Namespace) -> tuple[int, bytes]:
        """Id and digest of a namespace, catalogued and ready for its blocks. Raises ``DiskError``."""
        digest = namespace.digest(self.catalog.tenant_secret(namespace.tenant))
        number = self.catalog.add_namespace(namespace.to_json(), digest)
        self.open_payloads(namespace.layout.block_bytes)
        return number, digest

    def stored_bytes(self, block_bytes: int, length: int) -> int:
        """Bytes of disk that a payload of ``length`` bytes takes."""
        return self.payloads(block_bytes).stored_bytes(length)

    def read(self, layout: LatentLayout, stored: Stored, out: memoryview) -> None:
        """Read a payload into ``out`` and verify it. Raises ``CorruptBlock`` or ``DiskError``."""
        codec = codec_by_id(stored.codec)
        payloads = self.payloads(layout.block_bytes)
        if stored.codec == Raw.codec_id:  # straight into the slot
            payloads.read_into(stored.place, layout.block_bytes, out)
        else:
            encoded = memoryview(bytearray(stored.length))
            payloads.read_into(stored.place, stored.length, encoded)
            codec.decode_into(encoded, out, layout.dtype.itemsize)
        found = xxhash.xxh3_64_intdigest(out)
        if found != stored.checksum:
            raise CorruptBlock(
                f"place {stored.place}: checksum {found:016x}, expected {stored.checksum:016x}"
            )

    def write(
        self, layout: LatentLayout, blocks: Sequence[NewBlock], units: Sequence[UnitRecord]
    ) -> list[Stored]:
        """Make blocks durable, then name them and the units in one catalogue transaction.

        All or nothing: raises ``DiskError``, and then no block is named.
        """
        encoded = [self._codec.encode(block.data, layout.dtype.itemsize) for block in blocks]
        checksums = [xxhash.xxh3_64_intdigest(block.data) for block in blocks]
        places = self.payloads(layout.block_bytes).write([item.data for item in encoded]) if blocks else []
        stored = [
            Stored(place, len(item.data), item.codec_id, checksum)
            for place, item, checksum in zip(places, encoded, checksums, strict=True)
        ]
        records = [
            BlockRecord(
                hash=block.hash,
                parent=block.parent,
                namespace=block.namespace,
                depth=block.depth,
                place=at.place,
                length=at.length,
                codec=at.codec,
                checksum=at.checksum,
                used=block.used,
            )
            for block, at in zip(blocks, stored, strict=True)
        ]
        self.catalog.commit(blocks=records, units=units)
        return stored

    def drop(self, freed: Sequence[Freed]) -> None:
        """Forget blocks and their units, then free their places. Raises ``DiskError``."""
        hashes = [item.hash for item in freed]
        self.catalog.commit(drop_blocks=hashes, drop_units=hashes)
        for size in {item.block_bytes for item in freed}:
            self.payloads(size).free([item.place for item in freed if item.block_bytes == size])

    def reclaim(self, block_bytes: int, named: Iterable[int]) -> set[int]:
        """Free the payloads that no record names; returns the named places that are not there."""
        wanted = set(named)
        self.open_payloads(block_bytes, max(wanted, default=0) + 1)
        payloads = self.payloads(block_bytes)
        there = set(payloads.places())
        unnamed = there - wanted
        if unnamed:
            log.info("event=reclaimed_payloads count=%d block_bytes=%d", len(unnamed), block_bytes)
            payloads.free(sorted(unnamed))
        return wanted - there

    def close(self) -> None:
        """Close the environments and give the directory up."""
        for payloads in self._payloads.values():
            payloads.close()
        self.catalog.close()
        self._lock.close()
