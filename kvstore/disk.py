"""The DISK tier: one catalogue and the payload environments of a data directory.

Everything here blocks and runs in threads. Payload bytes are durable before the
catalogue names them, and a place is freed after the catalogue has forgotten it: so
after a crash the catalogue names whole payloads only, and what it doesn't name is free.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import threading
import time
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import xxhash

from kvstore.catalog import BlockRecord, Catalog, UnitRecord
from kvstore.codec import codec_by_id, codec_by_name
from kvstore.directory import directory_error, lock_directory
from kvstore.errors import BadPlace, CorruptBlock, DiskError, FormatMismatch
from kvstore.layout import LatentLayout
from kvstore.namespace import Namespace
from kvstore.observer import Observer, Unobserved
from kvstore.payloads import Keys, OpenPayloads, Payloads, Place, SetAside
from kvstore.payloads.direct import Run, make_directory
from kvstore.payloads.kinds import LEAD, OPEN
from kvstore.settings import StoreSettings

log = logging.getLogger(__name__)

BATCH_BYTES = 128 << 20  # each batch costs a few syncs, which the device does between its writes
BATCH_BLOCKS = 256  # and is one transaction of the catalogue


@dataclass(frozen=True, slots=True)
class Stored:
    """Where a payload lies, and what proves it."""

    place: Place
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
    data: Run

    def record(self, at: Stored) -> BlockRecord:
        """Its catalogue record once it lies somewhere."""
        return BlockRecord(
            hash=self.hash,
            parent=self.parent,
            namespace=self.namespace,
            depth=self.depth,
            place=at.place.key,
            page=at.place.page,
            length=at.length,
            codec=at.codec,
            checksum=at.checksum,
            used=self.used,
        )


@dataclass(frozen=True, slots=True)
class Freed:
    """A block that leaves the disk, with the unit that ends there; without a place only the unit."""

    hash: bytes
    block_bytes: int
    place: int | None  # its key


@dataclass(frozen=True, slots=True)
class Encoded:
    """A block ready to be written."""

    run: Run  # the stored bytes
    codec: int
    checksum: int  # xxh3-64 of the raw block


class Registered(NamedTuple):
    """A namespace in the catalogue; ``new`` if it was not there before."""

    number: int
    digest: bytes
    new: bool


class DiskTier:
    """Catalogue and payloads. Reads come from several threads.

    ``encode``, ``put`` and ``free`` may run anywhere, and what else touches the catalogue (``name``,
    ``forget``, ``add_namespace``) in one thread at a time.
    """

    def __init__(
        self,
        settings: StoreSettings,
        open_payloads: OpenPayloads | None = None,
        observer: Observer | None = None,
    ) -> None:
        self._observer = observer or Unobserved()
        self._payload_root = settings.data / "payloads"
        self._lock = lock_directory(settings.data)
        with contextlib.ExitStack() as undo:
            undo.callback(self._lock.close)
            self.catalog = Catalog.open(settings.data / "catalog", settings.catalog_bytes)
            undo.callback(self.catalog.close)
            self._require_kind(settings)
            self._require_directory()
            undo.pop_all()
        self.lead = LEAD[settings.payloads]
        self.readers = settings.readers
        self._codec = codec_by_name(settings.codec)
        self._map_bytes = settings.payload_bytes
        self._open_payloads = open_payloads or OPEN[settings.payloads]
        self._payloads: dict[int, Payloads] = {}
        # Places that were written and will not be named, still to be freed: block bytes and keys.
        # Any thread appends; one at a time takes: freed again, a place could be another payload's by then.
        self._unnamed: deque[tuple[int, list[int]]] = deque()
        self._freeing = threading.Lock()
        self._looking = threading.Lock()  # while the payloads of a size are looked through they stay open

    def _require_directory(self) -> None:
        """Raises ``DataDirError``: now, and not when the first block is to be written."""
        try:
            make_directory(self._payload_root)
        except OSError as error:
            raise directory_error(self._payload_root, error) from error

    def _require_kind(self, settings: StoreSettings) -> None:
        found = self.catalog.claim("payloads", settings.payloads)
        if found != settings.payloads:
            raise FormatMismatch(
                f"data directory {settings.data} holds {found} payloads, not {settings.payloads};"
                f" start with payloads={found}, or remove the directory (it is a cache)"
            )

    def batch_blocks(self, block_bytes: int) -> int:
        """How many blocks of this size are written together."""
        nbytes = min(BATCH_BYTES, self._map_bytes // 32)  # two of them stay free
        return max(1, min(BATCH_BLOCKS, nbytes // block_bytes))

    @property
    def capacity_bytes(self) -> int:
        """Payload bytes that may ever be in use; the rest is LMDB's own, or set aside."""
        return self._map_bytes * 31 // 32 - self.set_aside().nbytes

    def set_aside(self) -> SetAside:
        """What of the disk turned out bad in this run."""
        found = [payloads.set_aside() for payloads in self._payloads.values()]
        return SetAside(*map(sum, zip(*found, strict=True)))

    def limit_bytes(self, block_bytes: int) -> int:
        """Payload bytes that may be in use once a batch of this block size is written.

        LMDB gives freed pages back two commits later, so two batches stay free.
        """
        return self.capacity_bytes - 2 * self.batch_blocks(block_bytes) * block_bytes

    def add_namespace(self, namespace: Namespace, epoch: int = 0) -> Registered:
        """Catalogue a namespace, with this epoch if it is new, and make ready for its blocks.

        Raises ``DiskError``.
        """
        digest = namespace.digest(self.catalog.tenant_secret(namespace.tenant))
        new = self.catalog.namespace_id(digest) is None
        number = self.catalog.add_namespace(namespace.to_json(), digest, epoch)
        if namespace.layout.block_bytes not in self._payloads:
            self.reclaim(namespace.layout.block_bytes, ())
        return Registered(number, digest, new)

    def drop_namespaces(self, digests: Sequence[bytes], notes: Mapping[bytes, bytes]) -> None:
        """Forget namespaces of which there is nothing but their records, and put notes.

        Raises ``DiskError``.
        """
        self.catalog.drop_namespaces(digests, notes)

    def drop_size(self, block_bytes: int) -> None:
        """Give up the files of a block size that no namespace has. Raises ``DiskError``."""
        with self._freeing:
            kept = [item for item in self._unnamed if item[0] != block_bytes]
            self._unnamed.clear()
            self._unnamed.extend(kept)
        with self._looking:
            payloads = self._payloads.pop(block_bytes, None)
        if payloads is not None:
            payloads.close()
            _remove(self._payload_root / str(block_bytes), "no_namespace")

    def stored_bytes(self, block_bytes: int, length: int) -> int:
        """Bytes of disk that a payload of ``length`` bytes takes."""
        return self._payloads[block_bytes].stored_bytes(length)

    def read(self, layout: LatentLayout, stored: Stored, out: Run) -> None:
        """Read a payload into ``out`` and verify it. Raises ``CorruptBlock`` or ``DiskError``."""
        began = time.monotonic()
        try:
            self._read_once(layout, stored, out)
        except CorruptBlock as error:
            # A bad place is not looked at again: through a map that could kill.
            if not stored.place.page or isinstance(error, BadPlace):
                raise
            # Perhaps only the page number is wrong: the slow way needs none.
            self._read_once(layout, replace(stored, place=Place(stored.place.key)), out)
        self._observer.read(stored.length, time.monotonic() - began)

    def _read_once(self, layout: LatentLayout, stored: Stored, out: Run) -> None:
        codec = codec_by_id(stored.codec)
        payloads = self._payloads[layout.block_bytes]
        if codec.in_place:  # straight into the slot
            payloads.read_into(stored.place, out)
        else:
            encoded = Run.fresh(self.lead, stored.length)
            payloads.read_into(stored.place, encoded)
            codec.decode_into(encoded.payload, out.payload, layout.dtype.itemsize)
        found = xxhash.xxh3_64_intdigest(out.payload)
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
        stored = self.put(layout.block_bytes, self.encode(layout, blocks))
        self.name(layout.block_bytes, blocks, stored, units)
        return stored

    def encode(self, layout: LatentLayout, blocks: Sequence[NewBlock]) -> list[Encoded]:
        """The first step of a write, from any thread: codec and checksums."""
        return [self._encode(layout, block) for block in blocks]

    def _encode(self, layout: LatentLayout, block: NewBlock) -> Encoded:
        checksum = xxhash.xxh3_64_intdigest(block.data.payload)
        encoded = self._codec.encode(block.data.payload, layout.dtype.itemsize)
        if codec_by_id(encoded.codec_id).in_place:  # the slot itself is written
            return Encoded(block.data, encoded.codec_id, checksum)
        return Encoded(Run.of(self.lead, encoded.data), encoded.codec_id, checksum)

    def put(self, block_bytes: int, encoded: Sequence[Encoded]) -> list[Stored]:
        """The second step: durable payloads of one block size; all or, with ``DiskError``, none.

        ``name`` or ``forsake`` follows.
        """
        self._free_unnamed()
        if not encoded:
            return []
        began = time.monotonic()
        places = self._payloads[block_bytes].write([item.run for item in encoded])
        self._observer.wrote(sum(item.run.length for item in encoded), time.monotonic() - began)
        return [
            Stored(place, item.run.length, item.codec, item.checksum)
            for place, item in zip(places, encoded, strict=True)
        ]

    def _free_unnamed(self) -> None:
        with self._freeing:
            while self._unnamed:
                size, keys = self._unnamed[0]
                self._payloads[size].free(keys)
                self._unnamed.popleft()

    def name(
        self,
        block_bytes: int,
        blocks: Sequence[NewBlock],
        stored: Sequence[Stored],
        units: Sequence[UnitRecord],
    ) -> None:
        """The last step: one catalogue transaction. Raises ``DiskError``; then the payloads are forsaken."""
        records = [block.record(at) for block, at in zip(blocks, stored, strict=True)]
        try:
            self.catalog.commit(blocks=records, units=units)
        except BaseException:
            self.forsake(block_bytes, stored)
            raise

    def forsake(self, block_bytes: int, stored: Sequence[Stored]) -> None:
        """Payloads that will not be named. Freed by the next ``put``: what failed now would fail again."""
        if stored:
            self._unnamed.append((block_bytes, [at.place.key for at in stored]))

    def note(self, notes: Mapping[bytes, bytes], drop: Sequence[bytes]) -> None:
        """Put and drop notes in one catalogue transaction. Raises ``DiskError``."""
        self.catalog.commit(notes=notes, drop_notes=drop)

    def drop(self, freed: Sequence[Freed]) -> None:
        """Forget blocks and their units, then free their places. Raises ``DiskError``; may be repeated."""
        self.forget(freed)
        self.free(freed)

    def forget(self, freed: Sequence[Freed]) -> None:
        """The first step of a drop: one catalogue transaction. Raises ``DiskError``."""
        self.catalog.commit(
            drop_blocks=[item.hash for item in freed if item.place is not None],
            drop_units=[item.hash for item in freed],
        )

    def free(self, freed: Sequence[Freed]) -> None:
        """The second step: the places serve other payloads. Raises ``DiskError``."""
        places: defaultdict[int, list[int]] = defaultdict(list)
        for item in freed:
            if item.place is not None:
                places[item.block_bytes].append(item.place)
        for size, keys in places.items():
            self._payloads[size].free(keys)

    def reclaim(self, block_bytes: int, named: Keys) -> set[int]:
        """Open the payloads of a block size and free those that no record names.

        Returns the named keys that are not there. One environment for each size, since
        equal sizes keep LMDB's free list from fragmenting. Raises ``DiskError``.
        """
        directory = self._payload_root / str(block_bytes)
        if _usage(directory) > self._map_bytes:
            # LMDB files do not shrink, and one that is larger than its map cannot even free pages.
            _remove(directory, "larger_than_disk_bytes")
        first = int(np.max(named, initial=0)) + 1
        payloads = self._open_payloads(directory, self._map_bytes, block_bytes, first)
        self._payloads[block_bytes] = payloads
        return payloads.retain(named)

    def missing(self, block_bytes: int, named: Keys) -> set[int]:
        """Which of these keys hold nothing any more, by the payloads' own word. Raises ``DiskError``."""
        with self._looking:
            payloads = self._payloads.get(block_bytes)
            return set() if payloads is None else payloads.missing(named)

    def sweep(self, sizes: set[int]) -> None:
        """Remove the payloads of all block sizes but these: no namespace of the catalogue has them."""
        if not self._payload_root.is_dir():
            return
        for directory in self._payload_root.iterdir():
            if directory.name.isdecimal() and int(directory.name) not in sizes:
                _remove(directory, "no_namespace")

    def close(self) -> None:
        """Close the environments and give the directory up: all of them, whatever one of them raises."""
        with contextlib.ExitStack() as ends:
            ends.callback(self._lock.close)
            ends.callback(self.catalog.close)
            for payloads in self._payloads.values():
                ends.callback(payloads.close)


def _usage(directory: Path) -> int:
    """Bytes on disk of the files in a directory, which need not exist."""
    return sum(file.lstat().st_blocks * 512 for file in directory.glob("*"))


def _remove(directory: Path, reason: str) -> None:
    log.warning("event=removed_payloads path=%s reason=%s", directory, reason)
    try:
        shutil.rmtree(directory)
    except OSError as error:
        raise DiskError(f"{directory} cannot be removed: {error}; remove it by hand") from error
