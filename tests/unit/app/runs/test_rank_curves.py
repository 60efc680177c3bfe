"""The curves of each rank: few points, whatever a run's length, number of ranks, restarts and damage."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from app.runs.metrics import Curves
from app.runs.rank_curves import FEW_RANKS, MOST_POINTS, MOST_RANKS, RankTable
from tests.made_runs import made_run


def filled(rows: int, world: int) -> RankTable:
    table = RankTable()
    for step in range(1, rows + 1):
        table.add(step, 0, {"memory_gib_by_rank": [rank + step / rows for rank in range(world)]})
    return table


@pytest.mark.parametrize(("rows", "world"), [(1, 1), (5, 2), (3000, 8), (300, 64), (40, 1000)])
def test_points_and_ranks_stay_few_and_means_are_exact(rows: int, world: int) -> None:
    table = filled(rows, world)
    seen = table.view("", True, Counter())
    assert seen["world"] == world
    assert [entry["rank"] for entry in seen["ranks"]] == list(range(min(world, MOST_RANKS)))
    assert len(seen["steps"]) == len(seen["ranks"][0]["values"]) <= MOST_POINTS
    first = [step / rows for step in range(1, rows + 1) if step // table.width == seen["steps"][0] // table.width]
    assert seen["ranks"][0]["values"][0] == pytest.approx(sum(first) / len(first), rel=1e-4)
    assert table.peak("memory_gib")[0] == 1.0


def test_the_ranks_that_stand_out_are_shown_first() -> None:
    table = RankTable()
    table.add(1, 0, {"local_work_by_rank": [0.5 + 0.3 * (rank == 40) for rank in range(64)]})
    few = table.view("", False, Counter({17: 3}))
    assert len(few["ranks"]) == FEW_RANKS
    assert {17, 40} <= {entry["rank"] for entry in few["ranks"]}
    assert few["highest"] == 40
    assert [entry["slow"] for entry in few["ranks"] if entry["rank"] == 17] == [3]


def test_a_second_attempt_replaces_what_it_repeats() -> None:
    table = RankTable()
    for attempt, steps, value in ((0, range(1, 9), 1.0), (1, range(5, 9), 2.0)):
        for step in steps:
            table.add(step, attempt, {"memory_gib_by_rank": [value, value]})
    assert table.view("", True, Counter())["ranks"][1]["values"] == [1.0] * 4 + [2.0] * 4


@pytest.mark.parametrize("values", [[], {}, "x", [[1, 2]], [{}], ["y"], [10**400], [None], [float("inf"), True], 7])
def test_what_is_no_list_of_numbers_is_no_curve(values: object) -> None:
    table = RankTable()
    table.add(1, 0, {"memory_gib_by_rank": values, "gpu_percent_by_rank": [50, None]})
    json.dumps(table.view("memory_gib", True, Counter()), allow_nan=False)
    assert table.view("gpu_percent", True, Counter())["ranks"][0]["values"] == [50.0]


def test_an_unchanged_run_is_not_sent_again(tmp_path: Path) -> None:
    run, curves = made_run(tmp_path, "a", steps=30), Curves()
    first = curves.by_rank(run, "memory_gib")
    assert [entry["mean"] for entry in first["ranks"]] == pytest.approx([1.4, 1.35])
    assert curves.by_rank(run, "memory_gib", since=first["token"]) == {"token": first["token"], "same": True}
    assert "same" not in curves.by_rank(run, "memory_gib", every=True, since=first["token"])
    with open(run.metrics, "a", encoding="utf-8") as file:
        file.write('{"step": 31, "memory_gib_by_rank": [2.5, 1.0]}\n')
    assert curves.by_rank(run, "memory_gib", since=first["token"])["ranks"][0]["values"][-1] == 2.5
    assert curves.peaks(run) == {"memory_gib": [2.5, 1.35]}
