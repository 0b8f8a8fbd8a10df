"""Direct I/O: files opened past the page cache, and memory that is aligned for it.

Block bytes are read once and kept in the arena; the page cache would only hold them a
second time and cost a copy. A file system without O_DIRECT gets buffered I/O and a warning.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import logging
import mmap
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvstore.errors import CorruptBlock

log = logging.getLogger(__name__)
_LIBC = ctypes.CDLL(None, use_errno=True)
_KEEP_SIZE, _PUNCH_HOLE = 1, 2  # of fallocate(2), which Python has in part only

PAGE_BYTES = 4096  # what O_DIRECT wants offsets, lengths and addresses to be multiples of


def pages(nbytes: int) -> int:
    """Pages that hold ``nbytes`` bytes."""
    return -(-nbytes // PAGE_BYTES)


def make_directory(path: Path) -> None:
    """Make a directory, those above it if need be, and their names durable. Raises ``OSError``."""
    made = [directory for directory in (path, *path.parents) if not directory.exists()]
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    for directory in made:
        sync_directory(directory.parent)


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable. Raises ``OSError``."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def drop_from_memory(address: int, nbytes: int) -> None:
    """Let the kernel take back the pages of a file mapping; a later access faults them in again."""
    start = address - address % mmap.PAGESIZE
    length = ctypes.c_size_t(address + nbytes - start)
    _LIBC.madvise(ctypes.c_void_p(start), length, mmap.MADV_DONTNEED)


@dataclass(frozen=True, slots=True)
class Run:
    """Whole pages of memory with a payload in them, ``lead`` bytes behind the start.

    ``memory`` is page-aligned and a whole number of pages long.
    """

    memory: memoryview
    lead: int
    length: int

    @property
    def payload(self) -> memoryview:
        """The payload's bytes."""
        return self.memory[self.lead : self.lead + self.length]

    @property
    def used(self) -> memoryview:
        """The pages from the start that the payload reaches into."""
        return self.memory[: pages(self.lead + self.length) * PAGE_BYTES]

    @classmethod
    def fresh(cls, lead: int, length: int) -> Run:
        """A run in memory of its own (anonymous mappings are page-aligned)."""
        return cls(memoryview(mmap.mmap(-1, max(pages(lead + length), 1) * PAGE_BYTES)), lead, length)

    @classmethod
    def of(cls, lead: int, data: bytes | memoryview) -> Run:
        """A run in memory of its own with a copy of ``data``."""
        run = cls.fresh(lead, memoryview(data).nbytes)
        run.payload[:] = data
        return run


class DirectFile:
    """A file for direct reads and writes of whole pages, from any number of threads.

    ``direct`` says whether the file system lets it pass the page cache.
    """

    def __init__(self, path: Path, flags: int) -> None:
        """``flags`` as for ``os.open``, without O_DIRECT. Raises ``OSError``."""
        self._path = path
        self.direct = True
        try:
            self._fd = os.open(path, flags | os.O_DIRECT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self._fd = os.open(path, flags | os.O_CLOEXEC, 0o600)
            self._go_buffered(error)

    def _go_buffered(self, why: OSError) -> None:
        # Some file systems refuse the flag, others only what is done with it.
        if self.direct:
            log.warning("event=no_direct_io path=%s reason=%s", self._path, why)
        fcntl.fcntl(self._fd, fcntl.F_SETFL, fcntl.fcntl(self._fd, fcntl.F_GETFL) & ~os.O_DIRECT)
        self.direct = False

    @property
    def fd(self) -> int:
        """The descriptor."""
        return self._fd

    def read(self, run: memoryview, offset: int) -> None:
        """Fill ``run`` from ``offset``, both in whole pages.

        Raises ``CorruptBlock`` when the file ends before, and ``OSError``.
        """
        done = 0
        while done < len(run):
            direct = self.direct
            try:
                got = os.preadv(self._fd, [run[done:]], offset + done)
            except OSError as error:
                if error.errno != errno.EINVAL or not direct:
                    raise
                self._go_buffered(error)
                continue
            done += got
            # Whoever goes on behind a part of a page is refused for its alignment, and there is no more.
            if not got or (direct and got % PAGE_BYTES):
                raise CorruptBlock(
                    f"{self._path} ends at {offset + done}, expected {offset + len(run)} bytes"
                )

    def reads(self, offset: int) -> bool:
        """Whether the page at ``offset`` can be read: so the disk as a whole answers."""
        try:
            self.read(Run.fresh(0, PAGE_BYTES).memory, offset)
        except (OSError, CorruptBlock):
            return False
        return True

    def write(self, runs: Sequence[memoryview], offset: int) -> None:
        """Write ``runs`` one behind the other from ``offset``, all in whole pages. Raises ``OSError``."""
        rest = list(runs)
        while rest:
            direct = self.direct
            try:
                done = os.pwritev(self._fd, rest, offset)
            except OSError as error:
                if error.errno != errno.EINVAL or not direct:
                    raise
                self._go_buffered(error)
                continue
            offset += done
            while rest and done >= len(rest[0]):
                done -= len(rest.pop(0))
            if done:
                rest[0] = rest[0][done:]

    def allocate(self, offset: int, nbytes: int) -> None:
        """Give a range its blocks on disk, and the file at least that length. Raises ``OSError``."""
        self._fallocate(0, offset, nbytes)

    def punch(self, offset: int, nbytes: int) -> None:
        """Give the blocks of a range back to the file system; it reads as zeros. Raises ``OSError``."""
        self._fallocate(_PUNCH_HOLE | _KEEP_SIZE, offset, nbytes)

    def _fallocate(self, mode: int, offset: int, nbytes: int) -> None:
        # Not posix_fallocate: where the file system can't, that writes byte for byte.
        while _LIBC.fallocate(self._fd, mode, ctypes.c_int64(offset), ctypes.c_int64(nbytes)):
            code = ctypes.get_errno()
            if code != errno.EINTR:
                raise OSError(code, os.strerror(code), str(self._path))

    def sync(self) -> None:
        """Make what was written durable. Raises ``OSError``."""
        os.fdatasync(self._fd)

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


OpenFile = Callable[[Path, int], DirectFile]
"""Opens a file for direct I/O: (path, flags as for ``os.open``). Raises ``OSError``."""
