"""A slow rank is told from quick ones, and from noise."""

from __future__ import annotations

import pytest
import torch

from trainers.monitor.stragglers import LEAST_ROWS, LEAST_SECONDS, Sample, Stragglers, slow_ranks


@pytest.mark.parametrize(
    ("local", "product", "slow"),
    [
        ([1.0, 1.0, 3.0], [0.01, 0.01, 0.01], {2: 3.0}),
        ([1.0, 1.2], [0.01, 0.012], {}),
        ([0.01, 0.03], [0.01, 0.01], {}),  # three times as long, and next to nothing of the step
        ([1.0, 1.0], [0.01, 0.04], {1: 4.0}),
        ([1.0, 1.0], [0.00005, 0.0002], {}),  # four times next to nothing
        ([1.0], [0.01], {}),
    ],
)
def test_a_rank_is_slow_beside_the_median_of_the_others(
    local: list[float], product: list[float], slow: dict[int, float]
) -> None:
    samples = [Sample(10.0, one, two, 9) for one, two in zip(local, product, strict=True)]
    assert slow_ranks(samples) == pytest.approx(slow)


def test_there_is_no_verdict_before_there_is_enough_and_then_it_begins_anew() -> None:
    stragglers = Stragglers(torch.device("cpu"), local_forward=True)
    for number in range(LEAST_ROWS):
        sample = stragglers.sample(LEAST_SECONDS / LEAST_ROWS)
        assert sample.rows == number + 1
        other = sample._replace(product=sample.product * 4 + 1)
        slow = stragglers.verdict([sample, other])
        assert list(slow) == [1] * (number == LEAST_ROWS - 1)
    assert stragglers.measured == Sample()


def test_one_interrupted_product_names_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another program took the processor once; a slow rank is slow each time."""
    verdicts = []
    for slow in (1, LEAST_ROWS):
        ranks = [Stragglers(torch.device("cpu"), local_forward=True) for _ in range(2)]
        seconds = [[0.01] * LEAST_ROWS, [0.1] * slow + [0.01] * (LEAST_ROWS - slow)]
        for stragglers, times in zip(ranks, seconds, strict=True):
            monkeypatch.setattr(stragglers, "_product", iter(times).__next__)
        for _ in range(LEAST_ROWS):
            samples = [stragglers.sample(LEAST_SECONDS / LEAST_ROWS) for stragglers in ranks]
        verdicts.append(ranks[0].verdict(samples))
    assert verdicts == [{}, {1: pytest.approx(10.0)}]
