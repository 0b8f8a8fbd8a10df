"""The care that an LMDB data file needs: never shorter than its map; and where in it a value lies."""

from __future__ import annotations

import ctypes
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lmdb
import numpy as np

from kvstore.payloads.direct import PAGE_BYTES, drop_from_memory, sync_directory

_log = logging.getLogger(__name__)
_MAX_READERS = 1024
_PAGE_NUMBER_BYTES = 8  # at the start of each page
_PROOF_BYTES = 128  # of a page's start, compared between map and file
_READ_AHEAD_BYTES = 128 << 10  # of one request; Linux cuts off what is beyond its own window, which this is
_PAGES_MAX = 1 << 32  # what the catalogue can say


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
            sync_directory(path)
            sync_directory(path.parent)
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
        short = stat.st_size < self._size
        if self._whole and (short or stat.st_nlink == 0):
            # Before it is stretched: another thread would take the stretched one for whole.
            self._whole = False
            _log.warning("%s was truncated or deleted while open", self.path / "data.mdb")
        if short:
            os.ftruncate(self._fd, self._size)
        return self._whole

    def page_of(self, value: memoryview, lead: int) -> int:
        """The 4 KiB page of the file in which a value of a read transaction starts, behind ``lead`` bytes.

        0 when it starts elsewhere in a page. Sound until the value is deleted, for LMDB never
        moves a value. The touched pages are given back, or they would count as our memory.
        Raises ``OSError``.
        """
        start = np.frombuffer(value, np.uint8).ctypes.data - lead
        if start % PAGE_BYTES:  # a small value, inside a page of the tree
            return 0
        offset = self._offset_of(start, min(_PROOF_BYTES, lead + value.nbytes))
        drop_from_memory(start, lead + value.nbytes)
        return offset // PAGE_BYTES if offset is not None else 0

    def read_ahead(self) -> None:
        """Let the kernel begin to read the whole file into its cache, before a walk over all records.

        The walk itself would wait for one page after the other. Raises ``OSError``.
        """
        pages = self.env.info()["last_pgno"] + 1
        for start in range(0, pages * self.page_bytes, _READ_AHEAD_BYTES):
            os.posix_fadvise(self._fd, start, _READ_AHEAD_BYTES, os.POSIX_FADV_WILLNEED)

    def drop_pages(self) -> None:
        """Give the map's pages back, as after a walk over all records, or they would count as our memory.

        Readers that are inside fault theirs in again. Raises ``lmdb.Error`` and ``OSError``.
        """
        with self.env.begin(buffers=True) as txn, txn.cursor() as cursor:
            if not cursor.first():
                return
            inside = np.frombuffer(cursor.key(), np.uint8).ctypes.data
            start = inside - inside % self.page_bytes
            offset = self._offset_of(start, _PROOF_BYTES)
            if offset is not None:
                drop_from_memory(start - offset, self.env.info()["map_size"])

    def _offset_of(self, page: int, nbytes: int) -> int | None:
        """Where in the file the page mapped at an address is; None if that can't be proven."""
        # Each page begins with its number, and a value of its own pages follows the first one's header.
        head = ctypes.string_at(page, nbytes)
        offset = int.from_bytes(head[:_PAGE_NUMBER_BYTES], sys.byteorder) * self.page_bytes
        # Whatever an engine's header is like: what lies there in the file is what we look at, or it isn't.
        if offset // PAGE_BYTES < _PAGES_MAX and os.pread(self._fd, nbytes, offset) == head:
            return offset
        return None

    def drop_from_cache(self, page: int, nbytes: int) -> None:
        """Let the kernel forget what it caches of a value that is on disk. Raises ``OSError``."""
        os.posix_fadvise(self._fd, page * PAGE_BYTES, nbytes, os.POSIX_FADV_DONTNEED)

    def file_bytes(self) -> int:
        """Bytes that the data file takes on disk (a sparse file's size says nothing)."""
        return os.fstat(self._fd).st_blocks * 512

    def close(self) -> None:
        """Close the environment; a second call does nothing."""
        self.env.close()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
