"""Intervals of medians: their ranks, their coverage by simulation, and that nothing is claimed inside the spread."""

from __future__ import annotations

import random
import statistics

import pytest

from benchmarks.intervals import LEAST_TURNS, Interval


@pytest.mark.parametrize(
    ("turns", "rank", "confidence"), [(5, 1, 0.9375), (6, 1, 0.96875), (9, 2, 0.9609375), (15, 4, 0.96484375)]
)
def test_its_ends_are_those_of_the_tables_of_the_sign_test(turns: int, rank: int, confidence: float) -> None:
    values = [float(value) for value in range(1, turns + 1)]
    random.Random(3).shuffle(values)
    interval = Interval.of(values)
    assert (interval.low, interval.high) == (rank, turns + 1 - rank)
    assert interval.median == statistics.median(values)
    assert interval.confidence == confidence


@pytest.mark.parametrize("turns", [6, 11, 20])
def test_it_contains_the_true_median_as_often_as_it_says(turns: int) -> None:
    """Of skewed values too; the control is the interval between the two middle values, which is too narrow."""
    rng = random.Random(turns)
    true, trials, hits, narrow = 2.0**0.5, 2000, 0, 0
    for _ in range(trials):
        values = sorted(1 / rng.random() ** 0.5 for _ in range(turns))
        interval = Interval.of(values)
        hits += interval.low <= true <= interval.high
        narrow += values[turns // 2 - 1] <= true <= values[turns // 2]
    assert hits / trials == pytest.approx(Interval.of(list(range(turns))).confidence, abs=0.015)
    assert hits / trials > 0.94
    assert narrow / trials < 0.5


def test_nothing_is_claimed_inside_the_spread() -> None:
    assert Interval.of([1.1, 1.2, 1.05, 1.3, 1.2, 1.4]).verdict() == "faster"
    assert Interval.of([0.9, 0.8, 0.95, 0.7, 0.8, 0.6]).verdict() == "slower"
    assert Interval.of([1.1, 1.2, 0.99, 1.3, 1.2, 1.4]).verdict() == "no difference seen"
    assert Interval.of([2.0] * (LEAST_TURNS - 1)).verdict() == "too few turns to say (5 of 6)"
    assert str(Interval.of([1.1, 1.2, 0.99, 1.3, 1.2, 1.4])) == "1.20 (0.99 to 1.40)"
    with pytest.raises(ValueError, match="no measurements"):
        Interval.of([])
