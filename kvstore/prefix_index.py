"""The chains of blocks in RAM, the unit marks on them, and matching.

Columns, not objects: a block is a row number into parallel arrays (under 250 bytes a
block). The index is owned by the store's event loop, and nothing here waits or locks.

Invariants (``check`` verifies them):
  * ``children[r]`` is the number of rows whose parent is ``r``; a row with children,
    or one that is held, is never removed;
  * a PRESENT row has a slot, a place on disk, or both; an ABSENT row (a hole: its block
    was lost, or is known only as somebody's parent) has neither, no mark, and has
    children or is held;
  * a FILLING row has a slot and no place;
  * a row is one deeper than its parent, so chains have no cycles;
  * ``population`` has the number of rows of each namespace that has any.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import repeat
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvstore.hashing import HASH_BYTES, ROOT
from kvstore.units import UnitKind

NONE = -1  # no row, no slot, no place
_GROWTH = 256  # rows made at once


def view(column: array[Any] | bytearray) -> NDArray[Any]:
    """A column as a writable numpy array, [rows]. Short-lived: no row can be added while it lives."""
    return np.frombuffer(column, column.typecode if isinstance(column, array) else np.uint8)


def _first(flags: NDArray[np.bool_]) -> int:
    """Index of the first that is set; the length if none is."""
    return int(flags.argmax()) if flags.any() else len(flags)


class BlockState(IntEnum):
    """Whether a block's bytes can be had."""

    FREE = 0  # the row is unused
    ABSENT = 1
    FILLING = 2
    PRESENT = 3


@dataclass(slots=True)
class UnitUse:
    """What is known of a unit besides its mark. Times are the store's."""

    created: float
    used: float
    hits: int = 0


@dataclass(frozen=True, slots=True)
class Walk:
    """How far a chain runs along stored blocks, and why it ends there."""

    rows: NDArray[np.int64]  # the PRESENT rows from the first block on
    next_row: int  # row of the block behind them if the index knows it, else NONE

    @property
    def last(self) -> int:
        """The last of ``rows``, of which there must be one."""
        return int(self.rows[-1])


class PrefixIndex:
    """Rows of blocks; see the module's invariants."""

    def __init__(self) -> None:
        self._rows: dict[bytes, int] = {}
        self.population: Counter[int] = Counter()  # rows by namespace
        self._free: list[int] = []
        self.hashes: list[bytes] = []
        self.state = bytearray()
        self.parent = array("i")
        self.children = array("i")
        self.holds = array("i")
        self.namespace = array("i")
        self.depth = array("i")  # blocks up to and with this one
        self.slot = array("i")
        self.place = array("q")  # key of the payload
        self.page = array("I")  # where it starts in its file, 0 if unknown
        self.length = array("I")  # stored bytes on disk
        self.codec = bytearray()
        self.checksum = array("Q")  # xxh3-64 of the raw block; valid with a place
        self.used = array("d")  # the store's time
        self.created = array("I")  # the same, when the block was stored
        self.kinds = bytearray()
        self.units: dict[int, UnitUse] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[int]:
        return iter(self._rows.values())

    def find(self, block: bytes) -> int:
        """Row of a hash, or NONE."""
        return self._rows.get(block, NONE)

    def add(self, block: bytes, parent: int, namespace: int, depth: int, used: float) -> int:
        """A new row in state ABSENT below ``parent`` (NONE for a first block or an unknown parent)."""
        if not self._free:
            self._grow()
        row = self._free.pop()
        self._rows[block] = row
        self.hashes[row] = block
        self.state[row] = BlockState.ABSENT
        self.namespace[row] = namespace
        self.population[namespace] += 1
        self.depth[row] = depth
        self.used[row] = used
        self.created[row] = int(used)
        self.parent[row] = parent
        if parent != NONE:
            self.children[parent] += 1
        return row

    def _grow(self) -> None:
        first = len(self.hashes)
        self._widen(_GROWTH)
        self.hashes.extend([b""] * _GROWTH)
        self._free.extend(range(first + _GROWTH - 1, first - 1, -1))

    def _widen(self, rows: int) -> None:
        for column in (self.parent, self.slot, self.place):
            column.extend(array(column.typecode, [NONE]) * rows)
        for counts in (
            self.children,
            self.holds,
            self.namespace,
            self.depth,
            self.page,
            self.length,
            self.checksum,
            self.used,
            self.created,
        ):
            counts.frombytes(bytes(rows * counts.itemsize))
        for flags in (self.state, self.codec, self.kinds):
            flags.extend(bytes(rows))

    def extend(self, records: NDArray[np.void]) -> int:
        """Rows for many blocks on disk, PRESENT and none of them known yet; returns the first of them.

        ``records`` has the fields hash (32 bytes), namespace, depth, place, page, length, codec,
        checksum and used. The rows follow each other in that order, and have no parent before ``link``.
        """
        first = len(self.hashes)
        hashes: list[bytes] = records["hash"].tolist()
        owners, counts = np.unique(records["namespace"], return_counts=True)
        self.population.update(dict(zip(owners.tolist(), counts.tolist(), strict=True)))
        self._widen(len(records))
        self.hashes.extend(hashes)
        self._rows.update(zip(hashes, range(first, len(self.hashes)), strict=True))
        for name, column in (
            ("namespace", self.namespace),
            ("depth", self.depth),
            ("place", self.place),
            ("page", self.page),
            ("length", self.length),
            ("checksum", self.checksum),
            ("used", self.used),
            ("used", self.created),  # a block is recorded once, when it is written
        ):
            view(column)[first:] = records[name]
        view(self.codec)[first:] = records["codec"]
        view(self.state)[first:] = BlockState.PRESENT
        return first

    def link(self, parents: NDArray[np.void]) -> None:
        """Give all rows, of which none has a parent yet, their parents: hashes of 32 bytes, contiguous.

        One that is not known becomes a hole. So comes once, after the ``extend`` of all that can be a parent.
        """
        above = self._rows_of(parents)
        stands = parents != np.frombuffer(ROOT, parents.dtype)
        for row in np.flatnonzero(stands & (above == NONE)).tolist():
            above[row] = self._find_or_dig(parents[row].tobytes(), row)
        depth = view(self.depth)
        # Else a forged record could tie a chain into a ring.
        above[depth[above] + 1 != depth[: len(above)]] = NONE
        view(self.parent)[: len(above)] = above
        np.add.at(view(self.children), above[above != NONE], 1)

    def _rows_of(self, blocks: NDArray[np.void]) -> NDArray[np.int32]:
        """[blocks]: rows of hashes. NONE where one is unknown, or where rows don't lie by rising hash.

        Three times as fast as asking for one after the other, for a catalogue has them in that order.
        """
        known = np.frombuffer(b"".join(self.hashes), blocks.dtype)
        heads, sought = (each.view(">u8")[:: HASH_BYTES // 8].astype(np.uint64) for each in (known, blocks))
        rows = np.minimum(np.searchsorted(heads, sought), len(known) - 1)
        return np.where(known[rows] == blocks, rows, NONE).astype(np.int32)

    def _find_or_dig(self, block: bytes, below: int) -> int:
        """The row of a block above row ``below``: a hole if there is none."""
        row = self.find(block)
        if row != NONE:
            return row
        return self.add(block, NONE, self.namespace[below], self.depth[below] - 1, self.used[below])

    def adopt(self, row: int, parent: int) -> None:
        """Give a row whose parent was unknown its parent, if it lies one block above."""
        if self.parent[row] == NONE and parent != NONE and self.depth[parent] + 1 == self.depth[row]:
            self.parent[row] = parent
            self.children[parent] += 1

    def lose(self, row: int) -> list[int]:
        """The block's bytes are gone: drop its mark, and the row unless something hangs on it.

        Returns the rows that left the index: this one, and holes above that only it kept.
        """
        self.state[row] = BlockState.ABSENT
        self.slot[row] = self.place[row] = NONE
        self.unmark(row)
        removed = []
        while row != NONE and self._idle_hole(row):
            removed.append(row)
            row = self._remove(row)
        return removed

    def _idle_hole(self, row: int) -> bool:
        return self.state[row] == BlockState.ABSENT and not self.children[row] and not self.holds[row]

    def _remove(self, row: int) -> int:
        parent = self.parent[row]
        if parent != NONE:
            self.children[parent] -= 1
        del self._rows[self.hashes[row]]
        self._leave(self.namespace[row])
        self.hashes[row] = b""
        self.state[row] = BlockState.FREE
        self.parent[row] = NONE
        self._free.append(row)
        return parent

    def _leave(self, namespace: int) -> None:
        self.population[namespace] -= 1
        if not self.population[namespace]:
            del self.population[namespace]

    def hold(self, row: int) -> None:
        """Keep a row, and with it its ancestors, from being evicted."""
        self.holds[row] += 1

    def unhold(self, row: int) -> None:
        """Undo one ``hold``; a hole that nothing keeps any more goes."""
        self.holds[row] -= 1
        if self._idle_hole(row):
            self.lose(row)

    def mark(self, row: int, kinds: UnitKind, now: float) -> bool:
        """Make a unit end at this row; True if that is news."""
        before = self.kinds[row]
        self.kinds[row] = before | kinds
        if row not in self.units:
            self.units[row] = UnitUse(created=now, used=now)
        return self.kinds[row] != before

    def unmark(self, row: int) -> None:
        """No unit ends at this row any more."""
        self.kinds[row] = 0
        self.units.pop(row, None)

    def walk(self, namespace: int, hashes: Sequence[bytes]) -> Walk:
        """Follow a chain along PRESENT rows of a namespace."""
        # In arrays: a prompt of 128K tokens has 2048 blocks, and engines ask again and again.
        found = np.fromiter(map(self._rows.get, hashes, repeat(NONE)), np.int64, len(hashes))
        rows = found[: _first(found == NONE)]
        # A foreign row can't have this hash, save by a forged call: then it is a miss.
        foreign = view(self.namespace)[rows] != namespace
        stop = _first(foreign | (view(self.state)[rows] != BlockState.PRESENT))
        there = stop < len(rows) and not foreign[stop]
        return Walk(rows[:stop], int(rows[stop]) if there else NONE)

    def deepest_unit(self, rows: NDArray[np.int64]) -> int:
        """Length in blocks of the longest unit that ends on one of ``rows``; 0 if none does."""
        ends = np.flatnonzero(view(self.kinds)[rows])
        return int(ends[-1]) + 1 if len(ends) else 0

    def in_arena(self, rows: NDArray[np.int64]) -> int:
        """How many of these rows have a slot."""
        return int(np.count_nonzero(view(self.slot)[rows] != NONE))

    def leaves(self) -> NDArray[np.bool_]:
        """[rows]: PRESENT, and neither held nor stood on. So those that may leave first."""
        leaves: NDArray[np.bool_] = view(self.state) == BlockState.PRESENT
        leaves &= (view(self.children) == 0) & (view(self.holds) == 0)
        return leaves

    def is_leaf(self, row: int) -> bool:
        """``leaves`` for one row."""
        return self.state[row] == BlockState.PRESENT and not self.children[row] and not self.holds[row]

    def forks(self, row: int) -> bool:
        """Whether chains part behind this row, and no unit ends there yet."""
        return self.state[row] == BlockState.PRESENT and self.children[row] > 1 and not self.kinds[row]

    def stored_above(self, row: int) -> int:
        """The next block above that is no hole (holes go with the last block below them); or NONE."""
        row = self.parent[row]
        while row != NONE and self.state[row] == BlockState.ABSENT:
            row = self.parent[row]
        return row

    def on_disk(self) -> int:
        """How many blocks have a place."""
        return int(np.count_nonzero(view(self.place) != NONE))

    def touch(self, rows: NDArray[np.int64], now: float) -> None:
        """Note a use of a whole prefix, so that an ancestor is never older than its children."""
        used = view(self.used)
        used[rows] = np.maximum(used[rows], now)

    def latest_use(self) -> float:
        """The latest of all uses, in the store's time; 0 if there is no block. Looks at all."""
        return float(view(self.used).max(initial=0.0))

    def check(self) -> list[str]:
        """Violated invariants; empty when sound."""
        children = [0] * len(self.hashes)
        for row in self:
            if self.parent[row] != NONE:
                children[self.parent[row]] += 1
        faults = [fault for row in self for fault in self._faults(row, children[row])]
        if self.population != Counter(self.namespace[row] for row in self):
            faults.append(f"rows by namespace are counted as {self.population}")
        return faults

    def _faults(self, row: int, children: int) -> Iterator[str]:
        state, slot, place = BlockState(self.state[row]), self.slot[row], self.place[row]
        if self._rows.get(self.hashes[row]) != row:
            yield f"row {row}: its hash leads elsewhere"
        if children != self.children[row]:
            yield f"row {row}: {self.children[row]} children counted, {children} found"
        if state == BlockState.PRESENT and slot == NONE and place == NONE:
            yield f"row {row}: present without slot or place"
        if state == BlockState.FILLING and (slot == NONE or place != NONE):
            yield f"row {row}: filling with slot {slot}, place {place}"
        if state == BlockState.ABSENT and (slot != NONE or place != NONE):
            yield f"row {row}: absent with slot {slot}, place {place}"
        if self._idle_hole(row) or (state == BlockState.ABSENT and self.kinds[row]):
            yield f"row {row}: a hole that nothing keeps, or with a mark"
        if bool(self.kinds[row]) != (row in self.units):
            yield f"row {row}: kinds {self.kinds[row]} without or beside a unit record"
        if self.holds[row] < 0:
            yield f"row {row}: {self.holds[row]} holds"
        parent = self.parent[row]
        if parent != NONE and self.depth[parent] + 1 != self.depth[row]:
            yield f"row {row}: depth {self.depth[row]} below depth {self.depth[parent]}"
