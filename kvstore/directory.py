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
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)
# What to do about what the system says, by its number.
_MENDS = {
    **dict.fromkeys(
        (errno.ENOTDIR, errno.EEXIST),
        "a file or a broken link stands where a directory should be: move it away, or choose another place",
    ),
    errno.EISDIR: "a directory stands where a file should be: move it away, or choose another directory",
    errno.ENOENT: "something on its way is missing: make it, or choose another directory",
    errno.ENOSPC: "the disk is full: free some of it, or choose another directory",
    errno.EDQUOT: "the disk quota is used up: raise it, or choose another directory",
    errno.EMFILE: "the process has too many files open: raise its limit (ulimit -n, LimitNOFILE)",
    errno.ENFILE: "the machine has too many files open: raise fs.file-max",
    errno.ENOMEM: "there is no address space left for the catalogue's map: raise the limit (ulimit -v)",
    errno.EFBIG: "files of this size are not allowed: raise the limit (ulimit -f), or lower disk_bytes",
    errno.EIO: "the disk is failing: see the kernel's log (dmesg), and choose another one",
    errno.ENAMETOOLONG: "the path is too long: choose a shorter one",
    errno.ELOOP: "its symbolic links go round in a circle: mend them",
    **dict.fromkeys(_NO_LOCKS, "its file system gives no locks: choose a directory on a local disk"),
}


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
        # The file stays when the lock goes: removing it would let two processes lock two files.
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    except BlockingIOError:
        holder = os.pread(fd, 32, 0).decode(errors="replace").strip() or "unknown"
        lock.close()
        raise DataDirInUse(
            f"data directory {path} is in use by process {holder}; stop it or choose another directory"
        ) from None
    except OSError as error:
        lock.close()
        raise directory_error(path / "LOCK", error) from error
    return lock


def directory_error(path: Path, error: OSError | lmdb.Error) -> DataDirError:
    """What it means for a data directory that the system refused something: the file, why, and what to do."""
    code = error.errno if isinstance(error, OSError) else error.code
    where, why = path, str(error).removeprefix(f"{path}: ")
    if isinstance(error, OSError):
        where, why = Path(os.fsdecode(error.filename or path)), error.strerror or why
    said = f"data directory {path} cannot be {'written' if code in _READ_ONLY else 'used'}: {where}: {why};"
    if code in _READ_ONLY:
        return DataDirReadOnly(f"{said} {who_may(where)}")
    strange = (
        "it is damaged, or of another program: remove it to start empty (it is a cache), or choose another"
    )
    return DataDirError(f"{said} {mend_of(code) or strange}")


def mend_of(code: int | None) -> str | None:
    """What to do about an ``errno`` of a file or directory; None where nothing better is known."""
    return _MENDS.get(code or 0)


def who_may(path: Path) -> str:
    """What keeps us from writing there, and what to do."""
    nearest = next(each for each in (path, *path.parents) if os.path.exists(each))  # exists() may raise
    if os.statvfs(nearest).f_flag & os.ST_RDONLY:
        return "its file system is mounted read-only: mount it anew, or choose another directory"
    owner = nearest.stat()
    return (
        f"{nearest} belongs to uid {owner.st_uid} with mode {owner.st_mode & 0o7777:04o}, and we are uid"
        f" {os.geteuid()}: fix its permissions, or choose another directory"
    )
