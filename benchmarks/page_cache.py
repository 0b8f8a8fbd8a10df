"""Getting a store's files out of the kernel's page cache, and seeing whether they are."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

_DROP_CACHES = Path("/proc/sys/vm/drop_caches")
_WINDOW = 64 << 20  # bytes mapped at once
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class Dropped:
    """What was done, and what mincore(2) says of the files before and after."""

    fadvise: bool  # posix_fadvise(DONTNEED) on every file
    drop_caches: bool  # the whole machine's, only where that left some; it takes root
    stored_bytes: int
    cached_before: int
    cached_after: int

    @property
    def cold(self) -> bool:
        """Whether at most a hundredth of the files was left in memory."""
        return self.cached_after * 100 <= self.stored_bytes

    def __str__(self) -> str:
        ways = [name for name, done in (("fadvise", self.fadvise), ("drop_caches", self.drop_caches)) if done]
        left = 100 * self.cached_after / max(self.stored_bytes, 1)
        return f"page cache dropped by {' and '.join(ways) or 'nothing'}, {left:.1f}% of the files left in it"


def drop(directory: Path) -> Dropped:
    """Write all files of a directory back and drop them from the page cache, where that is permitted.

    No process may have the files mapped, or their pages stay.
    """
    files = [path for path in sorted(directory.rglob("*")) if path.is_file()]
    before = sum(map(cached_bytes, files))
    advised = [_advise(path) for path in files]
    # The daemon's own code should not become cold too, so this is for what the advice left only.
    everything = any(map(cached_bytes, files)) and _drop_everything()
    return Dropped(
        fadvise=all(advised),
        drop_caches=everything,
        stored_bytes=sum(_data_bytes(path) for path in files),
        cached_before=before,
        cached_after=sum(map(cached_bytes, files)),
    )


def cached_bytes(path: Path) -> int:
    """Bytes of a file's data that are in memory. Looking does not bring them there."""
    with path.open("rb") as file:
        return sum(_resident(file.fileno(), start, stop) for start, stop in extents(file.fileno()))


def _advise(path: Path) -> bool:
    with path.open("rb") as file:
        os.fsync(file.fileno())  # a dirty page cannot be dropped
        try:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        except OSError:
            return False
    return True


def _drop_everything() -> bool:
    os.sync()
    try:
        _DROP_CACHES.write_text("1\n")
    except OSError:
        return False
    return True


def _data_bytes(path: Path) -> int:
    with path.open("rb") as file:
        return sum(stop - start for start, stop in extents(file.fileno()))


def extents(fd: int) -> Iterator[tuple[int, int]]:
    """Start and stop of the written parts of a file."""
    # LMDB's files are sparse: holes are neither on disk nor worth a look.
    end, at = os.fstat(fd).st_size, 0
    while at < end:
        try:
            start = os.lseek(fd, at, os.SEEK_DATA)
        except OSError:  # ENXIO: nothing but a hole is left
            return
        at = os.lseek(fd, start, os.SEEK_HOLE)
        yield start, at


def _resident(fd: int, start: int, stop: int) -> int:
    page = mmap.PAGESIZE
    found = 0
    for begin in range(start - start % page, stop, _WINDOW):
        length = min(_WINDOW, stop - begin)
        with mmap.mmap(fd, length, prot=mmap.PROT_READ, offset=begin) as window:
            view = np.frombuffer(window, np.uint8)
            states = np.zeros(-(-length // page), np.uint8)
            failed = _libc.mincore(
                ctypes.c_void_p(view.ctypes.data),
                ctypes.c_size_t(length),
                ctypes.c_void_p(states.ctypes.data),
            )
            del view  # the window cannot be closed under it
        if failed:
            raise OSError(ctypes.get_errno(), "mincore failed")
        found += int((states & 1).sum()) * page
    return found
