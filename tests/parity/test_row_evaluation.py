"""`eval_only`: losses and greedy answers of each row are those of stock transformers, under every strategy."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.launching import launch, launch_well
from tests.parity.runs import mostly_long
from trainers.embedded import BASE_DIR, DATA_DIR
from trainers.strategy.strategy import load_strategy

ROWS, TOKENS = 13, 40
OPTIONS: dict[str, Any] = {
    "model_name_or_path": "embedded", "dataset_name": "embedded", "eval_dataset_name": "embedded", "method": "lora",
    "eval_only": True, "eval_answer_tokens": TOKENS, "max_eval_samples": ROWS, "per_device_eval_batch_size": 3,
    "per_device_train_batch_size": 1,
}  # fmt: skip


@cache
@torch.inference_mode()
def stock(last: int = 0, dtype: torch.dtype = torch.float32) -> list[dict[str, Any]]:
    """One row at a time, without padding; as a control with the weights of the `last` layer doubled."""
    model = AutoModelForCausalLM.from_pretrained(BASE_DIR, dtype=dtype)
    if last:
        model.model.layers[-1].mlp.down_proj.weight.data *= 2
    tokenizer, rows = AutoTokenizer.from_pretrained(BASE_DIR), []
    for line in (DATA_DIR / "eval.jsonl").read_text().splitlines()[:ROWS]:
        messages = json.loads(line)["messages"]
        coded = tokenizer.apply_chat_template(messages, return_assistant_tokens_mask=True, return_dict=True)
        prompt = tokenizer.apply_chat_template(messages[:-1], add_generation_prompt=True, return_dict=True)["input_ids"]
        ids, trained = torch.tensor([coded["input_ids"]]), torch.tensor(coded["assistant_masks"])[1:].bool()
        losses = functional.cross_entropy(model(ids).logits[0, :-1].float(), ids[0, 1:], reduction="none")[trained]
        answer = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=TOKENS)[0, len(prompt) :]
        rows.append({"loss": losses.sum().item(), "tokens": len(losses), "expected": messages[-1]["content"],
                     "answer": tokenizer.decode(answer, skip_special_tokens=True)})  # fmt: skip
    return rows


def evaluated(folder: Path, strategy: str, **changes: Any) -> list[dict[str, Any]]:
    world = 1 if strategy == "single" else load_strategy(strategy).num_processes
    finished = launch_well(folder, world, {**OPTIONS, **changes}, strategy=strategy)
    assert not (finished.run.path / "model").exists()
    return [json.loads(line) for line in finished.run.evaluation.read_text().splitlines()]


@pytest.mark.parametrize(
    "strategy", mostly_long(["single", "ddp", "fsdp1", "fsdp2", "hsdp", "zero2", "zero3"], ["ddp", "fsdp2"])
)
def test_rows_are_evaluated_as_by_stock_transformers(strategy: str, tmp_path: Path) -> None:
    rows = evaluated(tmp_path, strategy)
    assert [row["row"] for row in rows] == [f"embedded/eval.jsonl:{number}" for number in range(1, ROWS + 1)]
    for name in ("answer", "expected", "tokens"):
        assert [row[name] for row in rows] == [row[name] for row in stock()]
    assert [row["loss"] for row in rows] == pytest.approx([row["loss"] for row in stock()], abs=1e-4)
    ended = [row["ended"] for row in rows]
    assert set(ended) == {True, False}
    assert [row["characters"] for row in rows] == [len(row["expected"]) for row in rows]
    changed = stock(last=1)  # control
    assert [row["answer"] for row in rows] != [row["answer"] for row in changed]
    assert [row["loss"] for row in rows] != pytest.approx([row["loss"] for row in changed], abs=1e-2)


@pytest.mark.long
def test_any_number_of_processes_will_do(tmp_path: Path) -> None:
    """Three do not divide the batch of training, which is not read."""
    options = {**OPTIONS, "per_device_train_batch_size": 2, "global_batch_size": 16}
    finished = launch_well(tmp_path, 3, options, strategy="fsdp2")
    rows = [json.loads(line) for line in finished.run.evaluation.read_text().splitlines()]
    assert [row["answer"] for row in rows] == [row["answer"] for row in stock()]


def test_text_has_no_answers_and_cut_rows_are_refused(tmp_path: Path) -> None:
    (tmp_path / "text.jsonl").write_text('{"text": "some words"}\n{"text": "more words"}\n')
    text = {"dataset_name": str(tmp_path / "text.jsonl"), "eval_dataset_name": str(tmp_path / "text.jsonl")}
    rows = evaluated(tmp_path / "text", "single", **text)
    assert [row["answer"] for row in rows] == [None, None]
    assert all(row["loss"] > 0 and row["tokens"] > 1 for row in rows)
    for overlong in ("truncate", "split"):
        shorter = {**OPTIONS, "max_length": 90, "overlong": overlong}
        refused = launch(tmp_path / overlong, 1, shorter, strategy="single")
        assert "rows are longer than max_length=90, so that prompts or expected answers are cut" in refused.output
    for changes in ({"eval_answer_tokens": 100_000}, {"assistant_only_loss": False}):  # no room; nothing but answers
        rows = evaluated(tmp_path / f"{changes}", "single", **changes)
        assert [row["answer"] for row in rows] == [None] * ROWS


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["single", "fsdp2"])
def test_bf16_gives_the_losses_of_stock_bf16(strategy: str, tmp_path: Path) -> None:
    """Rounding differs with the shape of a batch, so per token within a few steps of bf16, and closer than fp32 is."""
    rows = evaluated(tmp_path, strategy, mixed_precision="bf16", eval_answer_tokens=0)
    of_bf16, of_fp32, changed = stock(dtype=torch.bfloat16), stock(), stock(last=1)

    def distance(of: list[dict[str, Any]]) -> float:
        return max(abs(row["loss"] - other["loss"]) / row["tokens"] for row, other in zip(rows, of, strict=True))

    assert distance(of_bf16) < 0.02
    assert distance(changed) > 0.1, "control"
    assert distance(of_fp32) > 0, "it is no fp32"


def test_an_undesirable_answer_is_not_expected(tmp_path: Path) -> None:
    """Control: as prompts and completions, whose label is just another column, all are."""
    facts = [{"prompt": f"Say {number}.", "completion": f"It is {number}.", "label": number % 3 != 1}
             for number in range(6)]  # fmt: skip
    (tmp_path / "kto.jsonl").write_text("".join(json.dumps(row) + "\n" for row in facts))
    data = {"dataset_name": str(tmp_path / "kto.jsonl"), "eval_dataset_name": str(tmp_path / "kto.jsonl")}
    rows = evaluated(tmp_path / "labelled", "single", **data, dataset_format="labelled", eval_answer_tokens=3)
    assert [row["expected"] for row in rows] == [fact["completion"] for fact in facts if fact["label"]]
    assert all(row["answer"] for row in rows)
    every = evaluated(tmp_path / "all", "single", **data, eval_answer_tokens=0)
    assert [row["expected"] for row in every] == [fact["completion"] for fact in facts]
