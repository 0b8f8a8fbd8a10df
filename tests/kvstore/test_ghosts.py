from hypothesis import given
from hypothesis import strategies as st

from kvstore.ghosts import GHOST_BYTES, GhostList


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
