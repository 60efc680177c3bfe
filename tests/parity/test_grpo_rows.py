"""A run from prompts and columns is the one from rows with an answer, and each reward gets the columns of its row.

Both files hold the same conversations: one with the answers as last messages, the other with them in a column. A second
reward compares a column with the prompt that it gets, so it is 1 exactly where both are of one row.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.launching import Finished, launch, launch_well
from tests.parity.checks import same_bits, weights
from tests.parity.runs import mostly_long, options, run
from tests.shared import once
from trainers.embedded import DATA_DIR
from trainers.strategy.strategy import load_strategy

STEPS, ROWS, HELD_OUT = 6, 30, 6
REWARDS = '''
from difflib import SequenceMatcher

def likeness(completions, answer):
    return [SequenceMatcher(None, text, wanted).ratio() for text, wanted in zip(completions, answer)]

def of_row(prompts, about, level=0, **others):
    """Whether the column `about` is of the row that each prompt is of."""
    return [about["question"] in prompt and about["number"] is not None for prompt, about in zip(prompts, about)]
'''


def write_data(folder: Path) -> None:
    """Rows with answers, the same as prompts, and prompts with the columns of other rows."""
    (folder / "rewards.py").write_text(REWARDS, encoding="utf-8")
    for split, count in (("train", ROWS), ("eval", HELD_OUT)):
        lines = (DATA_DIR / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()[:count]
        answered, prompts = [], []
        for number, line in enumerate(lines):
            turns = json.loads(line)["messages"]
            about = {"question": turns[0]["content"], "number": number, "nested": [None, {"e": 1e-300}]}
            answered.append({"messages": turns, "about": about})
            prompts.append({"prompt": turns[:-1], "solution": turns[-1]["content"], "about": about})
        columns = [row["about"] for row in prompts]
        random.Random(1).shuffle(columns)
        shuffled = [{**row, "about": about} for row, about in zip(prompts, columns, strict=True)]
        for name, rows in (("answered", answered), ("prompts", prompts), ("shuffled", shuffled)):
            (folder / f"{name}-{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def rows_options(rows: str, **changes: Any) -> dict[str, Any]:
    """What these runs change in those of the other parity tests."""
    folder = once("grpo-rows", write_data)
    mapped = {} if rows == "answered" else {"columns": "answer=solution"}
    return {
        "objective": "grpo", "reward_funcs": f"{folder}/rewards.py:likeness,{folder}/rewards.py:of_row",
        "num_generations": 4, "max_completion_length": 32, "global_batch_size": 4, "per_device_train_batch_size": 1,
        "learning_rate": 2e-4, "max_steps": STEPS, "save_steps": 3, "eval_steps": 3, "max_train_samples": ROWS,
        "dataset_name": f"{folder}/{rows}-train.jsonl", "eval_dataset_name": f"{folder}/{rows}-eval.jsonl",
        **mapped, **changes,
    }  # fmt: skip


def sampled(name: str, rows: str, **changes: Any) -> Finished:
    """A run under a strategy."""
    return run(load_strategy(name).num_processes, "full", True, name, **rows_options(rows, **changes))


def answers(finished: Finished) -> list[dict[str, Any]]:
    """The recorded answers of each step."""
    texts = [(finished.run.rollouts / f"step-{step + 1}.json").read_text() for step in range(STEPS)]
    return [json.loads(text) for text in texts]


def of_row(step: dict[str, Any]) -> list[float]:
    """The second reward of each answer of a step."""
    return next(values for name, values in step["by_function"].items() if name.endswith(":of_row"))


@pytest.mark.long
def test_prompts_give_the_run_of_rows_with_answers_bit_for_bit() -> None:
    prompts, answered = sampled("single", "prompts"), sampled("single", "answered")
    assert same_bits(prompts, answered)
    assert answers(prompts) == [
        {**step, "columns": {number: {"answer": expected[number], **columns}
                             for number, columns in step["columns"].items()}}
        for step in answers(answered)
        for expected in [dict(zip(map(str, step["prompts"]), (text[2] for text in step["texts"]), strict=True))]
    ]  # fmt: skip
    for key in ("eval_reward", "eval_answer_tokens", "eval_truncated", "reward", "reward_std"):
        assert prompts.series(key) == answered.series(key)
    assert len({reward for step in answers(prompts) for reward in step["rewards"]}) > STEPS


@pytest.mark.parametrize("name", mostly_long(["single", "ddp", "fsdp2", "zero3"], ["ddp"]))
def test_each_answer_is_rewarded_with_the_columns_of_its_row(name: str) -> None:
    steps = answers(sampled(name, "prompts"))
    assert {value for step in steps for value in of_row(step)} == {1.0}
    lines = Path(rows_options("prompts")["dataset_name"]).read_text().splitlines()
    about = [json.loads(line)["about"] for line in lines]
    for step in steps:
        assert {int(number): columns["about"] for number, columns in step["columns"].items()} == {
            number: about[number] for number in step["prompts"]
        }


def test_the_columns_of_other_rows_give_other_rewards() -> None:
    """Control: the first answers are the same, but not what they get."""
    own, others = sampled("ddp", "prompts"), sampled("ddp", "shuffled")
    first, other = answers(own)[0], answers(others)[0]
    assert first["answers"] == other["answers"]
    assert first["texts"] == other["texts"]
    assert 0.0 in of_row(other)
    assert first["rewards"] != other["rewards"]
    assert own.series("eval_reward")[0] > 1 > others.series("eval_reward")[0]


@pytest.mark.parametrize("ahead", mostly_long([1, 2], []))
def test_a_resumed_run_goes_on_with_the_same_columns(ahead: int, tmp_path: Path) -> None:
    """With 2 steps sampled at once, a checkpoint of step 3 holds those of the fourth, with its columns."""
    changes = rows_options("prompts", steps_per_generation=ahead)
    undisturbed = sampled("single", "prompts", steps_per_generation=ahead)
    again = {**options("full", True, **changes), "resume_from_checkpoint": undisturbed.checkpoints[0]}
    resumed = launch_well(tmp_path / "again", 1, again, strategy="single")
    for key in ("loss", "grad_norm", "reward"):
        assert resumed.series(key) == undisturbed.series(key)[3:]
    own, others = weights(undisturbed), weights(resumed)
    assert all(torch.equal(own[name], others[name]) for name in own)
    for step in (4, 5, 6):
        name = f"step-{step}.json"
        assert (undisturbed.run.rollouts / name).read_text() == (resumed.run.rollouts / name).read_text()


def test_recorded_answers_to_prompts_train_the_same() -> None:
    recorded = sampled("single", "prompts", eval_dataset_name="none")
    replay = sampled("ddp", "prompts", eval_dataset_name="none", recorded_answers=str(recorded.run.rollouts))
    assert replay.series("loss") == pytest.approx(recorded.series("loss"), abs=1e-5)
    assert replay.series("grad_norm") == pytest.approx(recorded.series("grad_norm"), rel=1e-4)


def test_rows_that_lack_what_a_reward_reads_end_the_run_before_it_starts(tmp_path: Path) -> None:
    lacking = rows_options("prompts", columns="answer=solution,about=abot")
    ended = launch(tmp_path / "ended", 1, options("full", True, **lacking), strategy="single")
    assert ended.status != 0
    assert "prompts-train.jsonl:1: missing key: 'abot' is missing, and a reward reads it; did you mean 'about'?" in (
        ended.output
    )
    assert not ended.run.rollouts.exists()
