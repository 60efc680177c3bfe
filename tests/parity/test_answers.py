"""`eval_generate_steps`: what is answered is what the weights of that step answer, and training goes on as without."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AutoPeftModelForCausalLM
from transformers import AutoTokenizer

from tests.launching import ROOT, Finished, launch_well
from tests.parity.checks import equal_after_resume, same_bits
from tests.parity.runs import HALF, STEPS, options, run
from trainers.embedded import BASE_DIR, DATA_DIR
from trainers.strategy.strategy import load_strategy

TOKENS = 24
ANSWERS: dict[str, Any] = {"eval_generate_steps": 4, "eval_generate_prompts": 5, "eval_answer_tokens": TOKENS}
TIMES = [4, 8, 12, STEPS]
DROPOUT = {"lora_dropout": 0.3}
SCHEDULE_FREE = {"optim": "schedule_free_adamw", "lr_scheduler_type": "constant"}
FAULT = """
import trainers.answers

generate = trainers.answers.generate

def disturb(backend, *args):
    answers = generate(backend, *args)
    CHANGE
    return answers

trainers.answers.generate = disturb
"""
"""A control: answering leaves something behind."""


def rows(finished: Finished) -> list[dict[str, Any]]:
    """The answers, each with its prompt."""
    lines = [json.loads(line) for line in finished.run.answers.read_bytes().splitlines()]
    prompts = {line["row"]: line for line in lines if "step" not in line}
    return [prompts[line["row"]] | line for line in lines if "step" in line]


@torch.inference_mode()
def stock_answers(finished: Finished, prompts: list[str]) -> list[str]:
    """The answers of the run's export, by stock peft and transformers, one at a time and without padding."""
    model = AutoPeftModelForCausalLM.from_pretrained(finished.run.model, dtype=torch.float32)
    tokenizer, texts = AutoTokenizer.from_pretrained(BASE_DIR), []
    for prompt in prompts:
        ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)["input_ids"]
        output = model.generate(input_ids=ids, do_sample=False, max_new_tokens=TOKENS)[0, ids.shape[1] :]
        texts.append(tokenizer.decode(output, skip_special_tokens=True))
    return texts


def test_the_last_answers_are_those_of_the_export() -> None:
    finished = run(2, "lora", True, **ANSWERS)
    written = rows(finished)
    assert [row["step"] for row in written] == [step for step in TIMES for _ in range(5)]
    by_step = {step: [row for row in written if row["step"] == step] for step in TIMES}
    data = [json.loads(line)["messages"] for line in (DATA_DIR / "eval.jsonl").read_text().splitlines()]
    for row in written:
        messages = data[int(row["row"].rpartition(":")[2]) - 1]
        assert row["expected"] == messages[-1]["content"]
        assert messages[-2]["content"] in row["prompt"]
    for step in TIMES:  # the same prompts each time
        assert [row["prompt"] for row in by_step[step]] == [row["prompt"] for row in by_step[STEPS]]
    last = [row["answer"] for row in by_step[STEPS]]
    assert last == stock_answers(finished, [row["prompt"] for row in by_step[STEPS]])
    assert last != [row["answer"] for row in by_step[4]], "control: answers of other weights"


def test_training_goes_on_as_without_answers() -> None:
    assert same_bits(run(2, "lora", True, **ANSWERS), run(2, "lora", True))


@pytest.mark.long
@pytest.mark.parametrize("change", ["import torch; torch.rand(1)", "backend.model.eval()"])
def test_with_dropout_too_unless_answers_leave_something_behind(change: str, tmp_path: Path) -> None:
    plain = run(1, "lora", True, **DROPOUT)
    assert same_bits(run(1, "lora", True, **DROPOUT, **ANSWERS), plain)
    (tmp_path / "inject").mkdir()
    (tmp_path / "inject/sitecustomize.py").write_text(FAULT.replace("CHANGE", change))
    path = f"{tmp_path / 'inject'}{os.pathsep}{ROOT}"
    again = {**options("lora", True, **DROPOUT, **ANSWERS)}
    disturbed = launch_well(tmp_path / "run", 1, again, by_hand=True, PYTHONPATH=path)
    assert disturbed.series("loss")[:4] == plain.series("loss")[:4]
    assert disturbed.series("loss")[4] != plain.series("loss")[4], "control"


CASES = [
    ("ddp", "lora", {}), ("fsdp1", "full", {}), ("fsdp2", "full", {}), ("hsdp", "lora", {}), ("zero2", "full", {}),
    ("zero3", "lora", {}), ("fsdp2", "full", SCHEDULE_FREE),
    ("single", "full", {"gradient_checkpointing": True, **SCHEDULE_FREE}),
    ("ddp", "lora", {"load_best_model_at_end": True, "eval_steps": 4}), ("single", "qlora", {}),
]  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize(("strategy", "method", "more"), CASES)
def test_under_every_strategy(strategy: str, method: str, more: dict[str, Any]) -> None:
    """The training is the same to the bit, and the answers are those of one process."""
    world = 1 if strategy == "single" else load_strategy(strategy).num_processes
    finished = run(world, method, True, strategy, **more, **ANSWERS)
    assert same_bits(finished, run(world, method, True, strategy, **more))
    assert rows(finished) == rows(run(1, method, True, **more, **ANSWERS))


@pytest.mark.long
def test_two_processes_write_the_same_text() -> None:
    assert rows(run(2, "lora", True, **ANSWERS)) == rows(run(1, "lora", True, **ANSWERS))


@pytest.mark.long
@pytest.mark.parametrize("processes", [1, 2])
def test_a_resume_replaces_what_came_after_its_checkpoint(processes: int, tmp_path: Path) -> None:
    finished = run(processes, "lora", True, **ANSWERS, **DROPOUT)
    before = finished.run.answers.read_bytes()
    shutil.copytree(finished.run.path, tmp_path / "run")
    with open(tmp_path / "run" / "answers.jsonl", "ab") as file:  # a stale row, and one that a kill has cut
        file.write(b'{"step": 13, "row": "stale", "answer": "", "ended": true}\n{"st')
    again = options("lora", True, **ANSWERS, **DROPOUT)
    again |= {"resume_from_checkpoint": tmp_path / "run" / "checkpoints" / f"step-{HALF:08}"}
    resumed = launch_well(tmp_path / "run", processes, again)
    assert finished.series("loss")[HALF:] == [row["loss"] for row in resumed.rows() if row["attempt"] == 1]
    assert resumed.run.answers.read_bytes() == before
    elsewhere = launch_well(tmp_path / "other", processes, again)
    assert equal_after_resume(finished, elsewhere)
    assert rows(elsewhere) == [row for row in rows(finished) if row["step"] > HALF]
    once_more = launch_well(tmp_path / "other", processes, {**again, "resume_from_checkpoint": "auto"})
    assert rows(once_more) == rows(elsewhere), "the last step was answered before"
    without = launch_well(tmp_path / "run", processes, {**again, "eval_generate_steps": 0})
    assert rows(without) == [row for row in rows(finished) if row["step"] <= HALF]


@pytest.mark.long
@pytest.mark.parametrize("objective", ["dpo", "orpo", "kto", "grpo"])
def test_other_objectives_answer_too(objective: str, tmp_path: Path) -> None:
    messages = [json.loads(line)["messages"] for line in (DATA_DIR / "train.jsonl").read_text().splitlines()[:24]]
    pairs = [{"prompt": turns[:-1], "chosen": turns[-1:], "rejected": [{**turns[-1], "content": "No."}]}
             for turns in messages]  # fmt: skip
    labelled = [{"prompt": turns[:-1], "completion": turns[-1:], "label": number % 2 == 0}
                for number, turns in enumerate(messages)]  # fmt: skip
    prompts = [{"prompt": turns[:-1], "answer": turns[-1]["content"]} for turns in messages]
    data = {"kto": labelled, "grpo": prompts}.get(objective, pairs)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in data))
    more = {"grpo": {"reward_funcs": "exact_match", "num_generations": 2, "max_completion_length": 16}}
    chosen = {**options("lora", True, **ANSWERS), "objective": objective, "dataset_name": tmp_path / "rows.jsonl",
              "eval_dataset_name": tmp_path / "rows.jsonl", "max_train_samples": 24, "max_steps": 4, "max_length": 256,
              **more.get(objective, {})}  # fmt: skip
    finished = launch_well(tmp_path / "run", 1, chosen)
    plain = launch_well(tmp_path / "plain", 1, {**chosen, "eval_generate_steps": 0})
    assert same_bits(finished, plain)
    answers = {turns[-1]["content"] for turns in messages}
    assert len(rows(finished)) == len({row["prompt"] for row in rows(finished)}) == 5
    expected = {"", *answers} if objective == "kto" else answers
    assert all(row["expected"] in expected for row in rows(finished))
