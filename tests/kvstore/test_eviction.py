import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.eviction import TailEvictor
from kvstore.prefix_index import NONE, BlockState, PrefixIndex
from kvstore.units import UnitKind

END = UnitKind.REQUEST_END


class Tree:
    """Chains written as words; each letter with all before it is a block."""

    def __init__(self):
        self.index = PrefixIndex()
        self.gone = []

    def row(self, word):
        return self.index.find(word.encode())

    def store(self, word, used, unit=True):
        parent = NONE
        for depth in range(1, len(word) + 1):
            row = self.row(word[:depth])
            if row == NONE:
                row = self.index.add(word[:depth].encode(), parent, 0, depth, used)
                self.index.state[row], self.index.place[row] = BlockState.PRESENT, 1
            self.index.used[row] = max(self.index.used[row], used)
            parent = row
        if unit:
            self.index.mark(parent, END, used)

    def evict(self, blocks, policy="unit"):
        def drop(row):
            self.gone.append(self.index.hashes[row].decode())
            self.index.lose(row)

        before = len(self.gone)
        return TailEvictor(self.index, policy).evict(lambda: len(self.gone) - before >= blocks, drop)


@pytest.fixture
def tree():
    return Tree()


def test_nothing_goes_while_there_is_room(tree):
    tree.store("abc", 1)
    assert tree.evict(0)
    assert tree.gone == []


def test_the_least_recently_used_tail_goes_first_and_leaves_first(tree):
    tree.store("abc", 2)
    tree.store("xyz", 1)
    assert tree.evict(1)
    assert tree.gone == ["xyz", "xy", "x"]


def test_a_tail_ends_where_a_unit_or_a_fork_keeps_the_blocks(tree):
    tree.store("ab", 1)
    tree.store("abcdef", 1)
    tree.store("abcdgh", 2)
    assert tree.evict(1)
    assert tree.gone == ["abcdef", "abcde"]
    assert tree.evict(1)
    assert tree.gone[2:] == ["abcdgh", "abcdg", "abcd", "abc"]
    assert tree.row("ab") != NONE


def test_policy_block_takes_no_more_than_needed(tree):
    tree.store("abcdef", 1)
    assert tree.evict(2, policy="block")
    assert tree.gone == ["abcdef", "abcde"]


def test_what_is_held_stays_with_all_above_it(tree):
    tree.store("abcd", 1)
    tree.index.hold(tree.row("abc"))
    assert not tree.evict(4)
    assert tree.gone == ["abcd"]


def test_what_is_not_on_disk_is_not_evicted(tree):
    tree.store("abc", 1)
    tree.index.place[tree.row("abc")] = NONE
    tree.index.slot[tree.row("abc")] = 7
    assert not tree.evict(1)
    assert tree.gone == []


@pytest.mark.parametrize("policy", ["unit", "block"])
def test_blocks_in_memory_only_go_with_the_tail_on_disk_that_they_stand_on(tree, policy):
    tree.store("abcd", 1, unit=False)
    tree.store("xy", 2)
    tree.store("uvw", 0)  # older, but nothing of it is on disk
    loose = [tree.row(word) for word in ("abc", "abcd", "u", "uv", "uvw")]
    for row in loose:
        tree.index.place[row], tree.index.slot[row] = NONE, 7

    def drop(row):
        tree.gone.append(tree.index.hashes[row].decode())
        tree.index.lose(row)

    evictor = TailEvictor(tree.index, policy, loose.__contains__)
    assert evictor.evict(lambda: "ab" in tree.gone, drop)
    assert tree.gone == ["abcd", "abc", "ab", "a"][: 4 if policy == "unit" else 3]


def test_a_prefix_becomes_evictable_when_the_blocks_below_a_hole_go(tree):
    """The hole goes with them, and must not hide the block above it."""
    tree.store("ab", 1)
    tree.store("abcd", 2)
    tree.index.lose(tree.row("abc"))
    assert tree.evict(3)
    assert tree.gone == ["abcd", "ab", "a"]


def test_an_old_prefix_is_taken_before_a_younger_leaf(tree):
    tree.store("ab", 1)
    tree.index.used[tree.row("ab")] = tree.index.used[tree.row("a")] = 1
    tree.store("xy", 3)
    tree.store("abc", 2)
    tree.index.used[tree.row("ab")] = 2
    assert tree.evict(2)
    assert tree.gone == ["abc", "ab", "a"]


CHAINS = st.lists(
    st.tuples(st.text("abc", min_size=1, max_size=5), st.integers(0, 20), st.booleans()),
    min_size=1,
    max_size=12,
)


@given(
    CHAINS, st.lists(st.integers(0, 11), max_size=3), st.integers(1, 30), st.sampled_from(["unit", "block"])
)
def test_eviction_never_takes_what_a_kept_block_stands_on(chains, held, blocks, policy):
    tree = Tree()
    for word, used, unit in chains:
        tree.store(word, used, unit)
    kept = {chains[at % len(chains)][0] for at in held}
    for word in kept:
        tree.index.hold(tree.row(word))
    words = {word[:n] for word, _, _ in chains for n in range(1, len(word) + 1)}
    leaves = {word for word in words if not any(o.startswith(word) and o != word for o in words)}
    free = leaves - kept
    used = {word: tree.index.used[tree.row(word)] for word in words}

    enough = tree.evict(blocks, policy)

    gone = set(tree.gone)
    assert len(gone) == len(tree.gone)
    assert enough == (len(gone) >= blocks)
    protected = {word[:n] for word in kept for n in range(1, len(word) + 1)}
    assert not gone & protected
    if not enough:
        assert gone == words - protected
    for word in words - gone:  # every block that is left has all its ancestors
        assert all(word[:n] not in gone for n in range(1, len(word)))
    if free:
        assert used[tree.gone[0]] == min(used[word] for word in free)
    assert tree.index.check() == []
