"""Unit records that are due: made or used since they were last on disk."""

from __future__ import annotations

from collections.abc import Collection
from itertools import islice

from kvstore.catalog import UnitRecord
from kvstore.prefix_index import NONE, PrefixIndex
from kvstore.spaces import SpaceTable


def mark_of(row: int) -> int:
    """The key under which a ticket waits for a row's unit mark, beside the row for its block."""
    return ~row


class UnitMarks:
    """Which units' records the next catalogue transaction takes along.

    A unit whose block is not on disk is not listed: its record goes with its block. Rows that
    are being written are held, so that none is given to another block meanwhile.
    """

    def __init__(self, index: PrefixIndex, spaces: SpaceTable) -> None:
        self._index = index
        self._spaces = spaces
        self._made: dict[int, None] = {}  # rows on disk whose record is not; those made first come first
        self._used: set[int] = set()  # rows on disk whose record lacks a use; no reason to write by itself
        self._writing: set[int] = set()  # rows whose record is being written

    def __bool__(self) -> bool:
        return bool(self._made)

    def make(self, row: int) -> None:
        """A unit was made, or got another kind."""
        self._made[row] = None

    def use(self, row: int) -> None:
        """A unit was hit."""
        self._used.add(row)

    def hurry_uses(self) -> bool:
        """Uses are a reason to write from now on; whether there are any."""
        self._made |= dict.fromkeys(self._used)
        return bool(self._used)

    def drop(self, row: int) -> None:
        """The unit's block leaves."""
        self._made.pop(row, None)
        self._used.discard(row)

    def pending(self, row: int) -> bool:
        """Whether a unit whose block is on disk has still to get there."""
        return row in self._made or row in self._writing

    def writing(self, row: int) -> bool:
        """Whether the unit's record is being written."""
        return row in self._writing

    def made(self) -> list[int]:
        """Rows on disk whose record is not."""
        return list(self._made)

    def take(self, batch: Collection[int], limit: int | None = None) -> list[UnitRecord]:
        """The records that can be written now: those of a batch's blocks, and ``limit`` others (None is all).

        ``end`` follows.
        """
        due = {*batch, *islice(self._made, limit)}
        if limit is None:
            due |= self._used
        self._made = {row: None for row in self._made if row not in due}
        self._used -= due
        index = self._index
        self._writing = {r for r in due if index.kinds[r] and (r in batch or index.place[r] != NONE)}
        for row in self._writing:
            index.hold(row)
        return [self._record(row) for row in self._writing]

    def end(self, batch: Collection[int], *, durable: bool) -> list[int]:
        """The records taken are on disk, or not; rows of which all is on disk now."""
        written, self._writing = self._writing, set()
        for row in written:
            self._index.unhold(row)
        if durable:
            return [row for row in written if row not in self._made]  # others got another kind meanwhile
        # Behind the others, so that one that can never be written does not keep them waiting.
        self._made |= {row: None for row in written if row not in batch and self._index.kinds[row]}
        return []

    def _record(self, row: int) -> UnitRecord:
        index = self._index
        use = index.units[row]
        return UnitRecord(
            hash=index.hashes[row],
            namespace=index.namespace[row],
            tokens=index.depth[row] * self._spaces.of(index.namespace[row]).layout.block_tokens,
            kinds=index.kinds[row],
            created=use.created,
            used=use.used,
            hits=use.hits,
        )
