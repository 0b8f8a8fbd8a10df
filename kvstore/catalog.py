"""The catalogue: what the store holds. One LMDB environment, and the truth after a restart.

A payload is written before the commit that names it and freed after the commit that
drops it, so every record names a whole payload. Records are packed to a fixed size and
carry a checksum of key and fields; one that does not verify is skipped and counted.
"""

from __future__ import annotations

import logging
import mmap
import secrets
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from hashlib import blake2b
from itertools import chain, islice
from pathlib import Path
from typing import Any, Self, TypeVar

import lmdb
import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from kvstore.directory import directory_error
from kvstore.errors import DataDirError, DiskError, FormatMismatch
from kvstore.hashing import HASH_BYTES
from kvstore.namespace import DIGEST_BYTES
from kvstore.packed import BLOCK_DTYPE, UNIT_DTYPE, BlockRecord, UnitRecord
from kvstore.payloads.lmdb_file import LmdbDamaged, LmdbFile

__all__ = ["BLOCK_DTYPE", "BlockRecord", "Catalog", "UnitRecord", "epoch_key"]

log = logging.getLogger(__name__)

FORMAT_VERSION = 2  # of the whole data directory
_OLDER = (b"1",)  # formats that this version makes its own: 1 had no notes
SECRET_BYTES = 32

_SECTOR = 512  # bytes that a disk writes whole or not at all
_RECORDS_A_TXN = 4096  # as many are in memory as objects
_ID = struct.Struct("<I")
_CHECK = struct.Struct("<Q")
_LAST = b"last namespace"
EPOCH = struct.Struct("<Q")
Result = TypeVar("Result")


class Catalog:
    """The open catalogue. One thread at a time; ``skipped`` counts damaged records met so far."""

    @classmethod
    def open(cls, path: Path, map_bytes: int) -> Self:
        """Open or create the catalogue in ``path``, a directory inside the data directory we have locked.

        ``map_bytes`` is its first size; it grows by itself. Raises ``FormatMismatch``,
        ``DataDirReadOnly`` and ``DataDirError``.
        """
        try:
            path.mkdir(parents=True, exist_ok=True, mode=0o700)
            file = _open_file(path, map_bytes)
        except lmdb.VersionMismatchError as error:
            raise FormatMismatch(_mismatch(path, f"another LMDB ({error})")) from error
        except LmdbDamaged as error:
            raise DataDirError(
                f"the catalogue is truncated: {error}; remove {path.parent} to start empty"
            ) from error
        except (lmdb.Error, OSError) as error:
            raise directory_error(path, error) from error
        try:
            return cls(path, file)
        except BaseException:
            file.close()
            raise

    def __init__(self, path: Path, file: LmdbFile) -> None:
        self.skipped = 0
        self._ids: dict[bytes, int] | None = None  # of namespaces, by digest; None until they are read
        self._last = 0  # the last id that was given to a namespace
        self._path = path
        self._file = file
        self._env = file.env
        self._info, self._namespaces, self._blocks, self._units, self._notes = file.db.values()
        try:
            self._check_format()
            file.read_ahead()  # whoever opens a catalogue reads all of it next
        except (lmdb.Error, OSError) as error:
            raise directory_error(path, error) from error

    def _check_format(self) -> None:
        ours = str(FORMAT_VERSION).encode()
        with self._env.begin(write=True, db=self._info) as txn:
            found = bytes(txn.get(b"format", b""))
            if found not in (ours, b"", *_OLDER):
                raise FormatMismatch(_mismatch(self._path, f"format {found.decode(errors='replace')}"))
            if found != ours:
                txn.put(b"format", ours)

    def _write(self, action: Callable[[lmdb.Transaction], object]) -> None:
        """Run ``action`` in one synced transaction, with a larger map when it does not fit."""
        try:
            while True:
                try:
                    self._file.whole()  # stretches a truncated file, so that nothing dies of SIGBUS
                    self._require_name()
                    with self._env.begin(write=True) as txn:
                        action(txn)
                    return
                except lmdb.MapFullError:
                    self._file.grow(2 * self._env.info()["map_size"])
        except (lmdb.Error, OSError, LmdbDamaged) as error:
            raise DiskError(f"catalogue of {self._path}: {error}; nothing was changed") from error

    def _require_name(self) -> None:
        # What is written to a file without a name is gone with this process: not durable, then.
        if not (self._path / "data.mdb").exists():
            raise LmdbDamaged("its file was removed; start again, with an empty store if it is not put back")

    def claim(self, name: str, value: str) -> str:
        """The value under ``name``, which is ``value`` if there was none. Raises ``DiskError``."""
        return self._keep(_claim(name), value.encode()).decode(errors="replace")

    def claimed(self, name: str) -> str | None:
        """The value under ``name``, if there is one. Raises ``DiskError``."""
        known = self._kept(_claim(name))
        return None if known is None else known.decode(errors="replace")

    def tenant_secret(self, tenant: str) -> bytes:
        """The 32 secret bytes of this tenant. Raises ``DiskError``."""
        # Hashed, since a name may be longer than LMDB's keys.
        name = blake2b(tenant.encode(errors="surrogatepass"), digest_size=32).digest()
        # Those that older versions made are noted; others follow from one secret, so no tenant leaves a note.
        known = self._kept(b"tenant/" + name)
        if known is not None:
            return known
        secret = self._keep(b"secret", secrets.token_bytes(SECRET_BYTES))
        return blake2b(name, key=secret, digest_size=SECRET_BYTES, person=b"latentkv-tenant").digest()

    def _keep(self, key: bytes, fresh: bytes) -> bytes:
        """What ``info`` has under ``key``, which is ``fresh`` from now on if it had nothing."""
        known = self._kept(key)
        if known is not None:
            return known
        self._write(lambda txn: txn.put(key, fresh, db=self._info))
        return fresh

    def _kept(self, key: bytes) -> bytes | None:
        value = self._read(lambda txn: txn.get(key, db=self._info))
        return None if value is None else bytes(value)

    def namespaces(self) -> list[tuple[int, str, bytes]]:
        """Id, canonical JSON and digest of every namespace, by rising id. Raises ``DiskError``."""
        found: list[tuple[int, str, bytes]] = []
        for key, value in self._scan(self._namespaces):
            # Ids are never reused, so what outlives a namespace, damaged or dropped, cannot join another.
            self._last = max(self._last, int.from_bytes(key[: _ID.size], "little"))
            try:
                body = _unseal(key, value)
                found.append((_ID.unpack(key)[0], body[DIGEST_BYTES:].decode(), body[:DIGEST_BYTES]))
            except (struct.error, ValueError):
                self.skipped += 1
        self._last = max(self._last, int.from_bytes(self._kept(_LAST) or b"", "little"))
        self._ids = {digest: number for number, _, digest in found}
        return sorted(found)

    def _registered(self) -> dict[bytes, int]:
        """Ids of the namespaces by digest. All are read once; from then on adding one reads nothing."""
        if self._ids is None:
            self.namespaces()
        assert self._ids is not None
        return self._ids

    def namespace_id(self, digest: bytes) -> int | None:
        """Id of the namespace with this digest, if there is one. Raises ``DiskError``."""
        return self._registered().get(digest)

    def add_namespace(self, json: str, digest: bytes, epoch: int = 0) -> int:
        """Id of the namespace with this digest, a new one if it is new, with this epoch.

        Raises ``DiskError``.
        """
        ids = self._registered()
        if digest in ids:
            return ids[digest]
        number = self._last + 1

        def add(txn: lmdb.Transaction) -> None:
            txn.put(_LAST, _ID.pack(number), db=self._info)
            _put(txn, self._namespaces, _ID.pack(number), digest + json.encode())
            if epoch:
                _put(txn, self._notes, epoch_key(number), EPOCH.pack(epoch))

        self._write(add)
        self._last = ids[digest] = number
        return number

    def drop_namespaces(self, digests: Sequence[bytes], notes: Mapping[bytes, bytes]) -> None:
        """Forget namespaces of which there is nothing but their records, and put notes.

        Raises ``DiskError``.
        """
        ids = self._registered()
        gone = {digest: ids[digest] for digest in digests if digest in ids}

        def drop(txn: lmdb.Transaction) -> None:
            txn.put(_LAST, _ID.pack(self._last), db=self._info)
            for number in gone.values():
                txn.delete(_ID.pack(number), db=self._namespaces)
                txn.delete(epoch_key(number), db=self._notes)
            for key, body in notes.items():
                _put(txn, self._notes, key, body)

        self._write(drop)
        for digest in gone:
            del ids[digest]

    def commit(
        self,
        *,
        blocks: Sequence[BlockRecord] = (),
        units: Sequence[UnitRecord] = (),
        drop_blocks: Sequence[bytes] = (),
        drop_units: Sequence[bytes] = (),
        notes: Mapping[bytes, bytes] | None = None,
        drop_notes: Sequence[bytes] = (),
    ) -> None:
        """Drop, then put, in one durable transaction: all of it or, with ``DiskError``, nothing.

        Dropping what is unknown does nothing. What is put replaces what was there.
        """
        if not (blocks or units or drop_blocks or drop_units or notes or drop_notes):
            return

        def change(txn: lmdb.Transaction) -> None:
            for key in drop_blocks:
                txn.delete(key, db=self._blocks)
            for key in drop_units:
                txn.delete(key, db=self._units)
            for key in drop_notes:
                txn.delete(key, db=self._notes)
            for block in blocks:
                _put(txn, self._blocks, block.hash, block.pack())
            for unit in units:
                _put(txn, self._units, unit.hash, unit.pack())
            for key, body in (notes or {}).items():
                _put(txn, self._notes, key, body)

        self._write(change)

    def notes(self, prefix: bytes) -> Iterator[tuple[bytes, bytes | None]]:
        """The rest of the key and the value of what was noted under a prefix; None if it is damaged.

        Raises ``DiskError``. Commit nothing while iterating.
        """
        for key, value in self._scan(self._notes, behind=prefix):
            if not key.startswith(prefix):
                return
            try:
                yield key[len(prefix) :], _unseal(key, value)
            except ValueError:
                self.skipped += 1
                yield key[len(prefix) :], None

    def blocks(self) -> Iterator[NDArray[np.void]]:
        """All blocks as arrays of ``BLOCK_DTYPE``, some thousands each, by rising hash.

        Raises ``DiskError``. Commit nothing while iterating.
        """
        return self._records(self._blocks, BLOCK_DTYPE)

    def units(self) -> Iterator[UnitRecord]:
        """All units. Raises ``DiskError``. Commit nothing while iterating."""
        for records in self._records(self._units, UNIT_DTYPE):
            yield from (UnitRecord(*fields) for fields in records.tolist())

    def _records(self, db: Any, fields: np.dtype[np.void]) -> Iterator[NDArray[np.void]]:
        """The sound records of a database, in arrays of bounded length."""
        for pairs in self._chunks(db):
            records = _sound(pairs, fields)
            self.skipped += len(pairs) - len(records)
            yield records

    def _scan(self, db: Any, behind: bytes = b"") -> Iterator[tuple[bytes, bytes]]:
        return chain.from_iterable(self._chunks(db, behind))

    def _chunks(self, db: Any, last: bytes = b"") -> Iterator[list[tuple[bytes, bytes]]]:
        while pairs := self._pairs_behind(db, last):
            if pairs[-1][0] <= last:  # or a torn tree would lead round and round
                raise DiskError(
                    f"catalogue of {self._path} is damaged, for its keys do not rise;"
                    f" remove {self._path.parent} to start empty"
                )
            yield pairs
            last = pairs[-1][0]

    def _pairs_behind(self, db: Any, last: bytes) -> list[tuple[bytes, bytes]]:
        # Short transactions: a suspended iterator must not keep an old snapshot alive.
        def pairs(txn: lmdb.Transaction) -> list[tuple[bytes, bytes]]:
            with txn.cursor(db) as cursor:
                behind: Any = cursor.iternext() if cursor.set_range(last + b"\0") else ()
                return list(islice(behind, _RECORDS_A_TXN))

        found = self._read(pairs)
        self._file.drop_pages()
        return found

    def _read(self, action: Callable[[lmdb.Transaction], Result]) -> Result:
        try:
            self._file.whole()
            with self._env.begin() as txn:
                return action(txn)
        except (lmdb.Error, OSError) as error:
            raise DiskError(f"catalogue of {self._path} cannot be read: {error}") from error

    def close(self) -> None:
        """Close the files; a second call does nothing."""
        self._file.close()


def epoch_key(number: int) -> bytes:
    """The key of the note that has the epoch of a namespace."""
    return b"epoch/" + _ID.pack(number)


def _claim(name: str) -> bytes:
    return b"claim/" + name.encode()


def _open_file(path: Path, map_bytes: int) -> LmdbFile:
    databases = ("info", "namespaces", "blocks", "units", "notes")
    try:
        return LmdbFile(path, map_bytes, databases)
    except (lmdb.InvalidError, LmdbDamaged):
        if not _unfinished(path):
            raise
        log.warning("event=unfinished_catalogue path=%s", path)
        (path / "data.mdb").unlink()
        return LmdbFile(path, map_bytes, databases)


def _unfinished(path: Path) -> bool:
    """Whether power was lost while the catalogue was made: payloads come once it is on disk."""
    with open(path / "data.mdb", "rb") as file:
        pages = file.read(2 * mmap.PAGESIZE)  # with the first sectors of which LMDB begins
    torn = len(pages) < 2 * mmap.PAGESIZE or not (
        any(pages[:_SECTOR]) and any(pages[mmap.PAGESIZE :][:_SECTOR])
    )
    return torn and len(pages) % _SECTOR == 0 and not (path.parent / "payloads").exists()


def _mismatch(path: Path, found: str) -> str:
    return (
        f"data directory {path.parent} was written by {found}, this version reads format {FORMAT_VERSION};"
        " remove the directory (it is a cache) or run the version that wrote it"
    )


def _put(txn: lmdb.Transaction, db: Any, key: bytes, body: bytes) -> None:
    txn.put(key, body + _CHECK.pack(xxh3_64_intdigest(key + body)), db=db)


def _sound(pairs: Sequence[tuple[bytes, bytes]], fields: np.dtype[np.void]) -> NDArray[np.void]:
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
    sound: NDArray[np.void] = found["record"][digests == found["check"]]
    return sound


def _unseal(key: bytes, value: bytes) -> bytes:
    body, check = value[: -_CHECK.size], value[-_CHECK.size :]
    if check != _CHECK.pack(xxh3_64_intdigest(key + body)):
        raise ValueError("checksum")
    return body
