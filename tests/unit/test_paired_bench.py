"""The paired comparison of benches: its interval is the order statistics that the sign test gives, and it sees what is there."""

import random

import pytest

from bench.paired import Paired, interval_of_median


@pytest.mark.parametrize(
    ("count", "rank", "confidence"), [(6, 1, 0.9688), (8, 1, 0.9922), (20, 6, 0.9586), (24, 7, 0.9773)]
)
def test_interval_lies_between_the_order_statistics_of_the_sign_test(count: int, rank: int, confidence: float) -> None:
    found = interval_of_median(random.Random(1).sample(range(count), count))
    assert (found.low, found.high) == (rank - 1, count - rank)
    assert found.confidence == pytest.approx(confidence, abs=1e-4)


@pytest.mark.parametrize(("count", "confidence"), [(1, 0.0), (2, 0.5), (5, 0.9375)])
def test_too_few_values_give_all_of_their_range_and_say_what_it_is_worth(count: int, confidence: float) -> None:
    found = interval_of_median(range(count))
    assert (found.low, found.high, found.confidence) == (0, count - 1, pytest.approx(confidence))


def test_a_drift_that_both_ways_share_does_not_hide_a_small_difference() -> None:
    drift = [1000.0 + 50 * n for n in range(20)]
    found = Paired.of([value + 3 for value in drift], drift)
    assert found.difference == pytest.approx(3)
    assert found.differences.low == pytest.approx(3)
    assert 1.0 < found.ratios.low <= found.ratio <= found.ratios.high


def test_no_difference_is_inside_the_interval() -> None:
    noise = random.Random(2)
    first, second = ([noise.gauss(100, 5) for _ in range(40)] for _ in range(2))
    found = Paired.of(first, second)
    assert found.differences.low < 0 < found.differences.high


def test_runs_without_a_partner_are_refused() -> None:
    with pytest.raises(ValueError, match="zip"):
        Paired.of([1.0, 2.0], [1.0])
