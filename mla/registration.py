"""The daemon's arena as memory that a GPU reads and writes by itself (``cudaHostRegister``).

Registered piece by piece in a thread of its own, for pinning takes a third of a second a GiB and
copies work before it too, only slower.
"""

from __future__ import annotations

import logging
import mmap
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray

from kvstore.lending import memory_under

log = logging.getLogger(__name__)

# A multiple of the arena's extents: a slot lies in one extent, so no copy spans two pieces.
PIECE_BYTES = 256 << 20

_PORTABLE = 1  # cudaHostRegisterPortable: for all devices of this process


class ArenaRegistration:
    """The pieces of one arena that are registered; a worker has one arena at a time.

    The memory of a daemon that is gone is let go when the next one's is first copied. Here
    it is held until then, since what is registered must not be unmapped.

    Thread-safe. A forked child forgets all of it: a registration is its parent's.
    """

    def __init__(self, register: Callable[[int, int], None], unregister: Callable[[int], None]) -> None:
        """``register(address, nbytes)`` and ``unregister(address)`` raise ``RuntimeError`` if refused."""
        self._register = register
        self._unregister = unregister
        self._quiet = threading.Condition()  # over what follows
        self._memory: mmap.mmap | None = None
        self._copying = 0
        self._thread: threading.Thread | None = None
        self._held: NDArray[np.uint8] | None = None  # keeps the mapping; belongs to the thread, as _pieces
        self._pieces: list[int] = []  # addresses
        _registrations.add(self)

    @contextmanager
    def using(self, data: memoryview) -> Iterator[None]:
        """Memory that ``data`` is part of stays registered, if it is, meanwhile."""
        self._notice(memory_under(data))
        with self._quiet:
            self._copying += 1
        try:
            yield
        finally:
            with self._quiet:
                self._copying -= 1
                self._quiet.notify_all()

    def _notice(self, memory: object) -> None:
        if not isinstance(memory, mmap.mmap) or memory is self._memory:  # bytes that came by network
            return
        with self._quiet:
            if memory is self._memory:
                return
            before, self._memory = self._thread, memory
            self._thread = threading.Thread(
                target=self._change, args=(before, memory), name="latentkv-register", daemon=True
            )
            self._thread.start()

    def join(self) -> None:
        """Wait until the arena that was noticed last is registered."""
        with self._quiet:
            thread = self._thread
        if thread is not None:
            thread.join()

    def _change(self, before: threading.Thread | None, memory: mmap.mmap) -> None:
        if before is not None:
            before.join()
        try:
            self._let_go()
            self._take(memory)
        except RuntimeError as error:  # copies go through the driver's own pinned memory then
            log.warning("event=arena_not_registered reason=%s", error)

    def _let_go(self) -> None:
        with self._quiet:
            # Nothing may be under way; what begins later needs no registration to be right.
            self._quiet.wait_for(lambda: not (self._pieces and self._copying))
            pieces, self._pieces = self._pieces, []
            for address in pieces:
                self._unregister(address)
            self._held = None

    def _take(self, memory: mmap.mmap) -> None:
        self._held = np.frombuffer(memory, np.uint8)
        base = self._held.ctypes.data
        for start in range(0, len(self._held), PIECE_BYTES):
            if self._memory is not memory:  # another daemon's already
                return
            self._register(base + start, min(PIECE_BYTES, len(self._held) - start))
            self._pieces.append(base + start)

    def forget(self) -> None:
        """In a forked child: nothing here is ours."""
        self._quiet = threading.Condition()
        self._memory, self._thread, self._held, self._copying = None, None, None, 0
        self._pieces = []


_registrations: weakref.WeakSet[ArenaRegistration] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for registration in list(_registrations):
        registration.forget()


os.register_at_fork(after_in_child=_after_fork_in_child)


def _register(address: int, nbytes: int) -> None:
    runtime = torch.cuda.cudart()
    _check(int(runtime.cudaHostRegister(address, nbytes, _PORTABLE)), "cudaHostRegister")


def _unregister(address: int) -> None:
    runtime = torch.cuda.cudart()
    _check(int(runtime.cudaHostUnregister(address)), "cudaHostUnregister")


def _check(status: int, call: str) -> None:
    if status:
        raise RuntimeError(f"{call} answered {status}")


# One for the process: memory can be registered once only, however many pools copy from it.
cuda_registration = ArenaRegistration(_register, _unregister)
