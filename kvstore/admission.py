"""Which blocks go to disk: all of them, or those that were seen before.

A block that is not admitted is LOOSE in the arena: it can be hit, leaves for others as if it were on
disk, and is not durable. Seen again, it is written, after those of its chain before it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from kvstore.arena import Arena
from kvstore.ghosts import GhostList
from kvstore.host import HostTier
from kvstore.prefix_index import NONE, BlockState, PrefixIndex
from kvstore.settings import Admit
from kvstore.slots import SlotState
from kvstore.writeback import Writer


class Admission:
    """Part of the store; owned by its event loop like the tables that it works on."""

    def __init__(
        self,
        index: PrefixIndex,
        arena: Arena,
        host: HostTier,
        ghosts: GhostList,
        writer: Writer,
        counters: Counter[str],
        admit: Admit,
    ) -> None:
        self._index = index
        self._arena = arena
        self._host = host
        self._ghosts = ghosts
        self._writer = writer
        self._counters = counters
        self._second = admit == "second"

    def stored(self, row: int) -> None:
        """A worker has sealed a block: write it, or keep it in memory only."""
        block = self._index.hashes[row]
        above = self._index.parent[row]
        if (self._second and not self._ghosts.seen_before(block)) or self._host.is_loose(above):
            self._ghosts.note(block)
            self._arena.loosen(self._index.slot[row])
            self._counters["unadmitted_blocks"] += 1
        else:
            self._ghosts.forget(block)
            self._writer.block(row)

    def seen(self, rows: Sequence[int]) -> None:
        """Somebody else has come to these blocks, of one chain: what of them is loose goes to disk."""
        if not self._arena.count(SlotState.LOOSE):
            return
        for row in rows:
            self._admit(row)

    def _admit(self, row: int) -> None:
        index, chain = self._index, []
        while self._host.is_loose(row):
            chain.append(row)
            row = index.parent[row]
        # A block must not be in the catalogue before its parent.
        if row != NONE and index.state[row] != BlockState.PRESENT:
            return
        for each in reversed(chain):
            self._ghosts.forget(index.hashes[each])
            self._arena.tighten(index.slot[each])
            self._writer.block(each)

    def settle(self, rows: Sequence[int]) -> None:
        """A commit was given its ticket: of these blocks those that are loose are not durable."""
        for row in rows:
            if self._host.is_loose(row):
                self._writer.settle_lost(row)
