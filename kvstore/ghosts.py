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

GHOST_BYTES = 200  # RAM of one entry: a bytes object of 32, a dict entry and its links


class Setback(StrEnum):
    """Why a block never got as far as the disk."""

    REFUSED = "refused"  # Reserve had no room for it
    GIVEN_UP = "given_up"  # the worker that filled it ended its lease, or died
    UNWRITTEN = "unwritten"  # it left a full arena while the disk could not be written


@dataclass(frozen=True, slots=True)
class Gone:
    """Why a block is not in the store, and since when (unix seconds)."""

    why: Departure | Setback
    at: float


class GhostList:
    """An LRU set of block hashes, each with whether its chain went on behind it.

    Beside it, and at most half of the room, the blocks that have left, or failed to come.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self._capacity = capacity_bytes // GHOST_BYTES
        self._continued: OrderedDict[bytes, bool] = OrderedDict()
        self._gone: OrderedDict[bytes, Gone] = OrderedDict()

    def __len__(self) -> int:
        return len(self._continued) + len(self._gone)

    def __contains__(self, block: bytes) -> bool:
        return block in self._continued

    def remember(self, hashes: Sequence[bytes]) -> None:
        """Note a chain's blocks, first to last. The oldest entries leave for them."""
        seen = self._continued
        # Deepest first, so that a chain's end is forgotten before its beginning.
        for index in range(len(hashes) - 1, -1, -1):
            block = hashes[index]
            seen[block] = index < len(hashes) - 1 or seen.get(block, False)
            seen.move_to_end(block)
        self._trim()

    def leave(self, block: bytes, gone: Gone) -> None:
        """A stored block has left, or one that was to be stored has not come."""
        self._gone[block] = gone
        self._gone.move_to_end(block)
        self._trim()

    def _trim(self) -> None:
        while len(self) > self._capacity:
            leaving = self._gone if len(self._gone) > self._capacity // 2 else self._continued
            leaving.popitem(last=False)

    def forget(self, block: bytes) -> None:
        """The block is stored now."""
        self._continued.pop(block, None)
        self._gone.pop(block, None)

    def gone(self, block: bytes) -> Gone | None:
        """Why a block is not there, if that is remembered."""
        return self._gone.get(block)

    def continued(self, block: bytes) -> bool:
        """Whether a chain was seen to go on behind this block."""
        return self._continued.get(block, False)
