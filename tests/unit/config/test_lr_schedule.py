"""The learning rate as a pure function of the step."""

from __future__ import annotations

import pytest

from trainers.config.lr_schedule import learning_rate
from trainers.config.validation import build


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
