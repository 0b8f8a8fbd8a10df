"""Payloads as values of one LMDB environment, and the care that LMDB files need.

Keys are places as u64 big-endian and only rise, so every put appends and a place never
names two payloads. Equal payload sizes keep LMDB's free list from fragmenting. The keys
stand a second time in a database of their own: py-lmdb reads every page of a value that a
cursor comes by, so walking the payloads' own keys would read the whole disk.
"""

from __future__ import annotations

import logging
import os
import struct
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import lmdb
import numpy as np

from kvstore.errors import CorruptBlock, DiskError, InvalidArgument
from kvstore.payloads import Place, ReadableBuffer

_log = logging.getLogger(__name__)

_KEY = struct.Struct(">Q")
_NEXT_KEY = _KEY.pack(0)  # holds the next place, so that freeing the last payload does not lose it
# Header in front of a payload's first page: 16 bytes in the 0.9 engine, 24 in 1.0. The larger of
# the two keeps ``stored_bytes`` an upper bound whichever engine wrote the file.
_PAGE_HEADER = 24
# LMDB needs pages to free pages (copy-on-write, free list records), and those freed come back two
# commits later. Writes leave this share of the map untouched, so that ``free`` never finds it full.
_RESERVE_SHARE = 64
_RESERVE_PAGES = 16
# A commit lists the pages it freed (8 bytes each) in one run of pages, which must be found in a
# full map where no free run is longer than a payload: so the list has to be much shorter than that.
_FREED_A_TXN = 64
_MAX_READERS = 1024
_KEYS_A_TXN = 4096  # a long read transaction would keep freed pages from being used again

_BROKEN = (lmdb.CorruptedError, lmdb.PageNotFoundError, lmdb.InvalidError, lmdb.VersionMismatchError)


class LmdbDamaged(Exception):
    """An LMDB data file is shorter than the tree inside it."""


class LmdbFile:
    """One LMDB environment whose data file always covers its whole map.

    LMDB reads through a mapping, and touching one past the end of its file kills the
    process with SIGBUS. So the file is stretched to the map's size once (sparse, it
    takes no space), and a file that is shorter than that was truncated by somebody.
    Pages that come back as zeros are found by LMDB itself (``CorruptedError``).
    """

    def __init__(self, path: Path, map_bytes: int, names: Sequence[str]) -> None:
        """Open or create the environment in directory ``path`` and the databases ``names`` in it.

        Raises ``lmdb.Error``, ``OSError``, and ``LmdbDamaged`` for a file cut short.
        """
        self.path = path
        self.env = lmdb.open(
            str(path),
            map_size=map_bytes,
            readahead=False,
            max_readers=_MAX_READERS,
            max_dbs=len(names),
            mode=0o700,
        )
        self._fd = -1
        self._whole = True
        try:
            self._fd = os.open(path / "data.mdb", os.O_RDWR | os.O_CLOEXEC)
            self.page_bytes = self.env.stat()["psize"]
            self._stretch(map_bytes)
            self.db: dict[str, Any] = {name: self.env.open_db(name.encode()) for name in names}
            _sync_directory(path)
            _sync_directory(path.parent)
        except BaseException:
            self.close()
            raise

    def _stretch(self, map_bytes: int) -> None:
        size = os.fstat(self._fd).st_size
        needed = (self.env.info()["last_pgno"] + 1) * self.page_bytes
        if size < needed:
            raise LmdbDamaged(f"{self.path / 'data.mdb'} has {size} of {needed} bytes")
        self._size = max(size, map_bytes)
        os.ftruncate(self._fd, self._size)

    def grow(self, map_bytes: int) -> None:
        """Enlarge the map. No transaction may be open. Raises ``lmdb.Error`` and ``OSError``."""
        self.env.set_mapsize(map_bytes)
        self._stretch(map_bytes)

    def whole(self) -> bool:
        """Whether the file was never seen truncated or deleted; a truncated one is stretched again.

        Asked before each use of the map. What is cut off between the question and the
        use can still kill; only reads that bypass the map would be safe from that.
        """
        stat = os.fstat(self._fd)
        if stat.st_size < self._size:
            os.ftruncate(self._fd, self._size)
        if self._whole and (stat.st_size < self._size or stat.st_nlink == 0):
            self._whole = False
            _log.warning("%s was truncated or deleted while open", self.path / "data.mdb")
        return self._whole

    def file_bytes(self) -> int:
        """Bytes that the data file takes on disk (a sparse file's size says nothing)."""
        return os.fstat(self._fd).st_blocks * 512

    def close(self) -> None:
        """Close the environment; a second call does nothing."""
        self.env.close()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _sync_directory(path: Path) -> None:
    # A new file's name is durable only when its directory is.
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


class LmdbPayloads:
    """``Payloads`` in the LMDB environment of directory ``path``, whose file never exceeds ``map_bytes``.

    Payloads and their tree may fill all but a sixty-fourth of it. ``first_free`` is a place behind all
    that the catalogue knows. An environment that is damaged beyond use (truncated,
    deleted, its tree broken) is replaced by an empty one and counted in ``replaced``:
    its payloads are then missing, and the next writes heal them.
    Raises ``DiskError`` when the files cannot be opened.
    """

    def __init__(self, path: Path, map_bytes: int, first_free: Place = 1) -> None:
        if map_bytes < 1 << 20:
            raise InvalidArgument(f"map_bytes={map_bytes} is below 1 MiB; give the disk tier more")
        self._path = path
        self._map_bytes = map_bytes
        self._retired: list[LmdbFile] = []  # closed at the end: readers may still be inside
        self.replaced = 0
        try:
            path.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._file, last = self._open_or_replace()
        except (lmdb.Error, OSError) as error:
            raise DiskError(f"payloads in {path} cannot be opened: {error}") from error
        self._next = max(first_free, last + 1, 1)
        self._page = self._file.page_bytes
        pages = map_bytes // self._page
        self._limit_pages = pages - max(pages // _RESERVE_SHARE, _RESERVE_PAGES)

    def _open_or_replace(self) -> tuple[LmdbFile, Place]:
        try:
            return self._open()
        except (*_BROKEN, LmdbDamaged) as error:
            self._discard(error)
            return self._open()

    def _open(self) -> tuple[LmdbFile, Place]:
        file = LmdbFile(self._path, self._map_bytes, ("payloads", "places"))
        try:
            return file, _last_place(file)
        except BaseException:
            file.close()
            raise

    def _discard(self, why: object) -> None:
        self.replaced += 1
        _log.warning("payloads in %s are damaged and start empty: %s", self._path, why)
        for name in ("data.mdb", "lock.mdb"):
            (self._path / name).unlink(missing_ok=True)

    def _replace(self, why: object) -> None:
        self._discard(why)
        self._retired.append(self._file)
        self._file, _ = self._open()

    def _commit(self, action: Callable[[lmdb.Transaction], None]) -> None:
        """Run ``action`` in one synced write transaction, in a fresh environment if this one is broken."""
        try:
            if not self._file.whole():
                self._replace("truncated or deleted while open")
            try:
                self._transact(action)
            except _BROKEN as error:
                self._replace(error)
                self._transact(action)
        except (lmdb.Error, OSError, LmdbDamaged) as error:
            raise DiskError(f"payloads in {self._path}: {error}; nothing was changed") from error

    def _transact(self, action: Callable[[lmdb.Transaction], None]) -> None:
        with self._file.env.begin(write=True) as txn:  # an exception aborts it
            action(txn)

    def write(self, items: Sequence[ReadableBuffer]) -> list[Place]:
        if not items:
            return []
        places = list(range(self._next, self._next + len(items)))
        # Not even a commit whose outcome is unknown may see its places used again.
        self._next += len(items)

        def put(txn: lmdb.Transaction) -> None:
            self._require_room(txn, items)
            for place, item in zip(places, items, strict=True):
                txn.put(_KEY.pack(place), item, append=True, db=self._file.db["payloads"])
                txn.put(_KEY.pack(place), b"", append=True, db=self._file.db["places"])

        self._commit(put)
        return places

    def _require_room(self, txn: lmdb.Transaction, items: Sequence[ReadableBuffer]) -> None:
        stats = [txn.stat(db) for db in self._file.db.values()]
        used = sum(s["branch_pages"] + s["leaf_pages"] + s["overflow_pages"] for s in stats)
        need = sum(self.stored_bytes(memoryview(item).nbytes) for item in items) // self._page
        if used + need > self._limit_pages:
            raise DiskError(
                f"payloads in {self._path} are full: {used} of {self._limit_pages} pages used,"
                f" {need} more needed; free some or give more disk bytes"
            )

    def read_into(self, place: Place, length: int, out: memoryview) -> None:
        file = self._file
        if length > out.nbytes:
            raise CorruptBlock(f"payload {place} of {length} bytes exceeds the block's {out.nbytes}")
        if not file.whole():
            raise CorruptBlock(f"payload {place} in {self._path}: the file was truncated or deleted")
        try:
            with file.env.begin(buffers=True) as txn:
                value = txn.get(_KEY.pack(place), db=file.db["payloads"])
                if value is None or value.nbytes != length:
                    found = "is missing" if value is None else f"has {value.nbytes} bytes"
                    raise CorruptBlock(f"payload {place} in {self._path} {found}; expected {length} bytes")
                # numpy copies without the GIL, so that several reads run at once.
                np.copyto(np.frombuffer(out, np.uint8, length), np.frombuffer(value, np.uint8))
        except _BROKEN as error:
            raise CorruptBlock(f"payload {place} in {self._path}: {error}") from error
        except lmdb.Error as error:
            raise DiskError(f"payload {place} in {self._path} cannot be read: {error}") from error

    def free(self, places: Sequence[Place]) -> None:
        rest = [place for place in sorted(places) if place > 0]
        if not rest:
            return
        for start in range(0, len(rest), _FREED_A_TXN):
            self._delete(rest[start : start + _FREED_A_TXN])
        # Pages freed by one commit serve the second commit after it: without a commit in between
        # the next write would find a full map, abort, and so never bring that commit about.
        self._commit(self._note_next)

    def _delete(self, places: Sequence[Place]) -> None:
        def delete(txn: lmdb.Transaction) -> None:
            for place in places:
                for db in self._file.db.values():
                    txn.delete(_KEY.pack(place), db=db)
            self._note_next(txn)

        self._commit(delete)

    def _note_next(self, txn: lmdb.Transaction) -> None:
        txn.put(_NEXT_KEY, _KEY.pack(self._next), db=self._file.db["places"])

    def places(self) -> Iterator[Place]:
        last = 0
        while chunk := self._keys_behind(last):
            yield from chunk
            last = chunk[-1]

    def _keys_behind(self, last: Place) -> list[Place]:
        file = self._file
        try:
            if not file.whole():
                raise DiskError(f"payloads in {self._path}: the file was truncated or deleted")
            with file.env.begin(db=file.db["places"], buffers=True) as txn, txn.cursor() as cursor:
                if not cursor.set_range(_KEY.pack(last + 1)):
                    return []
                keys = islice(cursor.iternext(keys=True, values=False), _KEYS_A_TXN)
                return [_KEY.unpack(key)[0] for key in keys]
        except lmdb.Error as error:
            raise DiskError(f"payloads in {self._path} cannot be listed: {error}") from error

    def stored_bytes(self, length: int) -> int:
        return -(-(length + _PAGE_HEADER) // self._page) * self._page

    def file_bytes(self) -> int:
        return self._file.file_bytes()

    def close(self) -> None:
        for file in (*self._retired, self._file):
            file.close()


def _last_place(file: LmdbFile) -> Place:
    """The highest place ever given out, as far as this environment knows; 0 for none."""
    with file.env.begin(db=file.db["places"], buffers=True) as txn, txn.cursor() as cursor:
        last: Place = _KEY.unpack(cursor.key())[0] if cursor.last() else 0
        noted = txn.get(_NEXT_KEY)
        return max(last, _KEY.unpack(noted)[0] - 1) if noted is not None else last
