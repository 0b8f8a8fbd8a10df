import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import InvalidArgument
from kvstore.units import PersistPoint, UnitKind, check_interval, plan_input, plan_output

END, COMMON, INTERVAL = UnitKind.REQUEST_END, UnitKind.COMMON_PREFIX, UnitKind.INTERVAL


def test_a_long_input_leaves_interval_marks_and_its_end():
    assert plan_input(5000, interval=2048) == (
        PersistPoint(2048, INTERVAL),
        PersistPoint(4096, INTERVAL),
        PersistPoint(4992, END),
    )


def test_points_that_coincide_have_all_their_kinds():
    assert plan_input(2048, interval=2048, common=[2048]) == (PersistPoint(2048, INTERVAL | COMMON | END),)


def test_a_common_prefix_outside_the_input_is_left_out():
    assert plan_input(128, interval=0, common=[0, 64, 192]) == (
        PersistPoint(64, COMMON),
        PersistPoint(128, END),
    )


def test_content_shorter_than_a_block_leaves_nothing():
    assert plan_input(63, interval=64) == ()


@pytest.mark.parametrize(
    ("prompt", "total", "at"),
    [(100, 101, []), (100, 129, [128]), (100, 128, []), (128, 193, [192]), (0, 1, []), (64, 64, [])],
)
def test_an_answer_ends_at_the_last_token_that_has_a_latent(prompt, total, at):
    assert [point.tokens for point in plan_output(prompt, total, interval=0)] == at


@given(st.integers(0, 20_000), st.integers(1, 5000), st.integers(0, 40).map(lambda n: n * 64))
def test_points_are_rising_whole_blocks_that_exist(prompt, answer, interval):
    points = [
        *plan_input(prompt, interval=interval),
        *plan_output(prompt, prompt + answer, interval=interval),
    ]
    places = [point.tokens for point in points]
    assert places == sorted(set(places))
    assert all(place % 64 == 0 and 0 < place <= max(prompt, prompt + answer - 1) for place in places)
    if interval:
        last = places[-1] if places else 0
        assert set(range(interval, last + 1, interval)) <= set(places)


@pytest.mark.parametrize("interval", [0, 64, 2048])
def test_good_intervals_pass(interval):
    assert check_interval(interval) == interval


@pytest.mark.parametrize("interval", [-64, 1, 65, 2047])
def test_bad_intervals_are_refused_with_the_value(interval):
    with pytest.raises(InvalidArgument, match=f"interval={interval} "):
        check_interval(interval)
