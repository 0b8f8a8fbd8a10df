"""What of a directory of slabs is used no more in this run: places, and whole files."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from pathlib import Path

from kvstore.payloads import SetAside
from kvstore.payloads.slab_file import Slab

log = logging.getLogger(__name__)

PLACES_TRIED = 3  # for a payload, before it is the disk that fails
_SUSPECTS = 4 * PLACES_TRIED


class BadPlaces:
    """Counts and logs what is set aside. Whoever calls holds the slabs' lock."""

    def __init__(self) -> None:
        self._places = self._nbytes = 0
        self._suspects: list[int] = []
        self._files: dict[tuple[int, int], int] = {}  # eighths and number of files, and their bytes

    def set_aside(self, slab: Slab, slot: int, why: OSError) -> None:
        """Use a place no more."""
        if slab.uses(slot):
            slab.set_aside(slot)
            self._places += 1
            self._nbytes += slab.slot_bytes
            offset = slot * slab.slot_bytes
            log.error("event=place_set_aside path=%s offset=%d reason=%s", slab.path, offset, why)

    def suspect(self, keys: Sequence[int]) -> list[int]:
        """Places that failed while no other was seen to work are kept out of use, so that others are tried.

        Those that are no longer, for they are too many.
        """
        self._suspects += keys
        free = self._suspects[:-_SUSPECTS]
        del self._suspects[:-_SUSPECTS]
        return free

    def take_suspects(self) -> list[int]:
        """All of them: it can be found out now which are bad."""
        suspects, self._suspects = self._suspects, []
        return suspects

    def leave_alone(self, path: Path, eighths: int, number: int, why: OSError) -> None:
        """A file cannot be opened, or not be removed."""
        log.error("event=slab_left_alone path=%s reason=%s; its blocks are lost", path, why)
        nbytes = 0
        with contextlib.suppress(OSError):
            nbytes = path.lstat().st_blocks * 512
        self._files[eighths, number] = nbytes

    def numbers(self, eighths: int) -> set[int]:
        """Of the files of a size that are left alone."""
        return {number for size, number in self._files if size == eighths}

    @property
    def file_bytes(self) -> int:
        """Of the files that are left alone."""
        return sum(self._files.values())

    def total(self) -> SetAside:
        """See ``Payloads.set_aside``."""
        return SetAside(self._places, len(self._files), self._nbytes + self.file_bytes)
