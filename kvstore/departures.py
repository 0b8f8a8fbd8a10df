"""What is remembered and told of blocks that leave the store, or did not get as far as the disk."""

from __future__ import annotations

import time

from kvstore.ghosts import GhostList, Gone, Setback
from kvstore.observer import Departure, Observer
from kvstore.prefix_index import PrefixIndex


class Departures:
    """Tells the ghosts and the observer. Part of the store; owned by its event loop."""

    def __init__(self, index: PrefixIndex, ghosts: GhostList, observer: Observer) -> None:
        self._index = index
        self._ghosts = ghosts
        self._observer = observer

    def left(self, row: int, why: Departure) -> None:
        """A block is about to leave the store."""
        now, unit = time.time(), self._index.units.get(row)
        self._ghosts.leave(self._index.hashes[row], Gone(why, now))
        self._observer.block_left(why, now - self._index.used[row])
        if unit is not None:
            self._observer.unit_left(why, now - unit.created, unit.hits)

    def set_back(self, block: bytes, why: Setback) -> None:
        """A block that was to be stored did not get as far."""
        self._ghosts.leave(block, Gone(why, time.time()))
