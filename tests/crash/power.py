"""Power loss, simulated: what a disk may hold at any moment, by a log of real writes and syncs.

``Recording`` reads what ``recorder.c`` wrote. A ``Disk`` replays it up to some point. What was not
synced by then may be there or not, sector by sector, whatever the order it was written in; and
names of files that were made or removed may have changed or not until their directory is synced.
A write through a descriptor with O_DSYNC is on disk once it has returned.
"""

from __future__ import annotations

import os
import random
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path

SECTOR = 512
_RECORD = struct.Struct("<7Q")
_MADE = 1 << 32
_PUNCH = 2


class Op(IntEnum):
    """As in recorder.c."""

    OPEN = 1
    WRITE = 2
    TRUNCATE = 3
    ALLOCATE = 4
    SYNC_BEGIN = 5
    SYNC_END = 6
    MAKE_DIR = 7
    UNLINK = 8
    REMOVE_DIR = 9
    RENAME = 10


@dataclass(frozen=True)
class Record:
    """One call of the daemon."""

    op: Op
    file: int  # of the open file
    flags: int
    offset: int
    length: int
    sync: int
    data: bytes
    end: int  # where it ends in the log

    @property
    def path(self) -> Path:
        return Path(os.fsdecode(self.data))


def recording(log: Path) -> list[Record]:
    """All records of a log. Its daemon may have been killed in the midst of the last one."""
    raw, at, found = log.read_bytes(), 0, []
    while at + _RECORD.size <= len(raw):
        op, file, flags, offset, length, sync, left = _RECORD.unpack_from(raw, at)
        at += _RECORD.size
        data, at = raw[at : at + left], at + left
        found.append(Record(Op(op), file, flags, offset, length, sync, data, at))
    return found


@dataclass(eq=False)
class _Change:
    """Bytes, zeros or a new length of a file; ``sure`` if it was on disk when it returned."""

    offset: int
    data: bytes
    length: int | None = None  # of the file, for a truncation
    sure: bool = False


@dataclass(eq=False)
class _File:
    """What is on disk for sure, and what may be."""

    image: bytearray = field(default_factory=bytearray)
    pending: list[_Change] = field(default_factory=list)

    def add(self, change: _Change) -> None:
        self.pending.append(change)
        while self.pending and self.pending[0].sure:
            _apply(self.image, self.pending.pop(0))

    def sync(self, covered: list[_Change]) -> None:
        for change in covered:
            if change in self.pending:
                change.sure = True
        while self.pending and self.pending[0].sure:
            _apply(self.image, self.pending.pop(0))


@dataclass(eq=False)
class _Naming:
    """A name made or removed in a directory."""

    path: Path
    target: _File | None  # None: a directory
    gone: bool = False


Choice = Callable[[int], Iterator[bool]]
"""For a change of so many sectors, which of them reached the disk."""


def nothing(sectors: int) -> Iterator[bool]:
    """No unsynced sector did."""
    return iter([False] * sectors)


def everything(sectors: int) -> Iterator[bool]:
    """All did: nothing but the process has died."""
    return iter([True] * sectors)


def some(rng: random.Random) -> Choice:
    """Whole writes reached it or not, in any order, and some in part."""

    def choose(sectors: int) -> Iterator[bool]:
        share = rng.choice([0.0, 1.0, 0.5])
        return iter([rng.random() < share for _ in range(sectors)])

    return choose


class Disk:
    """Files and directories below ``root``, which is there from the start."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._names: dict[Path, _File | None] = {}  # as the daemon sees them
        self._sure: dict[Path, _File | None] = {}  # as they are on disk for sure
        self._namings: list[_Naming] = []  # that may be on disk
        self._open: dict[int, _File | None] = {}
        self._paths: dict[int, Path] = {}
        self._syncs: dict[int, tuple[list[_Change], list[_Naming]]] = {}

    def replay(self, record: Record) -> None:
        """The next call has returned."""
        match record.op:
            case Op.OPEN:
                self._opened(record)
            case Op.WRITE | Op.TRUNCATE | Op.ALLOCATE:
                target = self._open[record.file]
                assert target is not None
                target.add(_change(record))
            case Op.SYNC_BEGIN:
                self._begin(record)
            case Op.SYNC_END:
                self._end(record)
            case Op.MAKE_DIR:
                self._name(_Naming(record.path, None))
            case Op.UNLINK | Op.REMOVE_DIR:
                self._name(_Naming(record.path, self._names.get(record.path), gone=True))
            case Op.RENAME:
                raise NotImplementedError

    def _opened(self, record: Record) -> None:
        if record.flags & _MADE:
            self._name(_Naming(record.path, _File()))
        self._open[record.file] = self._names.get(record.path)
        self._paths[record.file] = record.path

    def _name(self, naming: _Naming) -> None:
        self._namings.append(naming)
        _rename(self._names, naming)

    def _begin(self, record: Record) -> None:
        target, path = self._open[record.file], self._paths[record.file]
        changes = list(target.pending) if target is not None else []
        namings = [naming for naming in self._namings if naming.path.parent == path]
        self._syncs[record.sync] = changes, namings

    def _end(self, record: Record) -> None:
        changes, namings = self._syncs.pop(record.sync)
        target = self._open.get(record.file)
        if target is not None:
            target.sync(changes)
        for naming in namings:
            if naming in self._namings:
                self._namings.remove(naming)
                _rename(self._sure, naming)

    def lose_power(self, into: Path, choice: Choice, under_way: Record | None = None) -> None:
        """Make what is on the disk now below ``into``; ``under_way`` is a write that has not returned."""
        names = dict(self._sure)
        for naming in self._namings:
            if next(choice(1)):
                _rename(names, naming)
        hit = self._open[under_way.file] if under_way and under_way.op is Op.WRITE else None
        for path, target in sorted(names.items()):
            place = into / path.relative_to(self._root)
            if not place.parent.is_dir():
                continue  # its directory's own name was lost
            if target is None:
                place.mkdir()
                continue
            image = bytearray(target.image)
            for change in target.pending:
                _apply_sectors(image, change, choice)
            if under_way is not None and target is hit:
                _apply_sectors(image, _change(under_way, sure=False), choice)
            _write_sparse(place, image)


def _rename(names: dict[Path, _File | None], naming: _Naming) -> None:
    if naming.gone:
        names.pop(naming.path, None)
    else:
        names[naming.path] = naming.target


def _change(record: Record, *, sure: bool | None = None) -> _Change:
    if record.op is Op.TRUNCATE:
        return _Change(0, b"", record.offset)
    if record.op is Op.ALLOCATE:
        if record.flags & _PUNCH:
            return _Change(record.offset, bytes(record.length))
        return _Change(0, b"", -(record.offset + record.length))  # never shorter
    synced = bool(record.flags & (os.O_DSYNC | os.O_SYNC))
    return _Change(record.offset, record.data, sure=synced if sure is None else sure)


def _apply(image: bytearray, change: _Change) -> None:
    if change.length is not None:
        length = max(-change.length, len(image)) if change.length < 0 else change.length
        del image[length:]
        image.extend(bytes(length - len(image)))
        return
    end = change.offset + len(change.data)
    image.extend(bytes(max(0, end - len(image))))
    image[change.offset : end] = change.data


def _apply_sectors(image: bytearray, change: _Change, choice: Choice) -> None:
    if change.sure or change.length is not None:
        if change.sure or next(choice(1)):
            _apply(image, change)
        return
    first, last = change.offset // SECTOR, -(-(change.offset + len(change.data)) // SECTOR)
    for sector, there in zip(range(first, last), choice(last - first), strict=True):
        if there:
            start = max(change.offset, sector * SECTOR)
            stop = min(change.offset + len(change.data), (sector + 1) * SECTOR)
            part = change.data[start - change.offset : stop - change.offset]
            _apply(image, _Change(start, part))


def _write_sparse(path: Path, image: bytearray) -> None:
    with open(path, "wb") as file:
        for at in range(0, len(image), 1 << 16):
            piece = image[at : at + (1 << 16)]
            if piece.count(0) < len(piece):
                file.seek(at)
                file.write(piece)
        file.truncate(len(image))
