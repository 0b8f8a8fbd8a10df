"""Chains that were seen and are not stored, in a list bounded in bytes.

Kept so that the second request with a prefix can be told to leave a unit where it parts
from the first, although the daemon lacks the blocks, and so that a miss explains itself.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

GHOST_BYTES = 200  # RAM of one entry: a bytes object of 32, a dict entry and its links


class GhostList:
    """An LRU set of block hashes, each with whether its chain went on behind it."""

    def __init__(self, capacity_bytes: int) -> None:
        self._capacity = capacity_bytes // GHOST_BYTES
        self._continued: OrderedDict[bytes, bool] = OrderedDict()

    def __len__(self) -> int:
        return len(self._continued)

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
        while len(seen) > self._capacity:
            seen.popitem(last=False)

    def forget(self, block: bytes) -> None:
        """The block is stored now."""
        self._continued.pop(block, None)

    def continued(self, block: bytes) -> bool:
        """Whether a chain was seen to go on behind this block."""
        return self._continued.get(block, False)
