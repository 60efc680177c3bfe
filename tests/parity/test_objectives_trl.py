"""DPO against TRL's trainer: the same rows in the same order, the same weights and hyper-parameters."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer

from tests.parity.plain import Curve
from tests.parity.runs import STEPS, config, curve, run
from tests.parity.test_objectives import PAIRS
from trainers.data.prepare import prepare
from trainers.embedded import BASE_DIR
from trainers.tools.preflight import plan_training

WHOLE_BATCHES = {**PAIRS, "max_train_samples": 6 * STEPS}
"""Less than an epoch, so that no batch is smaller: TRL takes rows in order."""


class InOrder(DPOTrainer):
    """Takes token ids as they are, in the order of the data."""

    def _prepare_dataset(self, dataset: Dataset, *others: Any, **more: Any) -> Dataset:
        return dataset

    def _get_train_sampler(self, dataset: Any = None) -> Iterable[int]:
        return torch.utils.data.SequentialSampler(self.train_dataset if dataset is None else dataset)


def trl_rows() -> list[dict[str, list[int]]]:
    """Our pairs in the order of the steps, as TRL's columns of token ids."""
    settings = config("full", False, objective="dpo", **WHOLE_BATCHES)
    plan = plan_training(settings, prepare(settings, "train"), 1)
    rows = []
    for step in range(STEPS):
        assert len(plan.rows_of(step)) == settings.global_batch_size, "a last batch that is smaller"
        for row in plan.rows_of(step):
            (chosen, mask), (rejected, _) = (plan.rows.documents.document(int(2 * row + side)) for side in (0, 1))
            prompt = int(mask.argmax())
            ids = {"prompt_ids": chosen[:prompt], "chosen_ids": chosen[prompt:], "rejected_ids": rejected[prompt:]}
            rows.append({name: values.tolist() for name, values in ids.items()})
    return rows


def trl_curve(folder: Path, rows: list[dict[str, list[int]]], **options: Any) -> Curve:
    """Loss and gradient norm of TRL's trainer."""
    settings = config("full", False, **PAIRS)
    arguments = DPOConfig(
        output_dir=str(folder), max_steps=STEPS, per_device_train_batch_size=settings.global_batch_size,
        learning_rate=settings.learning_rate, lr_scheduler_type="cosine", weight_decay=settings.weight_decay,
        max_grad_norm=settings.max_grad_norm, logging_steps=1, logging_nan_inf_filter=False, save_strategy="no",
        report_to=[], use_cpu=True, bf16=False, gradient_checkpointing=False, max_length=None,
        dataloader_pin_memory=False, **options,
    )  # fmt: skip
    models = [AutoModelForCausalLM.from_pretrained(BASE_DIR, dtype=torch.float32) for _ in range(2)]
    trainer = InOrder(
        models[0], models[1], arguments, train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(BASE_DIR),
    )  # fmt: skip
    trainer.train()
    logged = [row for row in trainer.state.log_history if "grad_norm" in row]
    (folder / "curve.json").write_text(json.dumps(logged))
    return Curve([row["loss"] for row in logged], [row["grad_norm"] for row in logged])


@functools.cache
def ours(**options: Any) -> Curve:
    return curve(run(1, "full", False, "single", objective="dpo", **WHOLE_BATCHES, **options))


@pytest.mark.parametrize(
    "loss",
    [
        {"loss_type": "sigmoid"},
        pytest.param({"loss_type": "ipo"}, marks=pytest.mark.long),
        pytest.param({"loss_type": "hinge"}, marks=pytest.mark.long),
        pytest.param({"loss_type": "robust", "label_smoothing": 0.1}, marks=pytest.mark.long),
        pytest.param({"loss_type": "sigmoid_norm", "beta": 2.0}, marks=pytest.mark.long),
    ],
    ids=lambda loss: loss["loss_type"],
)
def test_losses_and_gradient_norms_equal_those_of_trl(loss: dict[str, Any], tmp_path: Path) -> None:
    theirs = trl_curve(tmp_path, trl_rows(), **loss)
    trained = ours(**loss)
    assert trained.agrees(theirs)
    if loss["loss_type"] == "sigmoid":  # control: another beta is another curve
        assert not ours(beta=0.3, **loss).agrees(theirs)
