"""Getting a piece of shared memory that can neither shrink nor fail later."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
from pathlib import Path

from kvstore.errors import ArenaUnavailable


def allocate_shared(nbytes: int) -> tuple[int, mmap.mmap]:
    """A ``memfd`` of ``nbytes`` bytes, backed, faulted in and sealed, and its writable mapping.

    Raises ``ArenaUnavailable`` when the memory cannot be had; then nothing is kept.
    """
    available = _available_bytes()
    if nbytes > available:
        # The kernel would not refuse, but kill a process of its choice half-way.
        raise ArenaUnavailable(
            f"host arena of {nbytes} bytes: only {available} bytes of memory are available"
        )
    fd = -1
    try:
        fd = os.memfd_create("latentkv-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, nbytes)
        os.posix_fallocate(fd, 0, nbytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        # Faulted in now: a late first touch costs two thirds of the speed.
        return fd, mmap.mmap(fd, nbytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
    except (OSError, ValueError, OverflowError) as error:
        if fd >= 0:
            os.close(fd)
        raise ArenaUnavailable(
            f"host arena of {nbytes} bytes cannot be had ({error}); ask for fewer host bytes"
        ) from error


def _available_bytes() -> int:
    """Memory that the machine, and the container if there is one, has to give."""
    kib = 1024
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * kib
    with contextlib.suppress(OSError, ValueError):  # no cgroup, or no limit ("max")
        available = min(available, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return available


def lock_in_memory(mapped: mmap.mmap) -> bool:
    """Keep the mapping from being swapped out; False where that is not permitted."""
    libc = ctypes.CDLL(None, use_errno=True)
    anchor = ctypes.c_char.from_buffer(mapped)
    size = ctypes.c_size_t(len(mapped))
    while libc.mlock(ctypes.c_void_p(ctypes.addressof(anchor)), size) != 0:
        if ctypes.get_errno() != errno.EINTR:
            return False
    return True
