"""The addresses that a daemon listens on: taken only when nobody else does, and given back only if ours.

A unix socket is bound under a name of its own and then renamed to where it is to be found: so a dead
daemon's socket is replaced in one step, and gRPC, which removes the name that it has bound before and
after it listens, never touches what another daemon has put there meanwhile. Between a look and the
change that follows from it, a lock beside the socket keeps other daemons out.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import socket
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kvstore.address import ARENA_SUFFIX, UNIX, Address
from kvstore.directory import mend_of, who_may
from kvstore.errors import KVStoreError

_TRIES, _PAUSE_SECONDS = 100, 0.05  # for the lock, which is held for milliseconds
_PROBE_SECONDS = 1.0
_MENDS = {
    errno.EADDRINUSE: "another process listens there: stop it, or choose another --listen",
    errno.EACCES: "ports below 1024 are for root alone: choose a higher one",
    errno.EADDRNOTAVAIL: "this machine has no such address: choose one that it has",
}


class AddressUnusable(KVStoreError):
    """The address cannot be listened on; the message says why, and what to do."""


class AddressInUse(AddressUnusable):
    """Another process listens on the address."""


@dataclass(frozen=True, slots=True)
class Bound:
    """Where to bind the sockets until they are named: that of gRPC, and that of the handover."""

    calls: Path
    arena: Path


class SocketNames:
    """The names of a daemon's two sockets in the file system: ``path`` and ``path.arena``."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.arena = path.with_name(path.name + ARENA_SUFFIX)
        self._ours: dict[Path, tuple[int, int]] = {}  # device and inode of what we put there

    @contextlib.contextmanager
    def taking(self) -> Iterator[Bound]:
        """Bind the sockets inside, where this says; they get their names at its end.

        Raises ``AddressInUse`` when somebody listens there, and ``AddressUnusable``.
        """
        with _named(self.path):
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with self._locked(), contextlib.ExitStack() as undo:
                # Whoever drains may still have the arena's, and is found by nobody any more.
                _require_socket(self.arena)
                if _require_socket(self.path):
                    _require_nobody(self.path)
                bound = Bound(*(self.path.with_name(f".{secrets.token_hex(3)}") for _ in range(2)))
                for path in (bound.calls, bound.arena):
                    undo.callback(path.unlink, missing_ok=True)
                yield bound
                # The arena first, so that whoever finds the daemon also finds its arena.
                for made, path in ((bound.arena, self.arena), (bound.calls, self.path)):
                    found = made.stat()
                    made.rename(path)
                    self._ours[path] = (found.st_dev, found.st_ino)

    def release(self) -> None:
        """Remove what is still ours. Raises ``OSError``."""
        if not self._ours:
            return
        with contextlib.suppress(FileNotFoundError), self._locked():  # the whole directory may be gone
            for path, ours in self._ours.items():
                with contextlib.suppress(FileNotFoundError):
                    found = path.lstat()
                    if (found.st_dev, found.st_ino) == ours:
                        path.unlink()

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Keep other daemons from these names. Raises ``OSError`` and ``AddressInUse``."""
        lock = self.path.with_name(f"{self.path.name}.lock")
        for _ in range(_TRIES):
            fd = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                if _lock(fd) and _is_at(fd, lock):
                    try:
                        yield
                    finally:
                        lock.unlink(missing_ok=True)  # while it is ours: who waits for it looks again
                    return
            finally:
                os.close(fd)
            time.sleep(_PAUSE_SECONDS)
        raise AddressInUse(f"another process holds {lock}; stop that one, or choose another --listen")


def _lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_at(fd: int, path: Path) -> bool:
    """Whether the open file is still what the name leads to."""
    try:
        return os.path.samestat(os.fstat(fd), path.lstat())
    except FileNotFoundError:
        return False


def _require_socket(path: Path) -> bool:
    """Whether a socket is there, or nothing. Raises ``AddressUnusable`` for anything else."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return False
    if not stat.S_ISSOCK(mode):
        raise AddressUnusable(f"{path} exists and is no socket; move it away, or choose another --listen")
    return True


def _require_nobody(path: Path) -> None:
    """Raises ``AddressInUse`` if somebody listens there, and ``AddressUnusable`` if that is not known."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(_PROBE_SECONDS)
        code = probe.connect_ex(str(path))
    if code in (0, errno.EAGAIN):  # the latter by a full queue of one that listens
        raise AddressInUse(f"another daemon listens on {path}; stop that one, or choose another --listen")
    if code not in (errno.ECONNREFUSED, errno.ENOENT):
        raise AddressUnusable(
            f"{path} is a socket that cannot be asked who listens ({os.strerror(code)}); remove it if it is"
            " of no use any more, or choose another --listen"
        )


@contextlib.contextmanager
def _named(path: Path) -> Iterator[None]:
    """Turn what the system refuses into an error that says which file and what to do."""
    try:
        yield
    except OSError as error:
        where = error.filename or path
        known = mend_of(error.errno)
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            known = who_may(Path(os.fsdecode(where)))
        mend = known or "mend that, or choose another --listen"
        raise AddressUnusable(
            f"listen={UNIX + str(path)!r} cannot be used: {where}: {error.strerror or error}; {mend}"
        ) from None


def require_bindable(address: Address) -> None:
    """Raises ``AddressUnusable`` for a host and port that cannot be bound: gRPC would not say why."""
    family = socket.AF_INET6 if address.host.startswith("[") else socket.AF_INET
    try:
        socket.create_server((address.bare_host, address.port), family=family).close()
    except OSError as error:
        raise unbindable("listen", str(address), error) from None


def unbindable(setting: str, address: str, error: OSError) -> AddressUnusable:
    """Why an address of a setting cannot be bound, and what to do."""
    if isinstance(error, socket.gaierror):
        mend = "no such host is known: check the name, or write its address"
    else:
        mend = _MENDS.get(error.errno or 0, "choose another").replace("--listen", f"--{setting}")
    kind = AddressInUse if error.errno == errno.EADDRINUSE else AddressUnusable
    why = error.strerror if isinstance(error, socket.gaierror) else os.strerror(error.errno or 0)
    return kind(f"{setting}={address!r} cannot be bound ({why}): {mend}")
