from hypothesis import given
from hypothesis import strategies as st

from kvstore.ghosts import GHOST_BYTES, GhostList, Gone
from kvstore.observer import Departure


def name(number: int) -> bytes:
    return number.to_bytes(32, "big")


def names(*numbers: int) -> list[bytes]:
    return [name(number) for number in numbers]


def test_a_chain_is_remembered_with_whether_it_went_on():
    ghosts = GhostList(100 * GHOST_BYTES)
    ghosts.remember(names(1, 2, 3))
    assert [block in ghosts for block in names(1, 2, 3, 4)] == [True, True, True, False]
    assert [ghosts.continued(block) for block in names(1, 2, 3, 4)] == [True, True, False, False]


def test_a_shorter_chain_does_not_unsay_that_a_longer_one_went_on():
    ghosts = GhostList(100 * GHOST_BYTES)
    ghosts.remember(names(1, 2, 3))
    ghosts.remember(names(1, 2))
    assert ghosts.continued(name(2))


def test_what_is_stored_is_forgotten():
    ghosts = GhostList(100 * GHOST_BYTES)
    ghosts.remember(names(1, 2))
    ghosts.forget(name(1))
    ghosts.forget(name(9))
    assert name(1) not in ghosts
    assert name(2) in ghosts


def test_a_chain_longer_than_the_list_keeps_its_beginning():
    ghosts = GhostList(3 * GHOST_BYTES)
    ghosts.remember(names(*range(10)))
    assert [n for n in range(10) if name(n) in ghosts] == [0, 1, 2]


def test_no_bytes_remember_nothing():
    ghosts = GhostList(GHOST_BYTES - 1)
    ghosts.remember(names(1))
    assert len(ghosts) == 0


@given(
    st.lists(st.lists(st.integers(0, 30), min_size=1, max_size=8, unique=True), max_size=20),
    st.integers(1, 12),
)
def test_the_list_is_bounded_and_has_the_chain_seen_last(chains, capacity):
    ghosts = GhostList(capacity * GHOST_BYTES)
    for numbers in chains:
        ghosts.remember(names(*numbers))
        assert len(ghosts) <= capacity
        kept = numbers[:capacity]
        assert all(block in ghosts for block in names(*kept))
        assert all(ghosts.continued(block) for block in names(*kept[:-1]))


def test_a_block_that_left_is_remembered_with_why_until_it_is_stored_again():
    ghosts = GhostList(100 * GHOST_BYTES)
    ghosts.leave(name(1), Gone(Departure.CAPACITY, 5.0))
    assert ghosts.gone(name(1)) == Gone(Departure.CAPACITY, 5.0)
    assert ghosts.gone(name(2)) is None
    assert name(1) not in ghosts  # it says nothing of where chains part
    ghosts.forget(name(1))
    assert ghosts.gone(name(1)) is None


def test_blocks_that_left_take_at_most_half_of_the_room():
    ghosts = GhostList(10 * GHOST_BYTES)
    ghosts.remember(names(*range(8)))
    for number in range(100, 120):
        ghosts.leave(name(number), Gone(Departure.CAPACITY, 0.0))
    assert len(ghosts) == 10
    assert [ghosts.gone(block) is not None for block in names(114, 115, 119)] == [False, True, True]
    assert [block in ghosts for block in names(0, 4, 5)] == [True, True, False]
