"""Getting a piece of shared memory that can neither shrink nor fail later, in huge pages where granted."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import time
from collections.abc import Iterator
from pathlib import Path

from kvstore.errors import ArenaUnavailable, KVStoreError
from kvstore.memory_limits import tightest
from kvstore.numa import bind_to_node

_LIBC = ctypes.CDLL(None, use_errno=True)
# Advice of madvise(2) that Python does not name: of Linux 5.14 and 6.1; older ones refuse them.
_POPULATE_WRITE, _COLLAPSE = 23, 25
_HUGE_BYTES = 2 << 20
# Found free they take less time than small pages; where memory has to be moved for them, five times as long.
_HUGE_SECONDS = 1.0 / (1 << 30)  # a byte, for looking for them
_STEP_BYTES = 64 << 20  # faulted in by one call, so that whoever does it in the background can stop
_TRIES = 64
# What a daemon needs beside its arena, the tables of its pages included: 8 bytes for each of 4 KiB.
_OWN_BYTES, _PAGE_TABLE_SHARE = 32 << 20, 512


def allocate_shared(nbytes: int, numa_node: int | None = None) -> tuple[int, mmap.mmap]:
    """A ``memfd`` of ``nbytes`` bytes, backed, faulted in and sealed, and its writable mapping.

    Raises ``ArenaUnavailable`` when the memory cannot be had, ``InvalidArgument`` for a NUMA node that
    the machine does not have; then nothing is kept.
    """
    require_available(nbytes, numa_node)
    fd = -1
    try:
        fd = os.memfd_create("latentkv-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, nbytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        mapped = map_shared(fd, nbytes)
        if numa_node is not None:
            bind_to_node(_address(mapped), nbytes, numa_node)
        _back(fd, mapped)
        return fd, mapped
    except KVStoreError:
        os.close(fd)
        raise
    except (OSError, ValueError, OverflowError) as error:
        if fd >= 0:
            os.close(fd)
        raise ArenaUnavailable(
            f"host arena of {nbytes} bytes cannot be had ({error}); ask for fewer host bytes"
        ) from error


def require_available(nbytes: int, numa_node: int | None = None, root: Path = Path("/")) -> None:
    """Raises ``ArenaUnavailable`` when there is not so much memory to be had beside our own needs."""
    bound = tightest(root, numa_node)
    available = max(bound.left - _OWN_BYTES, 0) * _PAGE_TABLE_SHARE // (_PAGE_TABLE_SHARE + 1)
    if nbytes > available:
        # The kernel would not refuse, but kill a process of its choice half-way.
        raise ArenaUnavailable(
            f"host arena of {nbytes} bytes: only {available} bytes of memory are available ({bound},"
            f" and {bound.left - available} are left to the process itself);"
            f" lower host_bytes, or {bound.mend}"
        )


def map_shared(fd: int, nbytes: int) -> mmap.mmap:
    """A writable mapping of a shared file, at an address where huge pages fit if one can be had.

    Raises ``OSError``, and ``ValueError`` when the file is shorter.
    """
    mapped = mmap.mmap(fd, nbytes)
    with contextlib.ExitStack() as pads:
        for _ in range(_TRIES):
            over = _address(mapped) % _HUGE_BYTES
            if not over:
                break
            mapped.close()
            # The kernel goes downwards: what stands above pushes a mapping down to the boundary. A pad
            # may land in some smaller gap instead, and then stays there, so that the next one does not.
            pads.enter_context(mmap.mmap(-1, over))
            mapped = mmap.mmap(fd, nbytes)
    return mapped


def fault_in(mapped: mmap.mmap) -> Iterator[None]:
    """Fault a mapping in for writing, step by step: a late first touch costs two thirds of the speed.

    Changes no byte. Where the kernel can't, nothing happens.
    """
    for start in range(0, len(mapped), _STEP_BYTES):
        _advise(mapped, _POPULATE_WRITE, start, min(_STEP_BYTES, len(mapped) - start))
        yield


def _back(fd: int, mapped: mmap.mmap) -> None:
    """Give every page its memory, in huge pages as far as they are to be had.

    Pages that lie scattered in physical memory cost direct I/O up to half of its speed,
    and copies their share of TLB misses.
    """
    size = len(mapped)
    give_up = time.monotonic() + size * _HUGE_SECONDS
    for start in range(0, size, _STEP_BYTES):
        stop = min(start + _STEP_BYTES, size)
        if time.monotonic() < give_up:
            # A piece of which no page is there can't be made huge.
            for at in range(start, stop, _HUGE_BYTES):
                os.posix_fallocate(fd, at, mmap.PAGESIZE)
            _advise(mapped, _COLLAPSE, start, (stop - start) // _HUGE_BYTES * _HUGE_BYTES)
        os.posix_fallocate(fd, start, stop - start)
    for _ in fault_in(mapped):
        pass


def _advise(mapped: mmap.mmap, advice: int, start: int, nbytes: int) -> bool:
    """madvise(2) without the interpreter's lock, which the method of ``mmap`` keeps."""
    anchor = ctypes.c_char.from_buffer(mapped)
    address = ctypes.c_void_p(ctypes.addressof(anchor) + start)
    return bool(_LIBC.madvise(address, ctypes.c_size_t(nbytes), advice) == 0)


def _address(mapped: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(mapped))


def lock_in_memory(mapped: mmap.mmap) -> bool:
    """Keep the mapping from being swapped out; False where that is not permitted."""
    size = ctypes.c_size_t(len(mapped))
    while _LIBC.mlock(ctypes.c_void_p(_address(mapped)), size) != 0:
        if ctypes.get_errno() != errno.EINTR:
            return False
    return True
