"""Reward models keep the promises: against plain PyTorch and TRL, over strategies, after a resume, and as exported.

Each document has one score, of its last token. In a packed row that is not the row's last token, and where ranks share
rows only one of them holds it.
"""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from torch.nn import functional
from transformers import AutoModelForSequenceClassification, AutoTokenizer, set_seed
from trl import RewardConfig, RewardTrainer

from tests.launching import Finished, launch, launch_well
from tests.parity import plain
from tests.parity.checks import equal_after_resume, same_bits
from tests.parity.runs import STEPS, config, curve, mostly_long, options, run
from tests.parity.test_objectives import STRATEGIES, plain_curve
from tests.shared import once
from tests.steps import steps
from trainers.config.options import TrainConfig
from trainers.data.batches import TrainPlan
from trainers.data.prepare import prepare
from trainers.embedded import BASE_DIR, PREFERENCES_DIR
from trainers.strategy.strategy import load_strategy
from trainers.tools.preflight import plan_training

CENTERING = 0.05


def write_rows(path: Path) -> None:
    """Pairs of the embedded preferences, each with a margin."""
    rng = random.Random(1)
    lines = (PREFERENCES_DIR / "train.jsonl").read_text(encoding="utf-8").splitlines()[:80]
    rows = [{**json.loads(line), "margin": round(rng.uniform(0, 1.5), 2)} for line in lines]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")


def reward_options(**changes: Any) -> dict[str, Any]:
    """What these runs change in those of the other parity tests; a packed row holds one to three pairs."""
    data = once("reward-rows", lambda folder: write_rows(folder / "rows.jsonl")) / "rows.jsonl"
    return {
        "objective": "reward", "center_rewards_coefficient": CENTERING, "dataset_name": str(data),
        "eval_dataset_name": str(data), "learning_rate": 5e-4, "max_train_samples": 61, "max_length": 96,
        "global_batch_size": 4, "per_device_train_batch_size": 1,
        **changes,
    }  # fmt: skip


def build(settings: TrainConfig) -> nn.Module:
    """The stock classifier, with a head drawn from the seed, and stock adapters for LoRA."""
    model: Any = AutoModelForSequenceClassification.from_pretrained(
        BASE_DIR, num_labels=1, dtype=torch.float32, attn_implementation="eager"
    )
    generator = torch.Generator().manual_seed(settings.seed)
    with torch.no_grad():
        model.score.weight.copy_(torch.empty(1, model.config.hidden_size).normal_(0, 0.02, generator=generator))
    if settings.method == "full":
        return model
    set_seed(settings.seed)
    adapters = {"r": settings.lora_r, "lora_alpha": settings.lora_alpha, "target_modules": "all-linear"}
    return get_peft_model(model, LoraConfig(task_type="SEQ_CLS", **adapters))


def plain_reward(settings: TrainConfig, wrong: str = "") -> plain.Curve:
    """Bradley-Terry in a page: each document alone.

    Args:
        settings: options of the run.
        wrong: control: `labels` are the other way round, the `margin` is ignored, or the first `token` is scored.
    """

    def mean_loss(plan: TrainPlan, model: nn.Module, initial: nn.Module, members: np.ndarray) -> torch.Tensor:
        losses = []
        for pair in members.reshape(-1, 2).tolist():
            chosen, rejected = (score(model, plan.rows.documents.document(member)[0], wrong) for member in pair)
            margin = 0.0 if wrong == "margin" else float(plan.rows.columns["margin"][pair[0]])
            difference = rejected - chosen if wrong == "labels" else chosen - rejected
            losses.append(-functional.logsigmoid(difference - margin) + CENTERING * (chosen + rejected) ** 2)
        return torch.stack(losses).mean()

    return plain_curve(settings, mean_loss, build)


def score(model: nn.Module, tokens: np.ndarray, wrong: str = "") -> torch.Tensor:
    """The score of a document alone by the stock model."""
    ids = torch.from_numpy(tokens.astype(np.int64))[None]
    return model(input_ids=ids[:, :1] if wrong == "token" else ids).logits[0, 0]


@functools.cache
def wanted(method: str) -> plain.Curve:
    """The curve of the plain page."""

    def train(folder: Path) -> None:
        (folder / "curve.json").write_text(json.dumps(asdict(plain_reward(config(method, True, **reward_options())))))

    return plain.Curve(**json.loads((once(f"plain-reward-{method}", train) / "curve.json").read_text()))


def reward(name: str, method: str = "full", packing: bool = True, **changes: Any) -> Finished:
    """A run under a strategy, with as many processes as its file says."""
    return run(load_strategy(name).num_processes, method, packing, name, **reward_options(**changes))


@pytest.mark.parametrize("name", mostly_long(["single", *STRATEGIES], ["single", "sp"], ["single"]))
def test_p2_equals_a_plain_page_of_pytorch(name: str) -> None:
    assert curve(reward(name)).agrees(wanted("full"))


@pytest.mark.parametrize("name", mostly_long(["single", "ddp", "fsdp2", "zero3", "tp", "cp"], ["ddp"]))
def test_p2_with_adapters(name: str) -> None:
    """The head is trained in full beside the adapters, as stock peft does for this kind of model."""
    assert curve(reward(name, "lora")).agrees(wanted("lora"))


@pytest.mark.parametrize("wrong", mostly_long(["labels", "margin", "token"], ["margin"]))
def test_what_is_wrong_does_not_agree(wrong: str) -> None:
    assert not plain_reward(config("full", True, **reward_options()), wrong).agrees(wanted("full"))


@pytest.mark.long
@pytest.mark.parametrize("size", [2, 4])
def test_micro_batches_change_nothing(size: int) -> None:
    assert curve(reward("single", per_device_train_batch_size=size)).agrees(wanted("full"))


@pytest.mark.long
def test_evaluation_is_the_same_on_any_number_of_ranks() -> None:
    single, sharded = (reward(name) for name in ("single", "fsdp2"))
    for key in ("eval_loss", "eval_reward_accuracy", "eval_reward_margin", "eval_reward_chosen"):
        assert single.series(key) == pytest.approx(sharded.series(key), abs=1e-5)
    assert single.series("eval_reward_margin")[-1] > 0.1


@pytest.mark.parametrize("method", mostly_long(["full", "lora"], ["full"]))
def test_a_resumed_run_is_the_same_bit_for_bit(method: str, tmp_path: Path) -> None:
    undisturbed = reward("single", method)
    again = {**options(method, True, **reward_options()), "resume_from_checkpoint": undisturbed.checkpoints[0]}
    assert equal_after_resume(undisturbed, launch_well(tmp_path / "again", 1, again, strategy="single"))


@pytest.mark.long
def test_p0_rerun_is_the_same_bit_for_bit() -> None:
    first, second = (run(2, "full", True, "ddp", again=again, **reward_options()) for again in (0, 1))
    assert same_bits(first, second)


@pytest.mark.long
@pytest.mark.parametrize("method", ["full", "lora"])
def test_half_precision_trains_the_head_in_fp32(method: str) -> None:
    half = reward("single", method, mixed_precision="bf16")
    losses = zip(half.series("loss"), wanted(method).losses, strict=True)
    assert max(abs(ours - theirs) for ours, theirs in losses) < 0.05


def exported(finished: Finished, method: str) -> Any:
    """The export as stock transformers and peft load it."""
    if method == "full":
        return AutoModelForSequenceClassification.from_pretrained(finished.run.model).eval()
    base = AutoModelForSequenceClassification.from_pretrained(BASE_DIR, num_labels=1)
    return PeftModel.from_pretrained(base, finished.run.model).eval()


@torch.no_grad()
@pytest.mark.parametrize("method", mostly_long(["full", "lora"], ["full"]))
def test_an_export_gives_the_scores_of_the_trainer(method: str) -> None:
    """Padded into one batch: the config's padding token lets the stock model find each last token."""
    finished = reward("single", method)
    model, tokenizer = exported(finished, method), AutoTokenizer.from_pretrained(finished.run.model)
    documents = prepare(config(method, True, **reward_options()), "eval")
    ids = [documents.document(index)[0].tolist() for index in range(len(documents))]
    batch = tokenizer.pad({"input_ids": ids}, return_tensors="pt")
    scores = model(**batch).logits[:, 0].view(-1, 2)
    assert scores[:, 0].mean().item() == pytest.approx(finished.series("eval_reward_chosen")[-1], abs=1e-5)
    assert scores[:, 1].mean().item() == pytest.approx(finished.series("eval_reward_rejected")[-1], abs=1e-5)
    assert model.config.num_labels == 1
    assert not any("lm_head" in name for name, _ in model.named_parameters())


@pytest.mark.long
@pytest.mark.parametrize(("before", "after"), [("full", "full"), ("lora", "lora"), ("lora", "full")])
def test_a_run_goes_on_with_the_head_of_another_and_dpo_does_not(before: str, after: str, tmp_path: Path) -> None:
    first, settings = reward("single", before), options(after, True, **reward_options())
    del settings["model_name_or_path"]
    more = {"from_run": first.run.path, "max_steps": 1, "eval_on_start": True, "eval_steps": 1}
    second = launch_well(tmp_path / "second", 1, {**settings, **more}, strategy="single")
    assert second.series("eval_loss")[0] == pytest.approx(first.series("eval_loss")[-1], abs=1e-5)
    changed = {"objective": "dpo", "center_rewards_coefficient": 0.0}
    refused = launch(tmp_path / "third", 1, {**settings, **more, **changed}, strategy="single")
    assert refused.status != 0
    assert "has no language-modeling head" in refused.output


class InOrder(RewardTrainer):
    """Takes token ids as they are, in the order of the data."""

    def _prepare_dataset(self, dataset: Dataset, *others: Any, **more: Any) -> Dataset:
        return dataset

    def _get_train_sampler(self, dataset: Any = None) -> Iterable[int]:
        return torch.utils.data.SequentialSampler(self.train_dataset if dataset is None else dataset)


def trl_rows() -> list[dict[str, Any]]:
    """Our pairs in the order of the steps, as TRL's columns of token ids."""
    settings = config("full", False, **reward_options())
    plan = plan_training(settings, prepare(settings, "train"), 1)
    margins, rows = plan.rows.columns["margin"], []
    for step in range(STEPS):
        assert len(plan.rows_of(step)) == settings.global_batch_size, "a last batch that is smaller"
        for pair in plan.rows.members_of(plan.rows_of(step)).reshape(-1, 2).tolist():
            chosen, rejected = (plan.rows.documents.document(member)[0].tolist() for member in pair)
            rows.append({"chosen_ids": chosen, "rejected_ids": rejected, "margin": float(margins[pair[0]])})
    return rows


def trl_curve(folder: Path, rows: list[dict[str, Any]]) -> plain.Curve:
    """Loss and gradient norm of TRL's trainer, whose micro-batch is the global batch."""
    settings = config("full", False, **reward_options())
    arguments = RewardConfig(
        output_dir=str(folder), max_steps=STEPS, per_device_train_batch_size=settings.global_batch_size,
        learning_rate=settings.learning_rate, lr_scheduler_type="cosine", weight_decay=settings.weight_decay,
        max_grad_norm=settings.max_grad_norm, logging_steps=1, logging_nan_inf_filter=False, save_strategy="no",
        report_to=[], use_cpu=True, bf16=False, gradient_checkpointing=False, max_length=None,
        dataloader_pin_memory=False, train_sampling_strategy="sequential", center_rewards_coefficient=CENTERING,
    )  # fmt: skip
    trainer = InOrder(
        build(settings), arguments, train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(BASE_DIR),
    )  # fmt: skip
    trainer.train()
    logged = [row for row in trainer.state.log_history if "grad_norm" in row]
    return plain.Curve([row["loss"] for row in logged], [row["grad_norm"] for row in logged])


def stepped(folder: Path) -> plain.Curve:
    """Our loss and gradient norm, in this process; a step is one micro-batch, as TRL's is."""
    changes = {**options("full", False, **reward_options()), "per_device_train_batch_size": 4}
    for name in ("packing", "global_batch_size"):
        del changes[name]
    with steps(folder, 4, False, **changes) as taken:
        results = [taken.take(step) for step in range(STEPS)]
    return plain.Curve([result.loss for result in results], [result.grad_norm for result in results])


def test_losses_and_gradient_norms_equal_those_of_trl(tmp_path: Path) -> None:
    rows = trl_rows()
    theirs = trl_curve(tmp_path, rows)
    assert stepped(tmp_path).agrees(theirs)
    others = [{**row, "margin": 0.0} for row in rows]  # control
    assert not trl_curve(tmp_path, others).agrees(theirs)
