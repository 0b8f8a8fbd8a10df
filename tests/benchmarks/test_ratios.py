import pytest

from benchmarks.ratios import Ratio, lower_bound


def test_ratios_are_paired_by_round_before_their_median_is_taken():
    ratio = Ratio.of([1.0, 4.0, 9.0], [2.0, 4.0, 3.0])
    assert (ratio.value, ratio.limit, ratio.ratio) == (4.0, 3.0, 1.0)


def test_equal_rounds_leave_no_doubt():
    assert lower_bound([0.8] * 10) == pytest.approx(0.8)


def test_the_bound_lies_below_the_median_and_inside_the_sample_and_is_always_the_same():
    sample = [0.7, 0.8, 0.9, 1.0, 1.1, 1.2]
    low = lower_bound(sample)
    assert 0.7 <= low < 0.95
    assert low == lower_bound(sample)
