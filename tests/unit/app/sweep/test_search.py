"""Random search and TPE on an objective whose best is known."""

from __future__ import annotations

import math
import statistics

import pytest

from app.sweep.search import Result, propose
from app.sweep.space import Axis

SPACE = [
    Axis(option="learning_rate", low="1e-6", high="1e-1", log=True),
    Axis(option="lora_r", low="4", high="64", log=True, integer=True),
    Axis(option="method", values=("lora", "full")),
]


def objective(values: dict[str, str]) -> float:
    """Lowest, 0, at a rate of 1e-3 and rank 16 with LoRA."""
    rate = math.log10(float(values["learning_rate"])) + 3
    return rate**2 + abs(math.log2(int(values["lora_r"])) - 4) / 4 + (values["method"] == "full")


def searched(method: str, seed: int, better: str = "low", trials: int = 30) -> list[Result]:
    results: list[Result] = []
    for number in range(trials):
        values = propose(SPACE, method, seed, number, results, better, trials)
        assert values is not None
        results.append(Result(values, objective(values)))
    return results


def later(results: list[Result]) -> float:
    """Mean of the last ten trials: where the search has settled."""
    return statistics.fmean(result.score or 0.0 for result in results[-10:])


def test_tpe_settles_near_the_best_and_random_does_not() -> None:
    """Control: told that high is better, it settles far from it."""
    tpe, random, wrong = (
        statistics.fmean(later(searched(method, seed, better)) for seed in range(3))
        for method, better in (("tpe", "low"), ("random", "low"), ("tpe", "high"))
    )
    assert tpe < random / 2
    assert wrong > random


@pytest.mark.parametrize("method", ["random", "tpe"])
def test_proposals_are_in_the_space_and_a_function_of_the_results(method: str) -> None:
    results = searched(method, 1, trials=12)
    for number, result in enumerate(results):
        assert 1e-6 <= float(result.values["learning_rate"]) <= 1e-1
        assert 4 <= int(result.values["lora_r"]) <= 64
        assert propose(SPACE, method, 1, number, results[:number], "low", 12) == result.values
    assert searched(method, 2, trials=12) != results


def test_what_failed_and_what_still_runs_are_known_to_it() -> None:
    done = searched("tpe", 1, trials=12)
    changed = [Result(done[0].values, failed=True), Result(done[1].values), *done[2:]]
    values = propose(SPACE, "tpe", 1, 12, changed, "low", 13)
    assert values is not None
    assert values not in [result.values for result in done]


@pytest.mark.parametrize("method", ["random", "tpe"])
def test_a_small_space_is_searched_once_and_then_known(method: str) -> None:
    space, results = [Axis(option="lora_r", values=("4", "8", "16"))], list[Result]()
    while (values := propose(space, method, 3, len(results), results, "low", 10)) is not None:
        results.append(Result(values, 1.0))
    assert sorted(int(result.values["lora_r"]) for result in results) == [4, 8, 16]
