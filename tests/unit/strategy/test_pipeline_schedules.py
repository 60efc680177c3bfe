"""Layers to stages, stages to ranks, micro-batches to schedules, and the idle time of each, counted beside torch's."""

from __future__ import annotations

from itertools import combinations, pairwise, product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import schedules as torchs

from trainers.strategy.pipeline_schedules import (
    SCHEDULES,
    balance,
    bubble,
    measured_bubble,
    micro_batch_mistake,
    rank_of,
    stages_of,
)


def test_no_stage_is_dearer_than_need_be() -> None:
    assert [len(one) for one in balance(8, 4, 1.0, 0.0)] == [2, 2, 2, 2]
    assert [len(one) for one in balance(9, 4, 1.0, 1.5)] == [2, 3, 3, 1]
    assert balance(5, 2, 1.0, 0.0) == [range(2), range(2, 5)]
    for layers, stages, head in product(range(1, 9), range(1, 6), (0.0, 0.4, 1.0, 2.5, 30.0)):
        cuts = [[0, *inner, layers] for inner in combinations(range(1, layers), stages - 1)]
        if stages <= layers:
            made = balance(layers, stages, 1.0, head)
            assert [layer for part in made for layer in part] == list(range(layers))
            assert min(len(part) for part in made) > 0
            assert dearest([len(part) for part in made], head) == min(
                dearest([end - start for start, end in pairwise(borders)], head) for borders in cuts
            )


def dearest(sizes: list[int], head: float) -> float:
    return max([*sizes[:-1], sizes[-1] + head])


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(ValueError, match="4 stages for 3 layers; use at most 3"):
        balance(3, 4, 1.0, 0.0)


def order_of(schedule: str, ranks: int, micro_batches: int) -> dict[int, list[tuple[str, int, int]]]:
    """What each rank does in turn (`F`, `B` or `I` and `W`; stage; micro-batch), as torch has it."""
    if schedule == "1f1b":  # torch's own list of this one is not what it runs
        order = {}
        for rank in range(ranks):
            ahead = min(micro_batches, ranks - rank)
            turns = [("F", number) for number in range(ahead)]
            for number in range(micro_batches):
                turns += [("B", number)] + [("F", number + ahead)] * (number + ahead < micro_batches)
            order[rank] = [(kind, rank, number) for kind, number in turns]
        return order
    chunks = SCHEDULES[schedule].chunks
    stages: list[Any] = [
        SimpleNamespace(
            stage_index=stage, num_stages=ranks * chunks, group_size=ranks, group_rank=0, submod=nn.Module()
        )
        for stage in range(chunks)
    ]
    kind = getattr(torchs, SCHEDULES[schedule].name)
    made = kind(stages if chunks > 1 else stages[0], micro_batches, loss_fn=torch.add)
    letters = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}
    return {
        rank: [
            (letters[one.computation_type.name], one.stage_index, one.microbatch_index)
            for one in actions
            if one is not None and one.computation_type.name in letters
        ]
        for rank, actions in made.pipeline_order.items()
    }


def counted_bubble(order: dict[int, list[tuple[str, int, int]]], stages: int) -> float:
    """The idle share when every forward takes 1 and every backward 2, played through."""
    costs = {"F": 1, "B": 2, "I": 1, "W": 1}
    done: dict[tuple[str, int, int], int] = {}
    clocks, left = dict.fromkeys(order, 0), {rank: list(actions) for rank, actions in order.items()}
    busy = sum(costs[kind] for actions in order.values() for kind, _, _ in actions)
    while any(left.values()):
        ready = 0
        for rank, actions in left.items():
            while actions:
                kind, stage, number = actions[0]
                needs = {
                    "F": [("F", stage - 1, number)] * (stage > 0),
                    "W": [("B", stage, number)],
                }.get(kind, [("F", stage, number)] + [("B", stage + 1, number)] * (stage < stages - 1))
                if not all(need in done for need in needs):
                    break
                clocks[rank] = max([clocks[rank], *(done[need] for need in needs)]) + costs[kind]
                done["B" if kind == "I" else kind, stage, number] = clocks[rank]
                actions.pop(0)
                ready += 1
        assert ready, "a deadlock"
    return 1 - busy / (max(clocks.values()) * len(order))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_expected_bubble_is_the_counted_one(schedule: str) -> None:
    for ranks in (2, 3, 4, 8):
        for micro_batches in (ranks, 2 * ranks - 1, 2 * ranks, 5 * ranks):
            counted = counted_bubble(order_of(schedule, ranks, micro_batches), ranks * SCHEDULES[schedule].chunks)
            assert bubble(schedule, ranks, micro_batches) == pytest.approx(counted), (ranks, micro_batches)


def test_splitting_and_interleaving_make_the_bubble_smaller() -> None:
    shares = [bubble(schedule, 4, 8) for schedule in ("1f1b", "interleaved", "zero_bubble")]
    assert shares == sorted(shares, reverse=True)
    assert len(set(shares)) == 3


def test_a_measured_bubble_is_the_idle_share() -> None:
    assert measured_bubble([0.5, 1.0], 1.0) == pytest.approx(0.25)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_torch_places_stages_as_we_do(schedule: str) -> None:
    for ranks in (2, 4):
        stages = ranks * SCHEDULES[schedule].chunks
        for rank, actions in order_of(schedule, ranks, 2 * ranks).items():
            assert {stage for _, stage, _ in actions} == set(stages_of(schedule, ranks, rank))
        assert sorted(rank_of(schedule, ranks, stage) for stage in range(stages)) == sorted(
            [*range(ranks)] * SCHEDULES[schedule].chunks
        )


@pytest.mark.parametrize("schedule", ["interleaved", "zero_bubble"])
def test_micro_batches_that_torch_refuses_are_refused_in_words(schedule: str) -> None:
    for ranks in (2, 3, 4):
        for count in range(ranks, 6 * ranks):
            mistake = micro_batch_mistake(schedule, ranks, count)
            try:
                order_of(schedule, ranks, count)
            except ValueError:
                assert mistake is not None
                assert str(count) in mistake
            else:
                assert mistake is None
    assert "at least 4 micro-batches" in str(micro_batch_mistake("1f1b", 4, 3))
    assert micro_batch_mistake("gpipe", 4, 1) is None
