"""The data directory: one process has it at a time, and what the system says of it becomes our errors."""

from __future__ import annotations

import errno
import fcntl
import os
import weakref
from pathlib import Path

import lmdb

from kvstore.errors import DataDirError, DataDirInUse, DataDirReadOnly
from kvstore.payloads.direct import make_directory

_READ_ONLY = (errno.EACCES, errno.EPERM, errno.EROFS)


class DirectoryLock:
    """Exclusive use of a data directory by this process, until ``close`` or its death.

    The lock is of the open file, which a forked child would share and so keep: there it is closed at once,
    which leaves the parent's as it is. (Locks by process, POSIX's, end with any descriptor of the file.)
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        _locks.add(self)

    def close(self) -> None:
        """Let others have the directory; a second call does nothing."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


_locks: weakref.WeakSet[DirectoryLock] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for lock in list(_locks):
        lock.close()


os.register_at_fork(after_in_child=_after_fork_in_child)


def lock_directory(path: Path) -> DirectoryLock:
    """Create the data directory if need be and lock it (``LOCK`` in it, with our pid).

    Raises ``DataDirInUse`` naming the holder, ``DataDirReadOnly``, ``DataDirError``.
    """
    try:
        make_directory(path)
        fd = os.open(path / "LOCK", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise directory_error(path, error) from error
    lock = DirectoryLock(fd)  # before it is taken, so that no fork in between keeps it
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(fd, 32, 0).decode(errors="replace").strip() or "unknown"
        lock.close()
        raise DataDirInUse(
            f"data directory {path} is in use by process {holder}; stop it or choose another directory"
        ) from None
    # The file stays when the lock goes: removing it would let two processes lock two files.
    os.ftruncate(fd, 0)
    os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    return lock


def directory_error(path: Path, error: OSError | lmdb.Error) -> DataDirError:
    """What it means for a data directory that the system refused something."""
    code = error.errno if isinstance(error, OSError) else error.code
    if code in _READ_ONLY:
        return DataDirReadOnly(
            f"data directory {path} cannot be written ({error}); fix its permissions or mount"
        )
    return DataDirError(f"data directory {path} cannot be used ({error}); repair it or choose another one")
