"""What a store owes: documents that it confirmed to be on disk, and that nothing excuses it to have lost."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

Document = tuple[int, int]
"""A space and a number."""


@dataclass(frozen=True, slots=True)
class _Entry:
    hashes: tuple[bytes, ...]
    ended: float  # when it was confirmed
    mark: int  # how many uses there were by then


class Ledger:
    """Confirmations and excuses. Thread-safe; times are monotonic seconds.

    A document is owed as far as each of its blocks was confirmed by whoever filled it, and until blocks of
    so many bytes were used behind it that it may have been evicted: half of the disk's capacity, since what
    is least recently used goes first. To be stored, loaded or found there is a use.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self._horizon = capacity_bytes // 2
        self._lock = threading.Lock()
        self._entries: dict[Document, _Entry] = {}
        self._sure: dict[bytes, float] = {}  # block -> when it was confirmed
        self._uses = 0
        self._used: dict[bytes, tuple[int, int]] = {}  # block -> its last use and its bytes, the latest last
        self._damaged: dict[bytes, float] = {}  # block -> when
        self._spoilt: list[tuple[float, float]] = []

    def used(self, blocks: Sequence[bytes], block_bytes: int) -> None:
        """Somebody asks for these blocks, so they leave the disk behind all others."""
        with self._lock:
            self._use(blocks, block_bytes)

    def _use(self, blocks: Sequence[bytes], block_bytes: int) -> None:
        self._uses += 1
        for block in blocks:
            self._used.pop(block, None)
            self._used[block] = (self._uses, block_bytes)

    def stored(self, filled: Sequence[bytes], block_bytes: int) -> None:
        """These blocks were filled, so they were not there."""
        with self._lock:
            self._use(filled, block_bytes)
            for block in filled:
                self._sure.pop(block, None)

    def confirmed(
        self, document: Document, hashes: Sequence[bytes], filled: Sequence[bytes], began: float, ended: float
    ) -> None:
        """A document is on disk, its blocks ``filled`` since ``began``.

        One whose last block was there before is as old as it was: the disk may let it go earlier.
        """
        with self._lock:
            if any(began <= last and first <= ended for first, last in self._spoilt):
                return
            for block in filled:
                if self._damaged.get(block, 0.0) < began:
                    self._sure[block] = ended
            if hashes[-1] in filled:
                self._entries[document] = _Entry(tuple(hashes), ended, self._uses)

    def spoil(self, first: float, last: float) -> None:
        """What was confirmed until ``last`` is owed no more, nor what was under way since ``first``."""
        with self._lock:
            self._spoilt.append((first, last))
            self._sure = {block: ended for block, ended in self._sure.items() if ended > last}

    def damage(self, block: bytes) -> None:
        """A block's bytes on disk were damaged, or will be now: not owed until it is stored again."""
        with self._lock:
            self._damaged[block] = time.monotonic()
            self._sure.pop(block, None)

    def owed(self) -> dict[Document, int]:
        """Leading blocks that must be there of each document, the latest first."""
        with self._lock:
            first = self._first_kept()
            live = [(entry.mark, key, entry) for key, entry in self._entries.items() if entry.mark >= first]
            live.sort(key=lambda item: item[0], reverse=True)
            owed = {key: self._whole(entry.hashes) for _, key, entry in live}
            return {key: blocks for key, blocks in owed.items() if blocks}

    def _first_kept(self) -> int:
        """The use behind which blocks of no more bytes than the horizon were used."""
        nbytes = 0
        for use, size in reversed(self._used.values()):
            nbytes += size
            if nbytes > self._horizon:
                return use
        return 0

    def age(self, document: Document) -> float:
        """Seconds since it was confirmed."""
        return time.monotonic() - self._entries[document].ended

    def _whole(self, hashes: Sequence[bytes]) -> int:
        return next((at for at, block in enumerate(hashes) if block not in self._sure), len(hashes))
