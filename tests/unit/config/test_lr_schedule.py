"""The learning rate as a pure function of the step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import get_scheduler

from trainers.config.lr_schedule import learning_rate, stable_steps
from trainers.config.validation import build, ignored_choices
from trainers.run.compatibility import refusals


def rates(**changes: object) -> list[float]:
    config = build({"model_name_or_path": "x", "dataset_name": "x", "learning_rate": 1.0, **changes})
    return [learning_rate(config, step, 10) for step in range(10)]


def test_constant_after_warm_up() -> None:
    assert rates(lr_scheduler_type="constant", warmup_steps=4) == [0.25, 0.5, 0.75, 1.0] + [1.0] * 6


def test_linear_falls_to_its_floor() -> None:
    assert rates(lr_scheduler_type="linear") == pytest.approx([1 - step / 10 for step in range(10)])
    assert rates(lr_scheduler_type="linear", min_lr_ratio=0.5)[-1] == pytest.approx(0.55)


def test_cosine_is_half_way_in_the_middle() -> None:
    values = rates(lr_scheduler_type="cosine")
    assert values[0] == 1.0
    assert values[5] == pytest.approx(0.5)
    assert values == sorted(values, reverse=True)


def test_warm_up_ratio_is_a_share_of_the_steps() -> None:
    assert rates(lr_scheduler_type="constant", warmup_ratio=0.4) == rates(lr_scheduler_type="constant", warmup_steps=4)
    assert rates(lr_scheduler_type="inverse_sqrt", warmup_steps=4)[3:] == pytest.approx(
        [1.0] + [(4 / step) ** 0.5 for step in range(5, 11)]
    )


STEPS, WARMUP = 100, 10


def of_transformers(name: str, **settings: Any) -> list[float]:
    """Rates of transformers' schedule of the same name, as shares of the peak."""
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    steps = {} if name == "warmup_stable_decay" else {"num_training_steps": STEPS}
    schedule = get_scheduler(name, optimizer, num_warmup_steps=WARMUP, **steps, scheduler_specific_kwargs=settings)
    values = []
    for _ in range(STEPS):
        values.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        schedule.step()
    return values


@pytest.mark.parametrize(
    ("name", "ours", "theirs"),
    [
        ("cosine_with_restarts", {"lr_num_cycles": 1}, {"num_cycles": 1}),
        ("cosine_with_restarts", {"lr_num_cycles": 3}, {"num_cycles": 3}),
        ("polynomial", {"lr_power": 2.5}, {"power": 2.5, "lr_end": 0.0}),
        ("polynomial", {"lr_power": 0.5, "min_lr_ratio": 0.25}, {"power": 0.5, "lr_end": 0.25}),
        ("linear", {}, {}),
        ("cosine", {}, {}),
        *(
            ("warmup_stable_decay", {"lr_decay_ratio": 0.3, "lr_decay_type": decay, "min_lr_ratio": 0.2},
             {"num_decay_steps": 30, "num_stable_steps": 60, "decay_type": decay, "min_lr_ratio": 0.2})
            for decay in ("linear", "cosine", "1-sqrt")
        ),
    ],
)  # fmt: skip
def test_schedules_are_those_of_transformers(name: str, ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    needed = {"model_name_or_path": "x", "dataset_name": "x", "learning_rate": 1.0}
    config = build({**needed, "lr_scheduler_type": name, "warmup_steps": WARMUP, **ours})
    values, expected = [learning_rate(config, step, STEPS) for step in range(STEPS)], of_transformers(name, **theirs)
    assert values[WARMUP:] == pytest.approx(expected[WARMUP:], abs=1e-12)
    if name != "warmup_stable_decay":  # whose warm-up transformers begins at min_lr_ratio
        # A step later than transformers, whose first step has a rate of 0.
        assert values[: WARMUP - 1] == pytest.approx(expected[1:WARMUP], abs=1e-12)
    other = build({**needed, "lr_scheduler_type": "inverse_sqrt", "warmup_steps": WARMUP})
    assert [learning_rate(other, step, STEPS) for step in range(STEPS)] != pytest.approx(expected, abs=1e-2)  # control


def test_a_decay_has_as_many_steps_as_its_share_says() -> None:
    shares = [(ratio, total) for ratio in range(1, 100) for total in (100, 200, 1000)]
    assert [stable_steps(total, ratio / 100) for ratio, total in shares] == [
        total - ratio * total // 100 for ratio, total in shares
    ]


def test_a_decay_of_all_steps_begins_after_the_warm_up() -> None:
    assert rates(lr_scheduler_type="warmup_stable_decay", lr_decay_ratio=1, warmup_steps=5) == rates(
        lr_scheduler_type="linear", warmup_steps=5
    )


@pytest.mark.parametrize(
    ("option", "schedule"),
    [("lr_num_cycles", "cosine_with_restarts"), ("lr_power", "polynomial"), ("lr_decay_ratio", "warmup_stable_decay")],
)
def test_options_of_another_schedule_are_named_as_ignored(option: str, schedule: str) -> None:
    needed = {"model_name_or_path": "x", "dataset_name": "x", option: {"lr_decay_ratio": 0.5}.get(option, 3)}
    assert option in [mistake.option for mistake in ignored_choices(build(needed))]
    assert option not in [
        mistake.option for mistake in ignored_choices(build({**needed, "lr_scheduler_type": schedule}))
    ]


@pytest.mark.parametrize(
    ("step", "then", "now", "is_refused"),
    [(80, 100, 300, False), (90, 100, 300, False), (91, 100, 300, True), (80, 300, 85, True), (80, None, 300, True)],
)
def test_a_run_may_grow_until_its_decay_begins(step: int, then: int | None, now: int, is_refused: bool) -> None:
    shape = {"lr_scheduler_type": "warmup_stable_decay", "lr_decay_ratio": 0.1, "warmup_ratio": 0.0, "warmup_steps": 5}
    manifest = {"config": {**shape, "max_steps": then}, "versions": {}, "step": step}
    assert bool(refusals(manifest, {**shape, "max_steps": now}, {})) == is_refused
    by_share = {"warmup_ratio": 0.1, "warmup_steps": 0}
    manifest["config"] = {**shape, **by_share, "max_steps": then}
    assert refusals(manifest, {**shape, **by_share, "max_steps": now}, {})  # control: the warm-up depends on the length
