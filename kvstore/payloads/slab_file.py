"""One slab: a file of equal slots, and which of them are in use."""

from __future__ import annotations

import contextlib
import logging
import os
from itertools import groupby
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvstore.payloads.direct import DirectFile, OpenFile

log = logging.getLogger(__name__)

_BARE = 0  # free, a hole in the file
_VACANT = 1  # free, with blocks of the disk
_USED = 2
_BAD = 3  # could not be written or read while others could: not given out any more


class Slab:
    """The slots ``0 .. slots - 1`` of one file, each BARE, VACANT, USED, or BAD for this run.

    Slots that were written once keep their blocks of the disk, so that writing them anew needs
    no journal; ``punch`` gives those of free slots back. ``disk_bytes`` counts a slot that is
    not BARE in full. Only ``read`` and ``write`` may be called by several threads.
    """

    def __init__(self, path: Path, slot_bytes: int, slots: int, open_file: OpenFile = DirectFile) -> None:
        """Open or create the file, for ``slots`` slots or as many as it has. Raises ``OSError``.

        Of a file that is there, each slot that lies inside it may be kept; ``settle`` comes then.
        """
        self.path = path
        self.slot_bytes = slot_bytes
        self.file = open_file(path, os.O_RDWR | os.O_CREAT)
        try:
            stat = os.fstat(self.file.fd)
            found = stat.st_size // slot_bytes
            self._backed = stat.st_blocks * 512 >= found * slot_bytes
            self.slots = max(found, slots)
            os.ftruncate(self.file.fd, self.slots * slot_bytes)
        except BaseException:
            self.file.close()
            raise
        self._state = bytearray([_VACANT]) * found + bytearray(self.slots - found)
        self._counts = [self.slots - found, found, 0, 0]  # by state

    def _set(self, slot: int, state: int) -> None:
        self._counts[self._state[slot]] -= 1
        self._counts[state] += 1
        self._state[slot] = state

    def keep(self, slots: NDArray[np.int64]) -> NDArray[np.bool_]:
        """At start: these slots are in use; which of them the file has."""
        state = np.frombuffer(self._state, np.uint8)
        there = slots < self.slots
        there[there] = state[slots[there]] != _BARE
        state[slots[there]] = _USED
        self._counts = np.bincount(state, minlength=len(self._counts)).tolist()
        return there

    def settle(self) -> None:
        """After the last ``keep``: know which free slots have blocks of the disk."""
        if self._backed:
            return
        try:  # which ones isn't known: then none
            self.punch()
        except OSError as error:
            log.warning("event=slab_not_punched path=%s reason=%s", self.path, error)

    def preallocate(self) -> None:
        """Give every slot of a new file its blocks now, where the file system can and has them."""
        size = self.slots * self.slot_bytes
        try:
            self.file.allocate(0, size)
        except OSError as error:
            log.warning("event=no_preallocation path=%s reason=%s", self.path, error)
            with contextlib.suppress(OSError):
                self.file.punch(0, size)
            return
        self._state = bytearray([_VACANT]) * self.slots
        self._counts = [0, self.slots, 0, 0]

    @property
    def vacant(self) -> bool:
        """Whether a free slot has blocks of the disk."""
        return self._counts[_VACANT] > 0

    @property
    def full(self) -> bool:
        """Whether no slot is free."""
        return self._counts[_USED] + self._counts[_BAD] == self.slots

    @property
    def empty(self) -> bool:
        """Whether no slot is used, nor bad: another file might get the same place again."""
        return not self._counts[_USED] and not self._counts[_BAD]

    @property
    def bad(self) -> int:
        """How many slots are set aside."""
        return self._counts[_BAD]

    @property
    def disk_bytes(self) -> int:
        """Bytes of the disk that all slots but the BARE have."""
        return (self.slots - self._counts[_BARE]) * self.slot_bytes

    @property
    def deleted(self) -> bool:
        """Whether somebody removed the file while it is open."""
        return os.fstat(self.file.fd).st_nlink == 0

    def take(self, *, last: bool = False) -> int:
        """The first VACANT slot, or else the first BARE one (or the ``last``); it is USED now."""
        find = self._state.rfind if last else self._state.find
        slot = find(_VACANT if self.vacant else _BARE)
        self._set(slot, _USED)
        return slot

    def set_aside(self, slot: int) -> None:
        """The slot is BAD: nothing is written there any more, whatever becomes of what it holds."""
        self._set(slot, _BAD)

    def give(self, slot: int) -> None:
        """The slot is free again; nothing happens if it is not in use."""
        if self.uses(slot):
            self._set(slot, _VACANT)

    def uses(self, slot: int) -> bool:
        """Whether the slot is USED."""
        return slot < self.slots and self._state[slot] == _USED

    def neighbours(self, slot: int) -> list[int]:
        """The next USED slots before and behind this one, as far as there are."""
        return [
            each
            for each in (self._state.rfind(_USED, 0, slot), self._state.find(_USED, slot + 1))
            if each >= 0
        ]

    def have(self, slots: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which of these slots are USED and still inside the file, if that was not deleted."""
        whole = 0 if self.deleted else os.fstat(self.file.fd).st_size // self.slot_bytes
        there = slots < min(whole, self.slots)
        there[there] = np.frombuffer(self._state, np.uint8)[slots[there]] == _USED
        return there

    def punch(self) -> int:
        """Make VACANT slots BARE; the bytes of disk that gives back. Raises ``OSError``."""
        given = 0
        for state, group in groupby(range(self.slots), self._state.__getitem__):
            if state != _VACANT:
                continue
            slots = list(group)
            self.file.punch(slots[0] * self.slot_bytes, len(slots) * self.slot_bytes)
            given += len(slots) * self.slot_bytes
            for slot in slots:
                self._set(slot, _BARE)
        return given

    def sync(self) -> None:
        """Make what was written durable. Raises ``OSError``."""
        self.file.sync()

    def file_bytes(self) -> int:
        """Bytes that the file takes on disk."""
        return os.fstat(self.file.fd).st_blocks * 512

    def remove(self) -> None:
        """Close and delete the file. Raises ``OSError``."""
        self.file.close()
        self.path.unlink(missing_ok=True)
