from dataclasses import dataclass, field

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from kvstore.prefix_index import NONE, BlockState, PrefixIndex
from kvstore.units import UnitKind

END, COMMON = UnitKind.REQUEST_END, UnitKind.COMMON_PREFIX


def name(number: int) -> bytes:
    return number.to_bytes(32, "big")


def chain(index: PrefixIndex, *names: int, parent: int = NONE) -> list[int]:
    """PRESENT rows one below the other."""
    rows = []
    for number in names:
        depth = 1 + (index.depth[parent] if parent != NONE else 0)
        parent = index.add(name(number), parent, 0, depth, 0.0)
        index.state[parent] = BlockState.PRESENT
        index.place[parent] = number
        rows.append(parent)
    return rows


def test_a_walk_ends_at_the_first_block_that_is_not_present():
    index = PrefixIndex()
    rows = chain(index, 1, 2, 3)
    index.lose(rows[1])
    walk = index.walk(0, [name(1), name(2), name(3)])
    assert (walk.rows.tolist(), walk.next_row) == (rows[:1], rows[1])


def test_a_walk_never_enters_another_namespace():
    index = PrefixIndex()
    chain(index, 1, 2)
    assert index.walk(1, [name(1), name(2)]).rows.tolist() == []


def test_a_lost_block_in_the_middle_stays_as_a_hole_and_goes_with_its_last_child():
    index = PrefixIndex()
    rows = chain(index, 1, 2, 3)
    assert index.lose(rows[0]) == []
    assert index.lose(rows[1]) == []
    assert index.lose(rows[2]) == [rows[2], rows[1], rows[0]]
    assert len(index) == 0


def test_a_held_hole_goes_when_it_is_let_go():
    index = PrefixIndex()
    (row,) = chain(index, 1)
    index.hold(row)
    assert index.lose(row) == []
    assert index.find(name(1)) == row
    index.unhold(row)
    assert index.find(name(1)) == NONE


def test_the_mark_of_a_lost_block_is_gone_for_good():
    index = PrefixIndex()
    rows = chain(index, 1, 2)
    index.mark(rows[0], END, 0.0)
    index.lose(rows[0])
    index.state[rows[0]], index.place[rows[0]] = BlockState.PRESENT, 9
    assert index.deepest_unit(np.array(rows)) == 0
    assert not index.check()


def test_a_row_is_not_adopted_by_one_that_is_not_right_above_it():
    """Else a forged call could tie a chain into a ring."""
    index = PrefixIndex()
    rows = chain(index, 1, 2, 3)
    index.adopt(rows[0], rows[2])
    assert index.parent[rows[0]] == NONE
    assert not index.check()


def test_check_finds_what_is_wrong():
    index = PrefixIndex()
    rows = chain(index, 1, 2)
    index.children[rows[0]] = 5
    index.kinds[rows[1]] = END
    index.place[rows[1]] = NONE
    faults = " ".join(index.check())
    assert "5 children" in faults
    assert "without slot or place" in faults
    assert "unit record" in faults


@dataclass
class Entry:
    """The model of a block."""

    parent: int | None
    present: bool = True
    holds: int = 0
    kinds: int = 0
    used: float = 0.0
    kids: set[int] = field(default_factory=set)


class IndexMachine(RuleBasedStateMachine):
    """The index against a dictionary of objects."""

    blocks = Bundle("blocks")

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex()
        self.model: dict[int, Entry] = {}
        self.clock = 0.0
        self.next = 0

    def row(self, block: int) -> int:
        return self.index.find(name(block))

    def forget(self, block: int | None) -> None:
        while block is not None:
            entry = self.model[block]
            if entry.present or entry.holds or entry.kids:
                return
            del self.model[block]
            if entry.parent is not None:
                self.model[entry.parent].kids.remove(block)
            block = entry.parent

    def depth(self, block: int | None) -> int:
        return 0 if block is None else 1 + self.depth(self.model[block].parent)

    @rule(target=blocks, parent=st.none() | blocks)
    def add(self, parent: int | None) -> int:
        parent = parent if parent in self.model else None
        self.next += 1
        above = NONE if parent is None else self.row(parent)
        row = self.index.add(name(self.next), above, 0, self.depth(parent) + 1, self.clock)
        self.index.state[row], self.index.place[row] = BlockState.PRESENT, self.next
        self.model[self.next] = Entry(parent, used=self.clock)
        if parent is not None:
            self.model[parent].kids.add(self.next)
        return self.next

    @rule(block=blocks)
    def lose(self, block: int) -> None:
        if block in self.model:
            self.index.lose(self.row(block))
            self.model[block].present, self.model[block].kinds = False, 0
            self.forget(block)

    @rule(block=blocks)
    def heal(self, block: int) -> None:
        if block in self.model:
            row = self.row(block)
            self.index.state[row], self.index.place[row] = BlockState.PRESENT, block
            self.model[block].present = True

    @rule(block=blocks)
    def hold(self, block: int) -> None:
        if block in self.model:
            self.index.hold(self.row(block))
            self.model[block].holds += 1

    @rule(block=blocks)
    def unhold(self, block: int) -> None:
        if block in self.model and self.model[block].holds:
            self.index.unhold(self.row(block))
            self.model[block].holds -= 1
            self.forget(block)

    @rule(block=blocks, kinds=st.sampled_from([END, COMMON, END | COMMON]))
    def mark(self, block: int, kinds: UnitKind) -> None:
        if block in self.model and self.model[block].present:
            news = self.index.mark(self.row(block), kinds, self.clock)
            assert news == (self.model[block].kinds | kinds != self.model[block].kinds)
            self.model[block].kinds |= kinds

    @rule(block=blocks)
    def touch(self, block: int) -> None:
        self.clock += 1
        path = self.path(block)
        self.index.touch(np.array([self.row(one) for one in path], np.int64), self.clock)
        for one in path:
            self.model[one].used = self.clock

    def path(self, block: int | None) -> list[int]:
        """The chain down to a block, or nothing if it is unknown."""
        found: list[int] = []
        while block is not None and block in self.model:
            found.insert(0, block)
            block = self.model[block].parent
        return found

    @rule(block=blocks)
    def walk(self, block: int) -> None:
        path = self.path(block)
        whole = next((i for i, one in enumerate(path) if not self.model[one].present), len(path))
        walk = self.index.walk(0, [name(one) for one in path])
        assert walk.rows.tolist() == [self.row(one) for one in path[:whole]]
        assert walk.next_row == (NONE if whole == len(path) else self.row(path[whole]))
        units = [i + 1 for i, one in enumerate(path[:whole]) if self.model[one].kinds]
        assert self.index.deepest_unit(walk.rows) == (units[-1] if units else 0)

    @invariant()
    def agree(self) -> None:
        assert self.index.check() == []
        assert {self.index.hashes[row] for row in self.index} == {name(block) for block in self.model}
        for block, entry in self.model.items():
            row = self.row(block)
            assert self.index.parent[row] == (NONE if entry.parent is None else self.row(entry.parent))
            assert (self.index.state[row] == BlockState.PRESENT) == entry.present
            assert self.index.children[row] == len(entry.kids)
            assert (self.index.kinds[row], self.index.used[row]) == (entry.kinds, entry.used)
            assert self.index.forks(row) == (entry.present and len(entry.kids) > 1 and not entry.kinds)
        assert self.index.on_disk() == sum(entry.present for entry in self.model.values())


TestIndex = IndexMachine.TestCase
TestIndex.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
