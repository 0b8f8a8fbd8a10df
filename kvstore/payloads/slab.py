"""Payloads in slabs: preallocated files cut in equal, page-aligned slots.

Direct I/O both ways between the arena and the disk, several writes in flight. A slab file
holds nothing but payloads: which slots are in use only the catalogue knows, and says so
at start (``retain``). Encoded payloads have sizes in eighths of a block, and each size
has slabs of its own, so that no slot is larger than what lies in it. When the disk is full
of another size's free slots, their blocks are given back to the file system.
"""

from __future__ import annotations

import errno
import re
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvstore.errors import BadPlace, CorruptBlock, DiskError, InvalidArgument
from kvstore.payloads import Keys, Place, SetAside
from kvstore.payloads.bad_places import PLACES_TRIED, BadPlaces
from kvstore.payloads.direct import (
    DirectFile,
    OpenFile,
    Run,
    make_directory,
    sync_directory,
)
from kvstore.payloads.slab_file import Slab
from kvstore.payloads.slab_places import (
    EIGHTHS,
    RUN_SLOTS,
    SLOT_BITS,
    SlotWrite,
    eighths_of,
    slab_name,
    slot_bytes,
    split_key,
)

__all__ = ["RUN_SLOTS", "SlabPayloads"]

SLAB_BYTES = 256 << 20
SLABS = 256  # about as many files are open at a time, so slabs of a large disk are larger
WRITERS = 4  # writes in flight
_RESERVE_SHARE = 64  # of the limit, left for what the file system needs to know where slots lie
# What is wrong with more than one file, or with more than one place.
_NOT_THE_FILE = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EROFS}
_NOT_THE_PLACE = {*_NOT_THE_FILE, errno.ENOSPC, errno.EDQUOT}
_NAME = re.compile(r"slab-([1-8])-(0|[1-9]\d{0,9})")


class SlabPayloads:
    """``Payloads`` of one block size in directory ``path``, at most ``limit_bytes`` of files.

    A place's key is ``(slab << 24 | slot) * 8 + eighths - 1``. ``retain`` must come before
    anything else. Raises ``DiskError`` when the directory cannot be used.
    """

    lead = 0

    def __init__(
        self, path: Path, limit_bytes: int, block_bytes: int, open_file: OpenFile = DirectFile
    ) -> None:
        if limit_bytes < 1 << 20:
            raise InvalidArgument(f"limit_bytes={limit_bytes} is below 1 MiB; give the disk tier more")
        self._path = path
        self._limit = limit_bytes - limit_bytes // _RESERVE_SHARE
        self._slab_bytes = min(limit_bytes // 16, max(SLAB_BYTES, limit_bytes // SLABS))
        self._block = block_bytes
        self._open_file = open_file
        self._bad = BadPlaces()
        # eighths -> number -> slab
        self._slabs: dict[int, dict[int, Slab]] = {eighths: {} for eighths in range(1, EIGHTHS + 1)}
        self._names_changed = False  # files were made, and the directory is not yet synced
        # Over slabs and the states of their slots; payloads are written and read beside it.
        self._lock = threading.RLock()
        self._syncing = threading.Lock()  # over every fdatasync, and over what is known of them:
        self._sync_failures = 0
        self._doubt = False  # a sync has failed, which does not say for which place: the next write finds out
        self._threads = ThreadPoolExecutor(WRITERS, thread_name_prefix="latentkv-slab")
        try:
            make_directory(path)
            for file in sorted(path.iterdir()):
                if name := _NAME.fullmatch(file.name):
                    self._adopt(int(name[1]), int(name[2]))
        except OSError as error:
            self.close()
            raise DiskError(f"slabs in {path} cannot be opened: {error}") from error

    def _slot_bytes(self, eighths: int) -> int:
        return slot_bytes(self._block, eighths)

    def _eighths(self, length: int) -> int:
        return eighths_of(self._block, length)

    def _slab_path(self, eighths: int, number: int) -> Path:
        return self._path / slab_name(eighths, number)

    def _adopt(self, eighths: int, number: int) -> None:
        """Open a file of an earlier run. Raises ``OSError`` if the reason is another than the file itself."""
        try:
            self._open(eighths, number)
        except OSError as error:
            if error.errno in _NOT_THE_FILE:
                raise
            self._bad.leave_alone(self._slab_path(eighths, number), eighths, number, error)

    def _open(self, eighths: int, number: int) -> Slab:
        nbytes = self._slot_bytes(eighths)
        slots = min(max(1, self._slab_bytes // nbytes), 1 << SLOT_BITS)
        slab = Slab(self._slab_path(eighths, number), nbytes, slots, self._open_file)
        self._slabs[eighths][number] = slab
        return slab

    def _all(self) -> list[Slab]:
        return [slab for known in list(self._slabs.values()) for slab in list(known.values())]

    def _find(self, key: int) -> tuple[Slab | None, int]:
        eighths, number, slot = split_key(key)
        return self._slabs[eighths].get(number), slot

    def _by_slab(self, keys: Keys) -> Iterator[tuple[Slab | None, NDArray[np.int64], NDArray[np.int64]]]:
        """Slabs, and which of the keys and slots are theirs; None for a slab that there isn't."""
        known = np.asarray(keys, np.int64)
        at, eighths = np.divmod(known, EIGHTHS)
        owners = (at >> SLOT_BITS) * EIGHTHS + eighths
        order = np.argsort(owners, kind="stable")
        for part in np.split(order, np.flatnonzero(np.diff(owners[order])) + 1):
            if len(part):
                slab, _ = self._find(int(known[part[0]]))
                yield slab, known[part], at[part] & ((1 << SLOT_BITS) - 1)

    def retain(self, named: Keys) -> set[int]:
        """See ``Payloads.retain``."""
        missing: set[int] = set()
        for slab, keys, slots in self._by_slab(named):
            missing.update(keys.tolist() if slab is None else keys[~slab.keep(slots)].tolist())
        self._drop_empty()
        for slab in self._all():
            slab.settle()
        return missing

    def missing(self, keys: Keys) -> set[int]:
        """See ``Payloads.missing``."""
        missing: set[int] = set()
        with self._lock:
            for slab, part, slots in self._by_slab(keys):
                missing.update(part.tolist() if slab is None else part[~slab.have(slots)].tolist())
        return missing

    def _drop_empty(self) -> None:
        for eighths, known in self._slabs.items():
            for number, slab in list(known.items()):
                if not slab.empty:
                    continue
                del known[number]
                try:
                    slab.remove()
                except OSError as error:
                    self._bad.leave_alone(self._slab_path(eighths, number), eighths, number, error)

    def write(self, items: Sequence[Run]) -> list[Place]:
        """See ``Payloads.write``."""
        try:
            if not self._doubt:
                try:
                    return [Place(key) for key in self._write_at_once(items)]
                except OSError as error:
                    if self._doubt or error.errno in _NOT_THE_PLACE:
                        raise
            places = [Place(key) for key in self._write_one_by_one(items)]
            self._doubt = False
            return places
        except OSError as error:
            raise DiskError(f"slabs in {self._path}: {error}; nothing was changed") from error

    def _write_at_once(self, items: Sequence[Run]) -> list[int]:
        """Keys of the items; all or, with ``OSError``, none."""
        keys: list[int] = []
        failures = self._sync_failures
        try:
            with self._lock:
                for item in items:
                    keys.append(self._allocate(self._eighths(item.length)))
                writes = self._writes(keys, items)
            self._in_parallel(writes)
            self._sync({write.slab for write in writes}, failures)
        except BaseException:
            self.free(keys)
            raise
        return keys

    def _write_one_by_one(self, items: Sequence[Run]) -> list[int]:
        """The same, slowly: so that it is seen which place fails."""
        keys: list[int] = []
        try:
            for item in items:
                keys.append(self._write_somewhere(item))
        except BaseException:
            self.free(keys)
            raise
        return keys

    def _write_somewhere(self, item: Run) -> int:
        """Write to the first place that takes it; those that do not are bad, for the disk is not."""
        failed: list[int] = []
        eighths = self._eighths(item.length)
        while True:
            try:
                with self._lock:
                    # Far from the one that failed: what is bad may be more than a slot.
                    key = self._allocate(eighths, last=bool(failed), but=failed[1:])
            except BaseException:
                self.free(failed)
                raise
            error = self._try(key, item)
            if error is None:
                break
            failed.append(key)
            if error.errno in _NOT_THE_PLACE:
                self.free(failed)
                raise error
            if len(failed) >= PLACES_TRIED:
                with self._lock:
                    self.free(self._bad.suspect(failed))
                raise error
        with self._lock:
            failed += self._bad.take_suspects()
        for bad in failed:
            self._prove(bad, item)
        return key

    def _try(self, key: int, item: Run) -> OSError | None:
        """Write to a place, durably; how that failed."""
        failures = self._sync_failures
        try:
            write = self._writes([key], [item])[0]
            write.run()
            self._sync({write.slab}, failures)
        except OSError as error:
            return error
        return None

    def _prove(self, key: int, item: Run) -> None:
        """The disk works: a place that fails now is bad, and any other is free."""
        same = split_key(key)[0] == self._eighths(item.length)
        error = self._try(key, item) if same else None
        slab, slot = self._find(key)
        with self._lock:
            if error is not None and slab is not None:
                self._bad.set_aside(slab, slot, error)
            self.free([key])

    def _sync(self, slabs: Iterable[Slab], failures: int) -> None:
        """Make slabs and their names durable. ``failures``: of syncs, when the write began.

        The kernel tells of a lost page once, to whoever syncs next: it may be any that is being written.
        Raises ``OSError``.
        """
        with self._syncing:
            try:
                for slab in slabs:
                    slab.sync()
            except OSError:
                self._sync_failures += 1
                self._doubt = True
                raise
            if self._sync_failures != failures:
                raise OSError(errno.EIO, "a write beside it could not be synced")
        with self._lock:
            if self._names_changed:
                sync_directory(self._path)
                self._names_changed = False

    def _writes(self, keys: Sequence[int], items: Sequence[Run]) -> list[SlotWrite]:
        writes: list[SlotWrite] = []
        for key, item in zip(keys, items, strict=True):
            slab, slot = self._require(key)
            if writes and writes[-1].joins(slab, slot):
                writes[-1].data.append(item.used)
            else:
                writes.append(SlotWrite(slab, slot, [item.used]))
        return writes

    def _in_parallel(self, writes: Iterable[SlotWrite]) -> None:
        # Ends when all have ended, also if one fails: none may still write into slots that are free again.
        futures = [self._threads.submit(write.run) for write in writes]
        wait(futures)
        for future in futures:
            future.result()

    def _allocate(self, eighths: int, *, last: bool = False, but: Sequence[int] = ()) -> int:
        """Key of a slot: the first, or the ``last``, of a slab in which none of the slots ``but`` lies."""
        others = {split_key(key)[1] for key in but}
        known = {n: slab for n, slab in self._slabs[eighths].items() if not slab.deleted and n not in others}
        number = next((n for n, slab in known.items() if slab.vacant), None)
        if number is None:
            self._require_room(self._slot_bytes(eighths))
            number = next((n for n, slab in known.items() if not slab.full), None)
        if number is None:
            number = self._grow(eighths)
        slot = self._slabs[eighths][number].take(last=last)
        return (number << SLOT_BITS | slot) * EIGHTHS + eighths - 1

    def _require_room(self, nbytes: int) -> None:
        """Make that much fit, at the cost of other sizes' free slots; raises ``DiskError`` if it can't."""
        used = self._used_bytes()
        for slab in self._all():
            if used + nbytes <= self._limit:
                return
            used -= slab.punch()
        if used + nbytes > self._limit:
            raise DiskError(
                f"slabs in {self._path} are full: {used} of {self._limit} bytes used, {nbytes} more needed;"
                " free some or give more disk bytes"
            )

    def _used_bytes(self) -> int:
        files = sum(slab.disk_bytes for slab in self._all() if not slab.deleted)
        return files + self._bad.file_bytes

    def _grow(self, eighths: int) -> int:
        make_directory(self._path)  # also if somebody removed it meanwhile
        self._drop_empty()
        number = 1 + max(self._slabs[eighths].keys() | self._bad.numbers(eighths), default=-1)
        self._slab_path(eighths, number).unlink(missing_ok=True)  # none of ours
        used = self._used_bytes()
        slab = self._open(eighths, number)
        self._names_changed = True
        if used + slab.slots * slab.slot_bytes <= self._limit:
            slab.preallocate()
        return number

    def _require(self, key: int) -> tuple[Slab, int]:
        slab, slot = self._find(key)
        if slab is None or not slab.uses(slot):
            raise CorruptBlock(f"payload {key} in {self._path} is missing")
        return slab, slot

    def read_into(self, place: Place, run: Run) -> None:
        """See ``Payloads.read_into``."""
        slab, slot = self._require(place.key)
        if self._eighths(run.length) != place.key % EIGHTHS + 1:
            raise CorruptBlock(f"payload {place.key} in {self._path} has no length of {run.length} bytes")
        try:
            if slab.deleted:
                raise CorruptBlock(f"payload {place.key} in {self._path}: {slab.path.name} was deleted")
            slab.file.read(run.used, slot * slab.slot_bytes)
        except OSError as error:
            bad = error.errno == errno.EIO and self._reads_beside(slab, slot)
            if bad:
                with self._lock:
                    self._bad.set_aside(slab, slot, error)
            kind = BadPlace if bad else DiskError
            raise kind(f"payload {place.key} in {self._path} cannot be read: {error}") from error

    def _reads_beside(self, slab: Slab, slot: int) -> bool:
        """Whether another payload of the slab can be read: then it is not the disk that fails."""
        return any(slab.file.reads(other * slab.slot_bytes) for other in slab.neighbours(slot))

    def free(self, keys: Sequence[int]) -> None:
        """See ``Payloads.free``. Durable as it is: the catalogue names them no more."""
        with self._lock:
            for key in keys:
                slab, slot = self._find(key)
                if slab is not None:
                    slab.give(slot)

    def stored_bytes(self, length: int) -> int:
        """See ``Payloads.stored_bytes``."""
        return self._slot_bytes(self._eighths(length))

    def set_aside(self) -> SetAside:
        """See ``Payloads.set_aside``."""
        return self._bad.total()

    def file_bytes(self) -> int:
        """See ``Payloads.file_bytes``."""
        return sum(slab.file_bytes() for slab in self._all())

    def close(self) -> None:
        """See ``Payloads.close``."""
        self._threads.shutdown(wait=True)
        for slab in self._all():
            slab.file.close()
