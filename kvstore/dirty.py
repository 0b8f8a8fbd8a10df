"""Blocks that are readable and not on disk yet: what is to be written, in which order.

Blocks of one layout wait in one lane, parents before children. Lanes take turns, so what cannot be
written of one layout holds up no other; and in a lane that fails it is found out which block is to blame.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

from kvstore.layout import LatentLayout
from kvstore.prefix_index import NONE, PrefixIndex
from kvstore.spaces import SpaceTable
from kvstore.trouble import Trouble

GROWTH = 4  # after each success of a lane that had failed its batches grow so much


class Lane:
    """The queued blocks of one layout, in order of commit."""

    def __init__(self, layout: LatentLayout, index: PrefixIndex, numbers: Iterator[int]) -> None:
        self.layout = layout
        self._index = index
        self._numbers = numbers
        self._rows: OrderedDict[int, int] = OrderedDict()  # row -> its place in the order
        self.taken: dict[int, int] = {}  # the same of those under way
        self._parked: dict[int, int] = {}  # the same of those that wait for something else to be done first
        self.trouble = Trouble()
        self.cap: int | None = None  # blocks at a time, while it is not known what fails; None is no limit
        self._suspect = NONE  # failed alone, just now
        self._struck: set[int] = set()  # failed alone while another one could be written

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[int]:
        return iter(self._rows)

    def __reversed__(self) -> Iterator[int]:
        return reversed(self._rows)

    @property
    def total(self) -> int:
        """Those under way and those that wait for something else too."""
        return len(self._rows) + len(self.taken) + len(self._parked)

    def number(self, row: int) -> int:
        """The place of a queued row in the order of commit."""
        return self._rows[row]

    def add(self, row: int) -> None:
        """A block comes, behind all others."""
        self._rows[row] = next(self._numbers)

    def discard(self, row: int) -> bool:
        """A block leaves, if it is here; whether it was."""
        self._struck.discard(row)
        return any(rows.pop(row, None) is not None for rows in (self._rows, self._parked, self.taken))

    def park(self, blocks: Collection[bytes]) -> list[int]:
        """Blocks with these hashes, and what stands on them, are not taken before ``unpark``; their rows."""
        index, parked = self._index, []
        for row in list(self._rows):
            if index.hashes[row] in blocks or index.parent[row] in self._parked:
                self._parked[row] = self._rows.pop(row)
                parked.append(row)
        return parked

    def unpark(self) -> None:
        """They are queued again, each where it was."""
        self._rows.update(self._parked)
        self._parked = {}
        self._sort()

    def next(self, limit: int) -> list[int]:
        """The first blocks, for a batch. One that has failed alone goes alone again."""
        rows: list[int] = []
        for row in self._rows:
            if len(rows) >= limit or (rows and row in self._struck):
                break
            rows.append(row)
            if row in self._struck:
                break
        return rows

    def take(self, limit: int) -> list[int]:
        """Take these."""
        rows = self.next(limit)
        for row in rows:
            self.taken[row] = self._rows.pop(row)
        return rows

    def put_back(self, rows: Iterable[int]) -> None:
        """Blocks that were taken are queued again, each where it was."""
        back = [row for row in rows if row in self.taken]
        for row in back:
            self._rows[row] = self.taken.pop(row)
        if back:
            self._sort()

    def _sort(self) -> None:
        self._rows = OrderedDict(sorted(self._rows.items(), key=lambda item: item[1]))

    def done(self, row: int) -> bool:
        """A block that was taken needs no more writing; False if it has left meanwhile."""
        self._struck.discard(row)
        return self.taken.pop(row, None) is not None

    def family(self, row: int) -> list[int]:
        """A queued row, and those that are queued and stand on it; parents first."""
        family = {row: None}
        for each in self._rows:
            if self._index.parent[each] in family:
                family[each] = None
        return list(family)

    def failed(self, rows: Sequence[int]) -> tuple[list[int], bool]:
        """A batch of these, queued again by now, could not be written, and it is not known why.

        The rows that shall not be tried any more, for it is known now that it is theirs; and whether
        to pause before the next attempt, for all that is known points at the disk.
        """
        narrowed, self.cap = self.cap is not None, 1
        if len(rows) != 1:
            return [], not narrowed
        row = rows[0]
        if row in self._struck:
            return self.family(row), False
        family = self.family(row)
        if self._suspect != NONE or len(family) == len(self._rows):
            self._suspect = NONE
            return [], True
        self._suspect = row  # the next one will tell whether it is the disk
        for each in family:
            self._rows[each] = next(self._numbers)
            self._rows.move_to_end(each)
        return [], False

    def succeeded(self, limit: int) -> None:
        """A batch was written; ``limit`` is what a full one has."""
        if self._suspect in self._rows:
            self._struck.add(self._suspect)
        self._suspect = NONE
        self.trouble.over()
        if self.cap is not None:
            self.cap = self.cap * GROWTH if self.cap * GROWTH < limit else None


class DirtyQueue:
    """All lanes. Each row in it is held, so that its number cannot pass to another block."""

    def __init__(self, index: PrefixIndex, spaces: SpaceTable) -> None:
        self._index = index
        self._spaces = spaces
        self._numbers = itertools.count()
        self._lanes: OrderedDict[LatentLayout, Lane] = OrderedDict()  # whose turn is next comes first

    def __len__(self) -> int:
        return sum(lane.total for lane in self._lanes.values())

    def __iter__(self) -> Iterator[int]:
        """Rows that are queued; those under way are not."""
        for lane in self._lanes.values():
            yield from lane

    def __bool__(self) -> bool:
        return any(len(lane) for lane in self._lanes.values())

    @property
    def nbytes(self) -> int:
        """Of all blocks that are queued."""
        return sum(len(lane) * lane.layout.block_bytes for lane in self._lanes.values())

    @property
    def lanes(self) -> Collection[Lane]:
        """Those with something queued or under way."""
        return self._lanes.values()

    @property
    def troubled(self) -> bool:
        """Whether some of it could not be written."""
        return any(lane.trouble for lane in self._lanes.values())

    def _layout(self, row: int) -> LatentLayout:
        return self._spaces.of(self._index.namespace[row]).layout

    def lane_of(self, row: int) -> Lane | None:
        """The lane of a block's layout, if it has something queued or under way."""
        return self._lanes.get(self._layout(row))

    def add(self, row: int) -> None:
        """A block is to be written."""
        layout = self._layout(row)
        lane = self._lanes.get(layout)
        if lane is None:
            lane = self._lanes[layout] = Lane(layout, self._index, self._numbers)
        self._index.hold(row)
        lane.add(row)

    def discard(self, row: int) -> None:
        """A block has left, or stays in memory only; nothing happens if it is not here."""
        lane = self.lane_of(row)
        if lane is not None and lane.discard(row):
            self._tidy(lane)
            self._index.unhold(row)

    def done(self, lane: Lane, rows: Iterable[int]) -> None:
        """Blocks that were taken are on disk."""
        for row in rows:
            if lane.done(row):
                self._index.unhold(row)
        self._tidy(lane)

    def put_back(self, lane: Lane, rows: Iterable[int]) -> None:
        """Blocks that were taken are queued again, each where it was."""
        lane.put_back(rows)
        self._tidy(lane)

    def _tidy(self, lane: Lane) -> None:
        if not lane.total and not lane.trouble:
            self._lanes.pop(lane.layout, None)

    def tidy(self) -> None:
        """Something could be written: those that have nothing left are in no trouble any more."""
        for lane in [lane for lane in self._lanes.values() if not lane.total]:
            del self._lanes[lane.layout]

    def ready(self, now: float, least: Callable[[Lane], int]) -> Lane | None:
        """The lane whose turn it is: one that may be tried now, and has as many blocks as ``least`` says.

        A lane that failed has one batch under way at a time, so that it is known which one fails.
        """
        for lane in self._lanes.values():
            alone = lane.cap is not None and lane.taken
            if len(lane) and not alone and lane.trouble.may_try(now) and len(lane) >= least(lane):
                return lane
        return None

    def take(self, lane: Lane, limit: int) -> list[int]:
        """The first blocks of a lane; the next turn is another's."""
        self._lanes.move_to_end(lane.layout)
        return lane.take(limit)

    def in_the_way(self, row: int) -> list[int]:
        """Queued blocks that came after ``row`` and alone keep others on the disk: their half-written prefix.

        Given up, they and what they stand on can leave, for ``row``. Those that came last go first.
        """
        for lane in self._lanes.values():
            for top in reversed(lane):
                if lane.number(top) <= self._number(row):
                    break
                if not self._above(row, self._index.parent[top]) and (family := self.keeping(lane, top)):
                    return family
        return []

    def keeping(self, lane: Lane, top: int) -> list[int]:
        """A queued block and those that stand on it, if they alone keep what it stands on; none else."""
        index, above = self._index, self._index.parent[top]
        if above == NONE or index.place[above] == NONE or index.holds[above]:
            return []
        family = lane.family(top)
        return family if all(index.holds[each] == 1 for each in family) else []

    def _number(self, row: int) -> int:
        lane = self.lane_of(row)
        return lane.number(row) if lane is not None else 0

    def _above(self, row: int, sought: int) -> bool:
        """Whether ``sought`` is in the chain that ends at ``row``."""
        if sought == NONE:
            return False
        while row != NONE and self._index.depth[row] > self._index.depth[sought]:
            row = self._index.parent[row]
        return row == sought
