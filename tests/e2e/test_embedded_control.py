"""The embedded task is learned from what the base knows: a randomly initialised base must fail with the same recipe."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launching import launch_well
from trainers.tools.score import score_model


@pytest.mark.long
def test_a_random_base_fails_with_the_same_recipe(tmp_path: Path) -> None:
    options = {"preset": "tiny-lora", "random_init": True, "merge_adapter": True, "eval_dataset_name": "none"}
    finished = launch_well(tmp_path / "run", 2, options)
    assert finished.state["step"] == finished.state["total_steps"] > 100
    assert score_model(finished.run.model, "test")["exact_match"] < 0.5
