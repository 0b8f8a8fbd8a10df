"""What is remembered, and told to whoever watches, of blocks that leave the store or do not get there."""

from __future__ import annotations

from kvstore.clock import StoreTime
from kvstore.ghosts import GhostList, Gone, Setback
from kvstore.observer import Departure, Observer
from kvstore.prefix_index import PrefixIndex


class Departures:
    """Part of the store; owned by its event loop like the tables that it works on."""

    def __init__(self, index: PrefixIndex, ghosts: GhostList, observer: Observer, time: StoreTime) -> None:
        self._index = index
        self._ghosts = ghosts
        self._observer = observer
        self._time = time

    def left(self, row: int, why: Departure) -> None:
        """A block is about to leave the store."""
        now, unit = self._time.now(), self._index.units.get(row)
        self._ghosts.leave(self._index.hashes[row], Gone(why, now))
        self._observer.block_left(why, now - self._index.used[row])
        if unit is not None:
            self._observer.unit_left(why, now - unit.created, unit.hits)

    def set_back(self, block: bytes, why: Setback) -> None:
        """A block that was to be stored has not come as far as the disk."""
        self._ghosts.leave(block, Gone(why, self._time.now()))
