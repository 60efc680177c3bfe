"""Preferences against TRL's trainers: the same rows in the same order, the same weights and hyper-parameters."""

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
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer

from tests.parity.plain import Curve
from tests.parity.runs import STEPS, config, curve, run
from tests.parity.test_objectives import PAIRS
from trainers.data.prepare import prepare
from trainers.embedded import BASE_DIR
from trainers.tools.preflight import plan_training

WHOLE_BATCHES = {**PAIRS, "max_train_samples": 6 * STEPS}
"""Less than an epoch, so that no batch is smaller: TRL takes rows in order."""


class InOrder:
    """Takes token ids as they are, in the order of the data."""

    def _prepare_dataset(self, dataset: Dataset, *others: Any, **more: Any) -> Dataset:
        return dataset

    def tokenize_row(self, row: dict[str, Any], model: Any = None) -> dict[str, Any]:
        return row

    def _get_train_sampler(self, dataset: Any = None) -> Iterable[int]:
        return torch.utils.data.SequentialSampler(self.train_dataset if dataset is None else dataset)  # type: ignore


class Dpo(InOrder, DPOTrainer):
    pass


class Cpo(InOrder, CPOTrainer):
    pass


class Orpo(InOrder, ORPOTrainer):
    """With the supervised loss of the paper, of the chosen answer; TRL's counts its prompt too."""

    def concatenated_forward(self, model: Any, batch: dict[str, Any]) -> tuple[Any, ...]:
        chosen, rejected, chosen_logits, rejected_logits, _ = super().concatenated_forward(model, batch)
        labels, length = batch["chosen_labels"][:, 1:], batch["chosen_labels"].shape[1]
        nll = torch.nn.functional.cross_entropy(chosen_logits[:, : length - 1].flatten(0, 1), labels.flatten())
        return chosen, rejected, chosen_logits, rejected_logits, nll


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


def labelled(rows: list[dict[str, list[int]]]) -> list[dict[str, Any]]:
    """The same rows as the columns of TRL's older trainers."""
    labelled = []
    for row in rows:
        columns: dict[str, Any] = {"prompt": "", "chosen": "", "rejected": "", "prompt_input_ids": row["prompt_ids"]}
        for side in ("chosen", "rejected"):
            ids, prompt = row["prompt_ids"] + row[f"{side}_ids"], len(row["prompt_ids"])
            columns |= {f"{side}_input_ids": ids, f"{side}_attention_mask": [1] * len(ids),
                        f"{side}_labels": [-100] * prompt + ids[prompt:]}  # fmt: skip
        labelled.append(columns)
    return labelled


def trl_curve(folder: Path, objective: str, **options: Any) -> Curve:
    """Loss and gradient norm of TRL's trainer."""
    settings = config("full", False, **PAIRS)
    arguments = {
        "output_dir": str(folder), "max_steps": STEPS, "per_device_train_batch_size": settings.global_batch_size,
        "learning_rate": settings.learning_rate, "lr_scheduler_type": "cosine", "weight_decay": settings.weight_decay,
        "max_grad_norm": settings.max_grad_norm, "logging_steps": 1, "logging_nan_inf_filter": False,
        "save_strategy": "no", "report_to": [], "use_cpu": True, "bf16": False, "gradient_checkpointing": False,
        "dataloader_pin_memory": False, **options,
    }  # fmt: skip
    tokenizer, rows = AutoTokenizer.from_pretrained(BASE_DIR), trl_rows()
    models = [AutoModelForCausalLM.from_pretrained(BASE_DIR, dtype=torch.float32) for _ in range(2)]
    if objective == "dpo":
        data = Dataset.from_list(rows)
        trainer = Dpo(models[0], models[1], DPOConfig(max_length=None, **arguments), train_dataset=data,
                      processing_class=tokenizer)  # fmt: skip
    else:
        build, build_config = (Orpo, ORPOConfig) if objective == "orpo" else (Cpo, CPOConfig)
        trainer = build(models[0], build_config(max_length=settings.max_length, **arguments),
                        train_dataset=Dataset.from_list(labelled(rows)), processing_class=tokenizer)  # fmt: skip
    trainer.train()
    logged = [row for row in trainer.state.log_history if "grad_norm" in row]
    (folder / "curve.json").write_text(json.dumps(logged))
    return Curve([row["loss"] for row in logged], [row["grad_norm"] for row in logged])


@functools.cache
def ours(objective: str, **options: Any) -> Curve:
    return curve(run(1, "full", False, "single", objective=objective, **WHOLE_BATCHES, **options))


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
def test_dpo_equals_that_of_trl(loss: dict[str, Any], tmp_path: Path) -> None:
    theirs = trl_curve(tmp_path, "dpo", **loss)
    trained = ours("dpo", **loss)
    assert trained.agrees(theirs)
    if loss["loss_type"] == "sigmoid":  # control: another beta is another curve
        assert not ours("dpo", beta=0.3, **loss).agrees(theirs)


@pytest.mark.parametrize(
    ("objective", "options", "theirs"),
    [
        pytest.param("cpo", {"loss_type": "sigmoid", "label_smoothing": 0.1}, {}, marks=pytest.mark.long),
        pytest.param("cpo", {"loss_type": "hinge", "nll_weight": 0.5}, {"cpo_alpha": 0.5}, marks=pytest.mark.long),
        pytest.param("cpo", {"loss_type": "ipo", "beta": 1.0}, {}, marks=pytest.mark.long),
        pytest.param("simpo", {"beta": 2.0, "simpo_gamma": 0.5}, {"cpo_alpha": 0.0, "loss_type": "simpo"},
                     marks=pytest.mark.long),
        ("orpo", {"beta": 0.3}, {}),
    ],
)  # fmt: skip
def test_those_without_a_reference_equal_those_of_trl(
    objective: str, options: dict[str, Any], theirs: dict[str, Any], tmp_path: Path
) -> None:
    shared = {name: value for name, value in options.items() if name != "nll_weight"}
    curve_of_trl = trl_curve(tmp_path, objective, **{**shared, **theirs})
    assert ours(objective, **options).agrees(curve_of_trl)
    if objective == "orpo":  # control: another beta is another curve
        assert not ours(objective, beta=0.1).agrees(curve_of_trl)
