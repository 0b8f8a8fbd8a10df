"""Payloads as values of one LMDB environment, and the care that LMDB files need.

Keys are places as u64 big-endian and only rise, so every put appends and a place never
names two payloads. Equal payload sizes keep LMDB's free list from fragmenting. The keys
stand a second time in a database of their own: py-lmdb reads every page of a value that a
cursor comes by, so walking the payloads' own keys would read the whole disk.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import struct
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import lmdb
import numpy as np
from numpy.typing import NDArray

from kvstore.errors import BadPlace, CorruptBlock, DiskError, InvalidArgument
from kvstore.payloads import Keys, Place, SetAside
from kvstore.payloads.direct import PAGE_BYTES, DirectFile, Run, make_directory
from kvstore.payloads.lmdb_file import LmdbDamaged, LmdbFile

_log = logging.getLogger(__name__)

KEY = struct.Struct(">Q")
_KEY_DTYPE = np.dtype(KEY.format)
_NEXT_KEY = KEY.pack(0)  # holds the next place, so that freeing the last payload does not lose it
# Header in front of a payload in its first page, by the engine's major version. The larger of the
# two keeps ``stored_bytes`` an upper bound whichever engine wrote the file.
_PAGE_HEADERS = {0: 16, 1: 24}
_PAGE_HEADER = max(_PAGE_HEADERS.values())
# LMDB needs pages to free pages (copy-on-write, free list records), and those freed come back two
# commits later. Writes leave this share of the map untouched, so that ``free`` never finds it full.
_RESERVE_SHARE = 64
_RESERVE_PAGES = 16
# A commit lists the pages it freed (8 bytes each) in one run of pages, which must be found in a
# full map where no free run is longer than a payload: so the list has to be much shorter than that.
_FREED_A_TXN = 64
_KEYS_A_TXN = 16384  # a long read transaction would keep freed pages from being used again

_BROKEN = (lmdb.CorruptedError, lmdb.PageNotFoundError, lmdb.InvalidError, lmdb.VersionMismatchError)


@dataclass(frozen=True, slots=True)
class _Environment:
    """One data file, as LMDB sees it and for reads that pass it by."""

    file: LmdbFile
    direct: DirectFile

    def close(self) -> None:
        self.direct.close()
        self.file.close()


class LmdbPayloads:
    """``Payloads`` in the LMDB environment of directory ``path``, whose file never exceeds ``map_bytes``.

    Payloads and their tree may fill all but a sixty-fourth of it. ``first_free`` is a place behind all
    that the catalogue knows. An environment that is damaged beyond use (truncated,
    deleted, its tree broken) is replaced by an empty one and counted in ``replaced``:
    its payloads are then missing, and the next writes heal them.
    Raises ``DiskError`` when the files cannot be opened.

    A value never moves until it is deleted, so its page in the file is noted once it is
    committed, and reads go past LMDB's map: direct I/O into the arena.
    """

    lead = _PAGE_HEADERS.get(lmdb.version()[0], _PAGE_HEADER)

    def __init__(self, path: Path, map_bytes: int, first_free: int = 1) -> None:
        if map_bytes < 1 << 20:
            raise InvalidArgument(f"map_bytes={map_bytes} is below 1 MiB; give the disk tier more")
        self._path = path
        self._map_bytes = map_bytes
        self._retired: list[_Environment] = []  # closed at the end: readers may still be inside
        self.replaced = 0
        # One thread for all write transactions: keys rise from one to the next, and what memory the C library
        # keeps behind one, which it does for each thread, serves the next.
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="latentkv-lmdb")
        try:
            self._env, last = self._open_or_replace()
        except (lmdb.Error, OSError) as error:
            raise DiskError(f"payloads in {path} cannot be opened: {error}") from error
        self._next = max(first_free, last + 1, 1)
        self._page = self._env.file.page_bytes
        pages = map_bytes // self._page
        self._limit_pages = pages - max(pages // _RESERVE_SHARE, _RESERVE_PAGES)

    def _open_or_replace(self) -> tuple[_Environment, int]:
        try:
            return self._open()
        except (*_BROKEN, LmdbDamaged) as error:
            self._discard(error)
            return self._open()

    def _open(self) -> tuple[_Environment, int]:
        make_directory(self._path)  # also if somebody removed it meanwhile
        file = LmdbFile(self._path, self._map_bytes, ("payloads", "places"))
        try:
            last = _last_place(file)
            return _Environment(file, DirectFile(self._path / "data.mdb", os.O_RDONLY)), last
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
        self._retired.append(self._env)
        self._env, _ = self._open()

    def _commit(self, action: Callable[[lmdb.Transaction], None]) -> None:
        """Run ``action`` in one synced write transaction, in a fresh environment if this one is broken."""
        try:
            if not self._env.file.whole():
                self._replace("truncated or deleted while open")
            try:
                self._transact(action)
            except _BROKEN as error:
                self._replace(error)
                self._transact(action)
        except (lmdb.Error, OSError, LmdbDamaged) as error:
            raise DiskError(f"payloads in {self._path}: {error}; nothing was changed") from error

    def _transact(self, action: Callable[[lmdb.Transaction], None]) -> None:
        with self._env.file.env.begin(write=True) as txn:  # an exception aborts it
            action(txn)
        # The kernel has mapped the neighbourhood of each value that was looked at. Committed it is anyway.
        with contextlib.suppress(lmdb.Error, OSError):
            self._env.file.drop_pages()

    def write(self, items: Sequence[Run]) -> list[Place]:
        """See ``Payloads.write``."""
        return self._writer.submit(self._write, items).result() if items else []

    def _write(self, items: Sequence[Run]) -> list[Place]:
        keys = list(range(self._next, self._next + len(items)))
        # Not even a commit whose outcome is unknown may see its keys used again.
        self._next += len(items)

        def put(txn: lmdb.Transaction) -> None:
            self._require_room(txn, items)
            db = self._env.file.db
            for key, item in zip(keys, items, strict=True):
                txn.put(KEY.pack(key), item.payload, append=True, db=db["payloads"])
                txn.put(KEY.pack(key), b"", append=True, db=db["places"])

        self._commit(put)
        return self._places_of(keys)

    def _places_of(self, keys: Sequence[int]) -> list[Place]:
        """Where values lie that were just committed, while their pages are still in memory."""
        file = self._env.file
        try:
            with file.env.begin(buffers=True, db=file.db["payloads"]) as txn:
                values = [txn.get(KEY.pack(key)) for key in keys]
                return [self._place_of(key, value) for key, value in zip(keys, values, strict=True)]
        except (lmdb.Error, OSError) as error:
            _log.warning("event=no_direct_reads path=%s reason=%s", self._path, error)
            return [Place(key) for key in keys]

    def _place_of(self, key: int, value: memoryview | None) -> Place:
        file = self._env.file
        page = file.page_of(value, self.lead) if value is not None else 0
        if value is not None and page:
            # Reads go past the page cache, so what stands there is of no use. Given back, its memory serves
            # the next batch; else the cache grows until the kernel slows the writer down.
            file.drop_from_cache(page, self.lead + value.nbytes)
        return Place(key, page)

    def _require_room(self, txn: lmdb.Transaction, items: Sequence[Run]) -> None:
        stats = [txn.stat(db) for db in self._env.file.db.values()]
        used = sum(s["branch_pages"] + s["leaf_pages"] + s["overflow_pages"] for s in stats)
        need = sum(self.stored_bytes(item.length) for item in items) // self._page
        if used + need > self._limit_pages:
            raise DiskError(
                f"payloads in {self._path} are full: {used} of {self._limit_pages} pages used,"
                f" {need} more needed; free some or give more disk bytes"
            )

    def read_into(self, place: Place, run: Run) -> None:
        """See ``Payloads.read_into``."""
        env = self._env
        if not env.file.whole():
            raise CorruptBlock(f"payload {place.key} in {self._path}: the file was truncated or deleted")
        try:
            if place.page:
                env.direct.read(run.used, place.page * PAGE_BYTES)
            else:
                self._get_into(env.file, place.key, run)
        except _BROKEN as error:
            raise CorruptBlock(f"payload {place.key} in {self._path}: {error}") from error
        except (lmdb.Error, OSError) as error:
            bad = isinstance(error, OSError) and error.errno == errno.EIO and env.direct.reads(0)
            kind = BadPlace if bad else DiskError
            raise kind(f"payload {place.key} in {self._path} cannot be read: {error}") from error

    def _get_into(self, file: LmdbFile, key: int, run: Run) -> None:
        with file.env.begin(buffers=True) as txn:
            value = txn.get(KEY.pack(key), db=file.db["payloads"])
            copy_value(value, run, f"payload {key} in {self._path}")

    def free(self, keys: Sequence[int]) -> None:
        """See ``Payloads.free``."""
        rest = [key for key in sorted(keys) if key > 0]
        if not rest:
            return
        self._writer.submit(self._free, rest).result()

    def _free(self, rest: Sequence[int]) -> None:
        for start in range(0, len(rest), _FREED_A_TXN):
            self._delete(rest[start : start + _FREED_A_TXN])
        # Pages freed by one commit serve the second commit after it: without a commit in between
        # the next write would find a full map, abort, and so never bring that commit about.
        self._commit(self._note_next)

    def _delete(self, keys: Sequence[int]) -> None:
        def delete(txn: lmdb.Transaction) -> None:
            for key in keys:
                for db in self._env.file.db.values():
                    txn.delete(KEY.pack(key), db=db)
            self._note_next(txn)

        self._commit(delete)

    def _note_next(self, txn: lmdb.Transaction) -> None:
        txn.put(_NEXT_KEY, KEY.pack(self._next), db=self._env.file.db["places"])

    def retain(self, named: Keys) -> set[int]:
        """See ``Payloads.retain``."""
        there, wanted = self.keys(), np.asarray(named, np.int64)
        unnamed = there[~np.isin(there, wanted)]
        if len(unnamed):
            _log.info("event=reclaimed_payloads count=%d path=%s", len(unnamed), self._path)
            self.free(unnamed.tolist())
        return set(wanted[~np.isin(wanted, there)].tolist())

    def missing(self, keys: Keys) -> set[int]:
        """See ``Payloads.missing``."""
        if not self._env.file.whole():
            return set(keys)
        asked = np.asarray(keys, np.int64)
        return set(asked[~np.isin(asked, self.keys())].tolist())

    def keys(self) -> NDArray[np.int64]:
        """Every stored key in rising order, without touching a payload's pages. Raises ``DiskError``."""
        chunks, last = [np.empty(0, np.int64)], 0
        while len(chunk := self._keys_behind(last)):
            if chunk[-1] <= last:  # or a torn tree would lead round and round
                raise DiskError(f"payloads in {self._path} are damaged: their keys do not rise; remove it")
            chunks.append(chunk)
            last = int(chunk[-1])
        return np.concatenate(chunks)

    def _keys_behind(self, last: int) -> NDArray[np.int64]:
        file = self._env.file
        try:
            if not file.whole():
                raise DiskError(f"payloads in {self._path}: the file was truncated or deleted")
            with file.env.begin(db=file.db["places"]) as txn, txn.cursor() as cursor:
                found = cursor.set_range(KEY.pack(last + 1))
                keys = islice(cursor.iternext(keys=True, values=False), _KEYS_A_TXN if found else 0)
                chunk = np.frombuffer(b"".join(keys), _KEY_DTYPE).astype(np.int64)
            file.drop_pages()
        except lmdb.Error as error:
            raise DiskError(f"payloads in {self._path} cannot be listed: {error}") from error
        return chunk

    def stored_bytes(self, length: int) -> int:
        """See ``Payloads.stored_bytes``."""
        return -(-(length + _PAGE_HEADER) // self._page) * self._page

    def set_aside(self) -> SetAside:
        """See ``Payloads.set_aside``. Which pages are used LMDB alone decides."""
        return SetAside()

    def file_bytes(self) -> int:
        """See ``Payloads.file_bytes``."""
        return self._env.file.file_bytes()

    def close(self) -> None:
        """See ``Payloads.close``."""
        self._writer.shutdown()
        for env in (*self._retired, self._env):
            env.close()


def copy_value(value: memoryview | None, run: Run, name: str) -> None:
    """Fill ``run.payload`` with a value found; raises ``CorruptBlock`` if that can't be the payload."""
    if value is None or value.nbytes != run.length:
        found = "is missing" if value is None else f"has {value.nbytes} bytes"
        raise CorruptBlock(f"{name} {found}; expected {run.length} bytes")
    # numpy copies without the GIL, so that several reads run at once.
    np.copyto(np.frombuffer(run.payload, np.uint8), np.frombuffer(value, np.uint8))


def _last_place(file: LmdbFile) -> int:
    """The highest place ever given out, as far as this environment knows; 0 for none."""
    with file.env.begin(db=file.db["places"], buffers=True) as txn, txn.cursor() as cursor:
        last: int = KEY.unpack(cursor.key())[0] if cursor.last() else 0
        noted = txn.get(_NEXT_KEY)
        return max(last, KEY.unpack(noted)[0] - 1) if noted is not None else last
