"""Chains that were seen and are not stored, in a list bounded in bytes.

Kept so that the second request with a prefix can be told to leave a unit where it parts
from the first, although the daemon lacks the blocks, and so that a miss explains itself.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from kvstore.observer import Departure

_CONTINUED, _AGAIN = 1, 2
GHOST_BYTES = 200  # RAM of one entry: a bytes object of 32, a dict entry and its links


class Setback(StrEnum):
    """Why a block never got as far as the disk."""

    REFUSED = "refused"  # Reserve had no room for it
    GIVEN_UP = "given_up"  # the worker that filled it ended its lease, or died
    UNWRITTEN = "unwritten"  # it left a full arena while the disk could not be written


@dataclass(frozen=True, slots=True)
class Gone:
    """Why a block is not in the store, and since when (the store's time)."""

    why: Departure | Setback
    at: float


class GhostList:
    """An LRU set of block hashes, each with whether its chain went on behind it, and was seen again.

    Beside it, and at most half of the room, the blocks that have left, or failed to come.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self._capacity = capacity_bytes // GHOST_BYTES
        self._seen: OrderedDict[bytes, int] = OrderedDict()
        self._gone: OrderedDict[bytes, Gone] = OrderedDict()

    def __len__(self) -> int:
        return len(self._seen) + len(self._gone)

    def __contains__(self, block: bytes) -> bool:
        return block in self._seen

    def remember(self, hashes: Sequence[bytes]) -> None:
        """Note a chain's blocks, first to last. The oldest entries leave for them."""
        seen = self._seen
        # Deepest first, so that a chain's end is forgotten before its beginning.
        for index in range(len(hashes) - 1, -1, -1):
            block = hashes[index]
            before = seen.get(block)
            goes_on = _CONTINUED if index < len(hashes) - 1 else 0
            seen[block] = goes_on if before is None else goes_on | before | _AGAIN
            seen.move_to_end(block)
        self._trim()

    def note(self, block: bytes) -> None:
        """A block was stored in memory only: should it go from there, it has been seen."""
        self._gone.pop(block, None)
        self._seen.setdefault(block, 0)
        self._trim()

    def seen_before(self, block: bytes) -> bool:
        """Whether a block was stored or seen before the request that brings it now."""
        gone = self._gone.get(block)
        return bool(self._seen.get(block, 0) & _AGAIN) or (
            gone is not None and isinstance(gone.why, Departure)
        )

    def leave(self, block: bytes, gone: Gone) -> None:
        """A stored block has left, or one that was to be stored has not come."""
        self._gone[block] = gone
        self._gone.move_to_end(block)
        self._trim()

    def _trim(self) -> None:
        while len(self) > self._capacity:
            leaving = self._gone if len(self._gone) > self._capacity // 2 else self._seen
            leaving.popitem(last=False)

    def forget(self, block: bytes) -> None:
        """The block is stored now."""
        self._seen.pop(block, None)
        self._gone.pop(block, None)

    def gone(self, block: bytes) -> Gone | None:
        """Why a block is not there, if that is remembered."""
        return self._gone.get(block)

    def continued(self, block: bytes) -> bool:
        """Whether a chain was seen to go on behind this block."""
        return bool(self._seen.get(block, 0) & _CONTINUED)
