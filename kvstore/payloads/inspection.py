"""Payloads as they lie on the disk, read and never written: what ``Payloads`` would bring back."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Protocol

import lmdb

from kvstore.errors import CorruptBlock, DiskError
from kvstore.payloads import Place
from kvstore.payloads.direct import PAGE_BYTES, DirectFile, Run
from kvstore.payloads.lmdb import KEY, LmdbPayloads, copy_value
from kvstore.payloads.slab import SlabPayloads
from kvstore.payloads.slab_places import eighths_of, slab_name, slot_bytes, split_key
from kvstore.settings import PayloadKind

log = logging.getLogger(__name__)


class Inspector(Protocol):
    """The payloads of one block size. ``read_into`` from any number of threads."""

    lead: int
    """See ``Payloads.lead``."""

    damage: str
    """Why nothing of it can be read; empty if that is not so."""

    def stored(self) -> set[int]:
        """Keys of all payloads that are there, where the files themselves say so; else none."""

    def read_into(self, place: Place, run: Run) -> None:
        """See ``Payloads.read_into``."""

    def close(self) -> None:
        """Give up the files."""


class LmdbInspector:
    """The LMDB environment in ``path``. A file that was cut short is not touched: that would kill us."""

    lead = LmdbPayloads.lead

    def __init__(self, path: Path) -> None:
        self._path = path
        self._env: lmdb.Environment | None = None
        self._direct: DirectFile | None = None
        self.damage = ""
        try:
            self._open(path)
        except (lmdb.Error, OSError) as error:
            self.close()
            self.damage = f"{path / 'data.mdb'} cannot be used: {error}"

    def _open(self, path: Path) -> None:
        size = (path / "data.mdb").stat().st_size
        self._env = lmdb.open(str(path), readonly=True, lock=False, create=False, max_dbs=2, readahead=False)
        needed = (self._env.info()["last_pgno"] + 1) * self._env.stat()["psize"]
        if size < needed:
            raise OSError(f"it has {size} of {needed} bytes")
        self._payloads = self._env.open_db(b"payloads", create=False)
        self._places = self._env.open_db(b"places", create=False)
        self._direct = DirectFile(path / "data.mdb", os.O_RDONLY)

    def stored(self) -> set[int]:
        """See ``Inspector.stored``. Raises ``DiskError``."""
        if self._env is None:
            return set()
        try:
            with self._env.begin(db=self._places) as txn, txn.cursor() as cursor:
                keys = cursor.iternext(keys=True, values=False)
                # In a broken tree anything may stand for a key.
                return {KEY.unpack(key)[0] for key in keys if len(key) == KEY.size} - {0}
        except lmdb.Error as error:
            raise DiskError(f"payloads in {self._path} cannot be listed: {error}") from error

    def read_into(self, place: Place, run: Run) -> None:
        """See ``Payloads.read_into``."""
        if self._env is None or self._direct is None:
            raise CorruptBlock(f"payload {place.key} is missing: {self.damage}")
        try:
            if place.page:
                self._direct.read(run.used, place.page * PAGE_BYTES)
                return
            with self._env.begin(buffers=True, db=self._payloads) as txn:
                copy_value(txn.get(KEY.pack(place.key)), run, f"payload {place.key}")
        except lmdb.Error as error:
            raise CorruptBlock(f"payload {place.key} in {self._path}: {error}") from error
        except OSError as error:
            raise DiskError(f"payload {place.key} in {self._path} cannot be read: {error}") from error

    def close(self) -> None:
        """See ``Inspector.close``."""
        if self._direct is not None:
            self._direct.close()
        if self._env is not None:
            self._env.close()
            self._env = None


class SlabInspector:
    """The slabs in ``path``. Which slots are in use only the catalogue knows."""

    lead = SlabPayloads.lead
    damage = ""

    def __init__(self, path: Path, block_bytes: int) -> None:
        self._path = path
        self._block = block_bytes
        self._files: dict[str, DirectFile] = {}
        for file in sorted(path.glob("slab-*")):
            try:
                self._files[file.name] = DirectFile(file, os.O_RDONLY)
            except OSError as error:  # what lies in it is found to be missing
                log.error("event=slab_left_alone path=%s reason=%s", file, error)

    def stored(self) -> set[int]:
        """See ``Inspector.stored``."""
        return set()

    def read_into(self, place: Place, run: Run) -> None:
        """See ``Payloads.read_into``."""
        eighths, number, slot = split_key(place.key)
        file = self._files.get(slab_name(eighths, number))
        if file is None or eighths_of(self._block, run.length) != eighths:
            raise CorruptBlock(
                f"payload {place.key} in {self._path} is missing, or not of {run.length} bytes"
            )
        try:
            file.read(run.used, slot * slot_bytes(self._block, eighths))
        except OSError as error:
            raise DiskError(f"payload {place.key} in {self._path} cannot be read: {error}") from error

    def close(self) -> None:
        """See ``Inspector.close``."""
        for file in self._files.values():
            file.close()


def inspect(kind: PayloadKind, path: Path, block_bytes: int) -> Inspector:
    """An inspector of the payloads in a directory, which need not exist. Raises ``DiskError``."""
    return LmdbInspector(path) if kind == "lmdb" else SlabInspector(path, block_bytes)
