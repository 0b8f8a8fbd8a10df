"""Payloads and a catalogue that fail, lie, tear and delay on demand: a real store, a bad disk below."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvstore.catalog import BlockRecord, Catalog, UnitRecord
from kvstore.errors import DiskError
from kvstore.payloads import Keys, OpenPayloads, Payloads, Place, SetAside
from kvstore.payloads.direct import DirectFile, Run
from kvstore.payloads.kinds import open_lmdb
from kvstore.payloads.slab import SlabPayloads


class Gate:
    """A point in the course of events: who comes to it is counted, and waits while it is shut.

    So a test puts events in an order of its choosing, without a clock.
    """

    def __init__(self) -> None:
        self._news = threading.Condition()
        self._open = True
        self._arrived = 0

    @property
    def arrived(self) -> int:
        """How many have come so far, those that wait included."""
        return self._arrived

    def clear(self) -> None:
        """Shut it: who comes from now on waits."""
        self._open = False

    def set(self) -> None:
        """Open it: all go on."""
        with self._news:
            self._open = True
            self._news.notify_all()

    def come(self) -> None:
        """Be counted, and wait until it is open."""
        with self._news:
            self._arrived += 1
            self._news.notify_all()
            self._news.wait_for(lambda: self._open)

    def await_arrivals(self, count: int, timeout: float) -> bool:
        """Wait until so many have come; False after ``timeout`` seconds."""
        with self._news:
            return self._news.wait_for(lambda: self._arrived >= count, timeout)


@dataclass(eq=False)
class Faults:
    """Switches shared by all payloads of a store; may be flipped from any thread, at any time.

    ``open`` is the ``open_payloads`` of ``Store.open`` and ``Embedded``. Between a gate's
    arrivals lies one step of the disk: ``written_gate`` stands between payloads that are
    durable and the catalogue that names them, ``free_gate`` between a catalogue that has
    forgotten them and their end.
    """

    inner: OpenPayloads = open_lmdb
    fail_writes: bool = False
    fail_reads: bool = False
    fail_frees: bool = False
    fail_close: bool = False  # once everything is closed
    fail_commits: int = 0  # so many of the catalogue's next commits
    fail_listing: bool = False
    fail_sizes: set[int] = field(default_factory=set)  # writes of blocks of these bytes
    poison: list[bytes] = field(default_factory=list)  # payloads that can never be written
    # Name of a slab file, bytes from and to: these answer an error of the device, if ``open_slab`` opens it.
    bad_places: list[tuple[str, int, int]] = field(default_factory=list)
    bad_syncs: bool = False  # such a write is taken, and the file's next sync fails
    defects: int = 0  # so many of the next questions for the size of a payload end as no error should
    lie_in_reads: bool = False  # a byte is not what was written, and nobody says so
    tear_writes: bool = False  # only the first half of each payload reaches the disk, and nobody says so
    delay: float = 0.0  # seconds that each read and write takes longer
    read_gate: Gate = field(default_factory=Gate)
    write_gate: Gate = field(default_factory=Gate)
    written_gate: Gate = field(default_factory=Gate)
    free_gate: Gate = field(default_factory=Gate)
    catalog_gate: Gate = field(default_factory=Gate)  # commits that put something
    written: set[int] = field(default_factory=set)  # every key that was given out

    @property
    def reads(self) -> int:
        """Reads begun."""
        return self.read_gate.arrived

    @property
    def writes(self) -> int:
        """Writes begun."""
        return self.write_gate.arrived

    @property
    def commits(self) -> int:
        """Commits begun that put something."""
        return self.catalog_gate.arrived

    def open(self, path: Path, map_bytes: int, block_bytes: int, first_free: int) -> Payloads:
        """Payloads of ``inner`` behind these switches."""
        return FaultyPayloads(self.inner(path, map_bytes, block_bytes, first_free), self, block_bytes)

    def open_slab(self, path: Path, limit_bytes: int, block_bytes: int, first_free: int) -> Payloads:
        """``inner`` for slabs on a disk with ``bad_places``."""
        return SlabPayloads(path, limit_bytes, block_bytes, self.open_file)

    def open_file(self, path: Path, flags: int) -> DirectFile:
        """See ``OpenFile``."""
        return FaultyFile(path, flags, self)

    def guard(self, catalog: Catalog) -> Catalog:
        """The same open catalogue behind these switches."""
        return FaultyCatalog(catalog, self)


class FaultyFile(DirectFile):
    """A file on a disk with ``Faults.bad_places``."""

    def __init__(self, path: Path, flags: int, faults: Faults) -> None:
        super().__init__(path, flags)
        self._name = path.name
        self._faults = faults
        self._lost = False

    def _is_bad(self, offset: int, nbytes: int) -> bool:
        bad = ((start, end) for name, start, end in self._faults.bad_places if name == self._name)
        return any(start < offset + nbytes and offset < end for start, end in bad)

    def read(self, run: memoryview, offset: int) -> None:
        """See ``DirectFile.read``."""
        if self._is_bad(offset, len(run)):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        super().read(run, offset)

    def write(self, runs: Sequence[memoryview], offset: int) -> None:
        """See ``DirectFile.write``."""
        if self._is_bad(offset, sum(map(len, runs))):
            if not self._faults.bad_syncs:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            self._lost = True
        super().write(runs, offset)

    def sync(self) -> None:
        """See ``DirectFile.sync``."""
        lost, self._lost = self._lost, False
        if lost:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        super().sync()


class FaultyPayloads:
    """``inner`` behind the switches of ``Faults``."""

    def __init__(self, inner: Payloads, faults: Faults, block_bytes: int) -> None:
        self._inner = inner
        self._faults = faults
        self._block_bytes = block_bytes
        self.lead = inner.lead

    def write(self, items: Sequence[Run]) -> list[Place]:
        """See ``Payloads.write``."""
        self._faults.write_gate.come()
        time.sleep(self._faults.delay)
        if self._faults.fail_writes or self._block_bytes in self._faults.fail_sizes:
            raise DiskError("injected: the disk cannot be written")
        if self._faults.poison and any(bytes(item.payload) in self._faults.poison for item in items):
            raise DiskError("injected: this payload cannot be written")
        places = self._inner.write([_torn(item) for item in items] if self._faults.tear_writes else items)
        self._faults.written.update(place.key for place in places)
        self._faults.written_gate.come()
        return places

    def read_into(self, place: Place, run: Run) -> None:
        """See ``Payloads.read_into``."""
        self._faults.read_gate.come()
        time.sleep(self._faults.delay)
        if self._faults.fail_reads:
            raise DiskError("injected: the disk cannot be read")
        self._inner.read_into(place, run)
        if self._faults.lie_in_reads:
            run.payload[run.length // 2] ^= 0x10

    def free(self, keys: Sequence[int]) -> None:
        """See ``Payloads.free``."""
        self._faults.free_gate.come()
        if self._faults.fail_frees:
            raise DiskError("injected: nothing can be freed")
        self._inner.free(keys)

    def retain(self, named: Keys) -> set[int]:
        """See ``Payloads.retain``."""
        return self._inner.retain(named)

    def missing(self, keys: Keys) -> set[int]:
        """See ``Payloads.missing``."""
        if self._faults.fail_listing:
            raise DiskError("injected: payloads cannot be listed")
        return self._inner.missing(keys)

    def stored_bytes(self, length: int) -> int:
        """See ``Payloads.stored_bytes``."""
        if self._faults.defects:
            self._faults.defects -= 1
            raise RuntimeError("injected: a defect")
        return self._inner.stored_bytes(length)

    def set_aside(self) -> SetAside:
        """See ``Payloads.set_aside``."""
        return self._inner.set_aside()

    def file_bytes(self) -> int:
        """See ``Payloads.file_bytes``."""
        return self._inner.file_bytes()

    def close(self) -> None:
        """See ``Payloads.close``."""
        self._inner.close()
        if self._faults.fail_close:
            raise DiskError("injected: the disk cannot be closed")


class FaultyCatalog(Catalog):
    """An open catalogue behind the switches of ``Faults``: its commits wait and fail as they say."""

    def __init__(self, inner: Catalog, faults: Faults) -> None:
        super().__init__(inner._path, inner._file)
        self._faults = faults

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
        """See ``Catalog.commit``."""
        if blocks or units:
            self._faults.catalog_gate.come()
        if self._faults.fail_commits:
            self._faults.fail_commits -= 1
            raise DiskError("injected: the catalogue cannot be written")
        super().commit(
            blocks=blocks,
            units=units,
            drop_blocks=drop_blocks,
            drop_units=drop_units,
            notes=notes,
            drop_notes=drop_notes,
        )


def _torn(item: Run) -> Run:
    half = item.length // 2
    return Run.of(item.lead, bytes(item.payload[:half]) + bytes(item.length - half))
