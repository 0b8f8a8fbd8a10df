import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.api import MissReason
from kvstore.ghosts import GhostList
from kvstore.matching import Matcher, Prompt
from kvstore.prefix_index import NONE, BlockState, PrefixIndex
from kvstore.units import UnitKind

END, COMMON, INTERVAL = UnitKind.REQUEST_END, UnitKind.COMMON_PREFIX, UnitKind.INTERVAL


def name(text: str) -> bytes:
    return text.encode().ljust(32, b".")


class Fixture:
    """An index of chains written as words: each letter with all before it is a block."""

    def __init__(self, policy="unit", interval=0):
        self.index = PrefixIndex()
        self.ghosts = GhostList(1 << 20)
        self.matcher = Matcher(self.index, self.ghosts, policy=policy, interval=interval)

    def store(self, word, unit=True, slot=NONE):
        parent = NONE
        for depth in range(1, len(word) + 1):
            block = name(word[:depth])
            row = self.index.find(block)
            if row == NONE:
                row = self.index.add(block, parent, 0, depth, 0.0)
                self.index.state[row], self.index.place[row] = BlockState.PRESENT, depth
                self.index.slot[row] = slot
            parent = row
        if unit:
            self.index.mark(parent, END, 0.0)
        return parent

    def prompt(self, word, extra=1, align=64):
        return Prompt([name(word[:n]) for n in range(1, len(word) + 1)], 64 * len(word) + extra, 64, align)

    def match(self, word, **how):
        prompt = self.prompt(word, **how)
        walk = self.index.walk(0, prompt.hashes)
        return self.matcher.match(prompt, walk, self.matcher.common_prefix(prompt, walk))

    def see(self, word):
        prompt = self.prompt(word)
        self.ghosts.remember(prompt.hashes[len(self.index.walk(0, prompt.hashes).rows) :])


@pytest.fixture
def it():
    return Fixture()


def common(match):
    return [point.tokens // 64 for point in match.persist_points if point.kinds & COMMON]


def test_the_deepest_unit_is_hit(it):
    it.store("ab")
    it.store("abcd")
    it.store("abcdef", unit=False)
    match = it.match("abcdefgh")
    assert (match.blocks, match.unit, match.unit_blocks, match.stored_blocks) == (4, name("abcd"), 4, 6)


def test_policy_block_hits_any_stored_block():
    it = Fixture(policy="block")
    it.store("abcd", unit=False)
    assert it.match("abcx").blocks == 3


def test_some_token_is_always_computed(it):
    it.store("abcd")
    assert it.match("abcd", extra=0).blocks == 3
    assert it.match("abcd", extra=1).blocks == 4
    assert it.match("abcd", extra=0).reason is MissReason.NONE


def test_hits_are_rounded_down_to_the_alignment(it):
    it.store("abcdefg")
    assert it.match("abcdefgh", align=128).blocks == 6
    assert it.match("abcdefgh", align=256).blocks == 4
    assert it.match("abcdefgh", align=512).blocks == 0


def test_blocks_are_counted_by_tier(it):
    it.store("ab", slot=3)
    it.store("abcd")
    match = it.match("abcde")
    assert (match.host_blocks, match.disk_blocks) == (2, 2)


@pytest.mark.parametrize(
    ("word", "reason"),
    [
        ("", MissReason.SHORTER_THAN_BLOCK),
        ("x", MissReason.NEVER_SEEN),
        ("abcx", MissReason.DIVERGED),
        ("abcdex", MissReason.NO_UNIT),
        ("abcd", MissReason.NONE),
        ("gx", MissReason.NOT_STORED),
        ("lm", MissReason.PENDING),
    ],
)
def test_a_miss_has_its_reason(it, word, reason):
    it.store("abc")
    it.store("abcde", unit=False)
    it.index.mark(it.index.find(name("abcd")), END, 0.0)
    it.see("gh")
    pending = it.index.add(name("l"), NONE, 0, 1, 0.0)
    it.index.state[pending], it.index.slot[pending] = BlockState.FILLING, 1
    if word == "abcx":
        it.index.unmark(it.index.find(name("abcd")))
    assert it.match(word).reason is reason


def test_a_prompt_that_leaves_a_stored_chain_shows_their_common_prefix(it):
    it.store("abcd")
    assert common(it.match("abxy")) == [2]


def test_there_is_no_common_prefix_where_a_unit_ends_already(it):
    it.store("ab")
    it.store("abcd")
    assert common(it.match("abxy")) == []


def test_a_stored_chain_that_ends_is_no_common_prefix(it):
    it.store("ab", unit=False)
    assert common(it.match("abxy")) == []


def test_a_prompt_inside_a_stored_chain_is_no_common_prefix(it):
    it.store("abcd")
    assert common(it.match("ab")) == []


def test_a_prompt_that_leaves_a_remembered_chain_shows_their_common_prefix(it):
    it.see("abcd")
    assert common(it.match("abxy")) == [2]
    assert common(it.match("abcdxy")) == []
    assert common(it.match("xy")) == []


def test_stored_and_remembered_blocks_make_one_chain(it):
    it.store("ab")
    it.see("abcd")
    assert common(it.match("abcx")) == [3]


def test_a_block_that_is_being_filled_is_not_a_chain_that_parts(it):
    row = it.store("ab", unit=False)
    pending = it.index.add(name("abc"), row, 0, 3, 0.0)
    it.index.state[pending], it.index.slot[pending] = BlockState.FILLING, 1
    assert common(it.match("abcd")) == []
    assert common(it.match("abx")) == [2]


def test_persist_points_have_intervals_and_the_end():
    it = Fixture(interval=128)
    assert [(p.tokens, p.kinds) for p in it.match("abcde").persist_points] == [
        (128, INTERVAL),
        (256, INTERVAL),
        (320, END),
    ]


WORDS = st.text("ab", min_size=1, max_size=6)


@given(st.lists(WORDS, max_size=6), st.lists(WORDS, max_size=4), WORDS, st.integers(0, 63))
def test_a_hit_is_the_longest_stored_unit_that_is_a_prefix(stored, seen, word, extra):
    it = Fixture()
    for one in stored:
        it.store(one)
    for one in seen:
        it.see(one)
    match = it.match(word, extra=extra)
    units = [len(one) for one in stored if word.startswith(one)]
    assert match.unit_blocks == max(units, default=0)
    assert match.blocks == min(match.unit_blocks, (64 * len(word) + extra - 1) // 64)
    assert match.host_blocks + match.disk_blocks == match.blocks
    # A common prefix is one: it is a prefix of ours and of another chain that goes on behind it.
    for depth in common(match):
        assert any(one.startswith(word[:depth]) and len(one) > depth for one in stored + seen)
        assert word[:depth] not in stored
