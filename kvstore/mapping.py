"""A worker's side of the handover: the daemon's arena mapped into this process."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import socket
import threading
import weakref
from collections.abc import Iterator
from typing import Any

from kvstore.address import ARENA_SUFFIX
from kvstore.errors import ArenaUnavailable, DeadlineExceeded
from kvstore.memory import fault_in, map_shared
from kvstore.wire import HANDOVER_VERSION, TOKEN_BYTES, WorkerId

_HELLO_BYTES = 4096


class Mapping:
    """One handover connection and the memory that came over it. Thread-safe.

    The daemon frees all that this worker holds when the connection ends. So it is closed
    only when nobody uses a slot any more: ``retire`` waits for the last ``done``.

    The memory outlives the connection for as long as a view of it does.
    """

    def __init__(self, connection: socket.socket, memory: mmap.mmap, token: bytes) -> None:
        self.identity = WorkerId(token, mapped=True)
        self._connection = connection
        self._mmap = memory
        self._memory = memoryview(memory)
        self._lock = threading.Lock()
        self._users = 1  # whoever faults the memory in
        self._retired = False
        _mappings.add(self)
        threading.Thread(target=self._attend, name="latentkv-arena", daemon=True).start()

    def _attend(self) -> None:
        """Make the memory fast to write, then wait for the daemon's end."""
        for _ in fault_in(self._mmap):
            if self._retired:
                break
        self.done()
        # A dead daemon's arena is let go at once: the next one may need its memory.
        with contextlib.suppress(OSError):
            self._connection.recv(1)  # nothing is ever sent, so this is the end of file
        self.retire()

    def view(self, offset: int, nbytes: int) -> memoryview:
        """Writable bytes of a slot. Raises ``ArenaUnavailable`` outside the arena."""
        if offset + nbytes > len(self._memory):
            raise ArenaUnavailable(f"slot [{offset}, {offset + nbytes}) is outside {len(self._memory)} bytes")
        return self._memory[offset : offset + nbytes]

    def alive(self) -> bool:
        """Whether the daemon still holds its end of the connection."""
        try:
            return self._connection.recv(1, socket.MSG_DONTWAIT | socket.MSG_PEEK) != b""
        except BlockingIOError:
            return True
        except OSError:
            return False

    def use(self) -> None:
        """Somebody holds slots from now on."""
        with self._lock:
            self._users += 1

    def done(self) -> None:
        """Somebody holds no slot any more."""
        with self._lock:
            self._users -= 1
            self._close_if_over()

    def retire(self) -> None:
        """Close once nobody uses it; the owner must not hand it out again."""
        with self._lock:
            self._retired = True
            self._close_if_over()

    def _close_if_over(self) -> None:
        if self._retired and not self._users and self._connection.fileno() >= 0:
            with contextlib.suppress(OSError):  # wakes the watching thread; gone already if the daemon is
                self._connection.shutdown(socket.SHUT_RDWR)
            self._connection.close()
            # The last to unmap a dead daemon's arena frees its pages, 0.1 s and more a GiB: not in a request.
            threading.Thread(target=self._unmap, name="latentkv-unmap", daemon=True).start()

    def _unmap(self) -> None:
        self._memory.release()
        with contextlib.suppress(BufferError):  # a view is still alive, and its end unmaps
            self._mmap.close()

    def close_in_child(self) -> None:
        """Let go of a connection inherited by a fork: the parent's end of file must be seen."""
        self._connection.close()


class Introduction:
    """A handover connection without the arena: while it is open the daemon knows whose ``token`` is."""

    def __init__(self, connection: socket.socket, token: bytes) -> None:
        self.token = token
        self._connection = connection
        _introductions.add(self)

    def close(self) -> None:
        """The token is nobody's from now on. For a child after a fork, too, whose parent keeps it."""
        self._connection.close()


_mappings: weakref.WeakSet[Mapping] = weakref.WeakSet()
_introductions: weakref.WeakSet[Introduction] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for mapping in list(_mappings):
        mapping.close_in_child()
    for introduction in list(_introductions):
        introduction.close()


os.register_at_fork(after_in_child=_after_fork_in_child)


def open_mapping(socket_path: str, timeout: float) -> Mapping:
    """Get the arena of the daemon that listens on ``socket_path``.

    Raises ``ArenaUnavailable``; then blocks must travel as bytes. Raises ``DeadlineExceeded``
    when the daemon is there and says nothing.
    """
    with _greeted(socket_path, timeout) as (connection, hello, descriptor):
        if descriptor is None:
            raise ValueError("the daemon's credentials do not let this uid map it")
        # Its own size check makes sure that no access goes past the file's end (SIGBUS).
        return Mapping(
            connection, map_shared(descriptor, hello["arena_bytes"]), bytes.fromhex(hello["worker"])
        )


def introduce(socket_path: str, timeout: float) -> Introduction:
    """Let the daemon know our uid. Raises what ``open_mapping`` does."""
    with _greeted(socket_path, timeout) as (connection, hello, _):
        return Introduction(connection, bytes.fromhex(hello["worker"]))


@contextlib.contextmanager
def _greeted(socket_path: str, timeout: float) -> Iterator[tuple[socket.socket, dict[str, Any], int | None]]:
    """A handover connection, what the daemon said, and the arena's descriptor if it came, for now."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    descriptors: list[int] = []
    try:
        connection.settimeout(timeout)
        connection.connect(socket_path + ARENA_SUFFIX)
        line, descriptors, _, _ = socket.recv_fds(connection, _HELLO_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
        connection.settimeout(None)
        yield connection, _read_hello(line), next(iter(descriptors), None)
    except TimeoutError:
        connection.close()
        raise DeadlineExceeded(f"{socket_path}{ARENA_SUFFIX} gave no arena within {timeout:g} s") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        connection.close()
        raise ArenaUnavailable(f"no arena from {socket_path}{ARENA_SUFFIX}: {error}") from None
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def _read_hello(line: bytes) -> dict[str, Any]:
    if not line:
        raise ValueError(
            "the daemon refused this worker; run both as one user, or name its uid in credentials"
        )
    hello: dict[str, Any] = json.loads(line)
    token = bytes.fromhex(hello["worker"])
    if hello["version"] != HANDOVER_VERSION or len(token) != TOKEN_BYTES:
        raise ValueError(f"the daemon speaks handover version {hello['version']}, not {HANDOVER_VERSION}")
    return hello
