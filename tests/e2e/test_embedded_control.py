"""What the embedded presets teach: the answers from what the base knows, and which of two answers is the right one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from app.commands.demo import run_demo
from benchmarks.embedded_seeds import SWAPPED
from tests.launching import launch_well
from trainers.embedded import PREFERENCES_DIR
from trainers.tools.score import load_model, load_rows, preference_accuracy, score_model, score_reward_model


@pytest.mark.long
def test_a_random_base_fails_with_the_same_recipe(tmp_path: Path) -> None:
    options = {"preset": "tiny-lora", "random_init": True, "merge_adapter": True, "eval_dataset_name": "none"}
    finished = launch_well(tmp_path / "run", 2, options)
    assert finished.state["step"] == finished.state["total_steps"] > 100
    assert score_model(finished.run.model, "test")["exact_match"] < 0.5


@pytest.mark.long
def test_the_preferences_are_learned_and_swapped_ones_unlearned(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_demo("tiny-dpo", None, "2", home / "runs", True) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["metric"] == "preference_accuracy"
    before, after = (document[when]["preference_accuracy"] for when in ("before", "after"))
    assert after > 0.9 > 0.81 > before
    assert document["after"]["exact_match"] is not None
    option, columns = SWAPPED
    swapped = launch_well(home / "swapped", 2, {"preset": "tiny-dpo", option.removeprefix("--"): columns})
    rows = load_rows("test", folder=PREFERENCES_DIR)
    assert preference_accuracy(*load_model(swapped.run.model), rows) < before - 0.2


@pytest.mark.long
def test_a_student_learns_what_its_teacher_knows_and_nothing_of_the_base(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_demo("tiny-distill", None, "2", home / "runs", True) == 0
    document = json.loads(capsys.readouterr().out)
    before, after = (document[when]["exact_match"] for when in ("before", "after"))
    assert document["metric"] == "exact_match"
    assert after > 0.95 > 0.1 > before
    untaught = launch_well(home / "untaught", 2, {"preset": "tiny-distill", "teacher": "embedded"})
    assert score_model(untaught.run.model, "test")["exact_match"] == before


@pytest.mark.long
def test_a_reward_model_tells_the_right_answer_and_of_swapped_ones_the_wrong(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_demo("tiny-reward", None, "2", home / "runs", True) == 0
    document = json.loads(capsys.readouterr().out)
    before, after = (document[when]["reward_accuracy"] for when in ("before", "after"))
    assert document["metric"] == "reward_accuracy"
    assert after > 0.75 > 0.6 > before
    option, columns = SWAPPED
    swapped = launch_well(home / "swapped", 2, {"preset": "tiny-reward", option.removeprefix("--"): columns})
    assert score_reward_model(swapped.run.model)["reward_accuracy"] < 0.3
