"""Prompts of a data set, recorded answers, and advantages."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from trainers.config.mistakes import ConfigError
from trainers.config.validation import build
from trainers.data.prepare import prepare
from trainers.data.rollouts import RecordedStep, Rollouts, check_prompts, prompt_of, prompts_to_answer
from trainers.data.tokenizer import load_tokenizer
from trainers.monitor.loss_guard import origin
from trainers.rollouts import advantages
from trainers.tools.preflight import plan_training

STEP = RecordedStep([3], [[1, 2]], [[-0.25, -1.5]], [True], [1.0], {"exact_match": [1.0]}, [["a", "b"]], "sha", 1.0)
CHAT = [
    {"role": "user", "content": "One?"},
    {"role": "assistant", "content": "First."},
    {"role": "user", "content": "Two?"},
    {"role": "assistant", "content": "Second."},
]


def config_of(folder: Path, *rows: object, **changes: object):  # type: ignore[no-untyped-def]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return build({"model_name_or_path": "embedded", "dataset_name": str(folder / "rows.jsonl"), "objective": "grpo",
                  "max_length": 96, "max_completion_length": 32, "cache_dir": str(folder), **changes})  # fmt: skip


def test_a_prompt_ends_before_the_last_answer(tmp_path: Path) -> None:
    config = config_of(tmp_path, {"messages": CHAT})
    tokenizer, data = load_tokenizer(config), prepare(config, "train")
    prompt = prompt_of(data, 0)
    text = tokenizer.decode(prompt.tokens)
    assert "First." in text
    assert "Two?" in text
    assert "Second." not in text
    assert tokenizer.decode(prompt.answer, skip_special_tokens=True).strip() == "Second."


@pytest.mark.parametrize(
    ("prompt_words", "answer_words", "changes", "sentence"),
    [
        (30, 1, {}, "rows.jsonl:1: has a prompt of"),
        (5, 90, {}, "1 rows are longer than max_length=96, and rewards would compare with half an answer"),
        (5, 1, {}, ""),
        (30, 1, {"max_completion_length": 8}, ""),
    ],
)
def test_prompts_without_room_are_refused(
    prompt_words: int, answer_words: int, changes: dict[str, int], sentence: str, tmp_path: Path
) -> None:
    row = [{"role": "user", "content": "x " * prompt_words}, {"role": "assistant", "content": "y " * answer_words}]
    config = config_of(tmp_path, {"messages": row}, **changes)
    data = prepare(config, "train")
    if not sentence:
        check_prompts(config, data)
        return
    with pytest.raises(ConfigError, match=sentence):
        check_prompts(config, data)


def test_a_row_that_is_all_answer_has_no_prompt(tmp_path: Path) -> None:
    config = config_of(tmp_path, {"messages": CHAT})
    data = prepare(config, "train")
    check_prompts(config, data)
    data._mask = np.ones_like(data._mask)
    with pytest.raises(ConfigError, match=r"rows.jsonl:1: has no prompt to answer"):
        check_prompts(config, data)


@pytest.mark.parametrize(
    ("kind", "wanted"),
    [
        ("dr_grpo", [1.0, -1.0, 0.0, 0.0]),
        ("rloo", [2.0, -2.0, 0.0, 0.0]),
        ("grpo", [2**-0.5, -(2**-0.5), 0.0, 0.0]),
    ],
)
def test_advantages_are_those_within_a_group(kind: str, wanted: list[float]) -> None:
    assert advantages(np.array([3.0, 1.0, 5.0, 5.0]), 2, kind) == pytest.approx(wanted, abs=1e-4)


def test_answers_become_documents() -> None:
    prompts, answers = [np.array([1, 2, 3]), np.array([4])], [np.array([5, 6]), np.array([7])]
    log_probs = [np.array([-1.0, -2.0]), np.array([-3.0])]
    old = [np.array([-1.5, -2.5]), np.array([-3.5])]
    documents = Rollouts(prompts, answers, log_probs, old, np.array([0.5, -0.5]), np.array([True, False]), True)
    tokens, mask = documents.gather(np.array([1, 0]))
    assert tokens.tolist() == [4, 7, 1, 2, 3, 5, 6]
    assert mask.tolist() == [False, False, False, False, False, True, True]  # the second is not trained
    assert documents.sampled.of(np.array([0, 1])).tolist() == [0, 0, 0, -1, -2, 0, -3]
    assert documents.old is not None
    assert documents.old.of(np.array([1, 0])).tolist() == [0, -3.5, 0, 0, 0, -1.5, -2.5]
    assert documents.trained.tolist() == [2, 0]


def conversation(question: str, answer: str = "Yes.") -> dict[str, object]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def test_the_prompts_to_answer_are_few_and_the_same_ones(tmp_path: Path) -> None:
    rows = [conversation(f"Is {number} even?") for number in range(40)]
    short = {"objective": "sft", "eval_generate_steps": 1, "eval_answer_tokens": 8, "eval_share": 0.5}
    config = config_of(tmp_path, *rows, **short)
    data = prepare(config, "train")
    five = prompts_to_answer(config, data, None)
    assert len(set(five)) == 5
    assert prompts_to_answer(config, data, None) == five
    assert prompts_to_answer(config.model_copy(update={"eval_generate_prompts": 3}), data, None) == five[:3]
    assert prompts_to_answer(config.model_copy(update={"seed": 7}), data, None) != five
    every = config.model_copy(update={"eval_generate_prompts": 100})
    assert sorted(prompts_to_answer(every, data, None)) == list(range(len(data)))


def test_no_part_of_a_row_is_a_prompt_to_answer(tmp_path: Path) -> None:
    rows = [conversation("Why? " * 6), conversation("Short?"), conversation("And then?", "so " * 90)]
    config = config_of(tmp_path, *rows, objective="sft", eval_generate_steps=1, eval_share=0.5, eval_answer_tokens=8)
    config = config.model_copy(update={"eval_share": 0.0})  # all three rows
    data = prepare(config, "train")
    assert data.report.truncated == 1, "control: there was one"
    answered = prompts_to_answer(config, data, None)
    assert sorted(data.where(number).rpartition(":")[2] for number in answered) == ["1", "2"]
    room = min(len(prompt_of(data, number).tokens) for number in answered) + 8
    (only,) = prompts_to_answer(config, data, room)
    assert data.where(only).endswith(":2")
    with pytest.raises(ConfigError, match="eval_generate_steps=1 has nothing to answer: no row of"):
        prompts_to_answer(config, data, room - 1)
    split = config.model_copy(update={"overlong": "split"})
    with pytest.raises(ConfigError, match=r"eval_generate_steps=1 with 1 rows of .* that overlong=split divides"):
        prompts_to_answer(split, prepare(split, "train"), None)


def test_recorded_steps_come_back_and_others_are_refused() -> None:
    step = STEP
    assert RecordedStep.from_json(step.to_json(step=4)) == step
    with pytest.raises(ValueError, match="no sampled answers"):
        RecordedStep.from_json("[1]")
    with pytest.raises(ValueError, match="differ in length"):
        RecordedStep.from_json(step.to_json().replace("[-0.25, -1.5]", "[-0.25]"))
    for value in ("NaN", '"x"', "null"):
        with pytest.raises(ValueError, match="not a finite number"):
            RecordedStep.from_json(step.to_json().replace("-0.25", value))
    ahead = replace(step, old_log_probs=[[-0.3, -1.4]])
    assert RecordedStep.from_json(ahead.to_json()) == ahead
    for old, sentence in (("[[-0.3]]", "differ in length"), ("[]", "differ in length"), ('[["x", 1]]', "not a finite")):
        with pytest.raises(ValueError, match=sentence):
            RecordedStep.from_json(ahead.to_json().replace("[[-0.3, -1.4]]", old))


@pytest.mark.parametrize(
    ("changes", "options", "sentence"),
    [
        ({}, {}, ""),
        ({"prompts": [4]}, {}, "answers are to other prompts"),
        ({"fingerprint": "other"}, {}, "answers are to other prompts"),
        ({}, {"temperature": 0.7}, "sampled at temperature=1.0, and this run has 0.7"),
        ({"answers": [[1, 9]]}, {}, "tokens that the model does not have"),
        ({}, {"max_completion_length": 1}, "longer than max_completion_length"),
    ],
)
def test_recorded_steps_of_another_run_are_refused(
    changes: dict[str, object], options: dict[str, object], sentence: str, tmp_path: Path
) -> None:
    misfit = replace(STEP, **changes).misfit(config_of(tmp_path, **options), [3], "sha", 9)  # type: ignore[arg-type]
    assert misfit is None if not sentence else sentence in str(misfit)


@pytest.mark.parametrize(("objective", "count"), [("grpo", 4), ("sft", 2)])
def test_a_loss_that_is_no_number_names_all_prompts_whose_answers_it_may_be(
    objective: str, count: int, tmp_path: Path
) -> None:
    """Answers are packed over the ranks anew, rows of the data are not."""
    rows = [{"prompt": f"What is {number}?", "completion": "That."} for number in range(8)]
    config = config_of(tmp_path, *rows, objective=objective, global_batch_size=4, per_device_train_batch_size=2,
                       packing=False)  # fmt: skip
    plan = plan_training(config, prepare(config, "train"), 2)
    described = origin(plan, 0, [(0, True), (1, False)])
    assert described.startswith("rank 1, in the batch from ")
    assert described.count("rows.jsonl:") == count
