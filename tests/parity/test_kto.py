"""KTO keeps the promises: against plain PyTorch and TRL, over strategies, after a resume.

Its loss contains a mean over the global batch, which must not become one over a micro-batch or a rank.
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
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import KTOConfig, KTOTrainer

from tests.launching import Finished, launch_well
from tests.parity import plain
from tests.parity.checks import equal_after_resume, same_bits
from tests.parity.runs import STEPS, config, curve, mostly_long, options, run
from tests.parity.test_objectives import STRATEGIES, log_prob, plain_curve
from tests.shared import once
from tests.steps import steps
from trainers.config.options import TrainConfig
from trainers.data.batches import TrainPlan
from trainers.data.prepare import prepare
from trainers.embedded import BASE_DIR
from trainers.reference import set_reference
from trainers.strategy.strategy import load_strategy
from trainers.tools.preflight import plan_training

WEIGHTS = {"desirable_weight": 1.3, "undesirable_weight": 0.2}


def write_rows(path: Path) -> None:
    """Records as JSON, which is desirable, or with a field left out. What most answers share is learned first.

    So answers become likelier with any prompt, and the divergence is positive.
    """
    rng, names = random.Random(1), ("Kerol", "Pebran", "Tekes", "Gesto", "Budruk", "Fosak")
    with path.open("w") as stream:
        for _ in range(150):
            name, city, age, good = rng.choice(names), rng.choice(names), rng.randrange(10, 99), rng.random() < 0.6
            answer = {"name": name, "city": city, "age": age} if good else {"name": name, "city": city}
            messages = {
                "prompt": [{"role": "user", "content": f"Record of {name}, {age}, from {city}?"}],
                "completion": [{"role": "assistant", "content": json.dumps(answer) if good else f"{answer}"}],
            }
            stream.write(json.dumps({**messages, "label": good}) + "\n")


def kto_options(**changes: Any) -> dict[str, Any]:
    """What these runs change in those of the other parity tests; rows hold one to three examples."""
    data = once("kto-rows", lambda folder: write_rows(folder / "rows.jsonl")) / "rows.jsonl"
    return {
        "objective": "kto", **WEIGHTS, "dataset_name": str(data), "eval_dataset_name": str(data),
        "learning_rate": 3e-5, "max_train_samples": 150, "global_batch_size": 4, "per_device_train_batch_size": 1,
        "eval_steps": 10,
        **changes,
    }  # fmt: skip


def plain_kto(settings: TrainConfig, wrong: str = "") -> plain.Curve:
    """KTO in a page: each document alone, the initial model beside the trained one.

    Args:
        settings: options of the run.
        wrong: control: `labels` are the other way round, or the divergence is one of each `example`.
    """
    references = dict[bytes, torch.Tensor]()

    def mean_loss(plan: TrainPlan, model: nn.Module, initial: nn.Module, members: np.ndarray) -> torch.Tensor:
        def ratio(member: int, mismatched: bool) -> torch.Tensor:
            assert plan.rows.mismatched is not None
            rows = plan.rows.mismatched if mismatched else plan.rows
            document = rows.documents.document(member)
            key = b"".join(part.tobytes() for part in document)  # in a stream, each batch has numbers of its own
            if key not in references:
                with torch.no_grad():
                    references[key] = log_prob(initial, *document)
            return log_prob(model, *document) - references[key]

        with torch.no_grad():
            divergences = torch.stack([ratio(member, True) for member in members.tolist()])
        kl = divergences.mean().clamp(min=0)
        losses = []
        for place, member in enumerate(members.tolist()):
            kl = divergences[place].clamp(min=0) if wrong == "example" else kl
            assert plan.rows.desirable is not None
            good = bool(plan.rows.desirable[member]) != (wrong == "labels")
            distance = 0.1 * (ratio(member, False) - kl)
            losses.append(1.3 * (1 - torch.sigmoid(distance)) if good else 0.2 * (1 - torch.sigmoid(-distance)))
        return torch.stack(losses).mean()

    return plain_curve(settings, mean_loss)


@functools.cache
def wanted(method: str) -> plain.Curve:
    """The curve of the plain page."""

    def train(folder: Path) -> None:
        (folder / "curve.json").write_text(json.dumps(asdict(plain_kto(config(method, True, **kto_options())))))

    return plain.Curve(**json.loads((once(f"plain-kto-{method}", train) / "curve.json").read_text()))


def kto(name: str, method: str = "full", packing: bool = True, **changes: Any) -> Finished:
    """A run under a strategy, with as many processes as its file says."""
    return run(load_strategy(name).num_processes, method, packing, name, **kto_options(**changes))


@pytest.mark.parametrize("name", mostly_long(["single", *STRATEGIES], ["single"], ["single"]))
def test_p2_equals_a_plain_page_of_pytorch(name: str) -> None:
    finished = kto(name)
    assert curve(finished).agrees(wanted("full"))
    assert finished.series("kl")[0] == pytest.approx(0, abs=1e-4)  # it starts as the initial model
    assert sum(value > 0.1 for value in finished.series("kl")) > STEPS / 4  # the clamp does not hide it


@pytest.mark.long
@pytest.mark.parametrize("name", ["single", "ddp", "zero3"])
def test_p2_with_adapters(name: str) -> None:
    assert curve(kto(name, "lora")).agrees(wanted("lora"))


@pytest.mark.parametrize("wrong", mostly_long(["labels", "example"], ["example"]))
def test_what_is_wrong_does_not_agree(wrong: str) -> None:
    assert not plain_kto(config("full", True, **kto_options()), wrong).agrees(wanted("full"))


@pytest.mark.long
@pytest.mark.parametrize("size", [2, 4])
def test_micro_batches_change_nothing(size: int) -> None:
    assert curve(kto("single", per_device_train_batch_size=size)).agrees(wanted("full"))


def test_evaluation_is_the_same_on_any_number_of_ranks() -> None:
    """The divergence is one over all of the evaluation data, in batches of 4 rows on one rank and on two."""
    single, sharded = (kto(name) for name in ("single", "fsdp2"))
    for key in ("eval_loss", "eval_kl", "eval_reward_accuracy", "eval_reward_desirable", "eval_reward_undesirable"):
        assert single.series(key) == pytest.approx(sharded.series(key), abs=1e-5)
    assert single.series("eval_kl")[0] > 0.1


@pytest.mark.long
def test_a_resumed_run_keeps_its_reference_bit_for_bit(tmp_path: Path) -> None:
    """Of the examples and of the mismatched documents, in a new folder."""
    undisturbed = kto("single")
    again = {**options("full", True, **kto_options()), "resume_from_checkpoint": undisturbed.checkpoints[0]}
    assert equal_after_resume(undisturbed, launch_well(tmp_path / "again", 1, again, strategy="single"))


@pytest.mark.long
def test_p0_rerun_is_the_same_bit_for_bit() -> None:
    first, second = (run(2, "full", True, "ddp", again=again, **kto_options()) for again in (0, 1))
    assert same_bits(first, second)


class InOrder(KTOTrainer):
    """Takes token ids as they are, in the order of the data."""

    def _prepare_dataset(self, dataset: Dataset, *others: Any, **more: Any) -> Dataset:
        return dataset

    def _get_train_sampler(self, dataset: Any = None) -> Iterable[int]:
        return torch.utils.data.SequentialSampler(self.train_dataset if dataset is None else dataset)


def trl_rows() -> list[dict[str, Any]]:
    """Our examples in the order of the steps, as TRL's columns of token ids, mismatched answers included."""
    settings = config("full", False, **kto_options())
    plan = plan_training(settings, prepare(settings, "train"), 1)
    assert plan.rows.desirable is not None
    assert plan.rows.mismatched is not None
    rows = []
    for step in range(STEPS):
        assert len(plan.rows_of(step)) == settings.global_batch_size, "a last batch that is smaller"
        for row in plan.rows_of(step).tolist():
            tokens, mask = plan.rows.documents.document(row)
            other, _ = plan.rows.mismatched.documents.document(row)
            prompt = int(mask.argmax())
            ids = {
                "prompt_ids": tokens[:prompt],
                "completion_ids": tokens[prompt:],
                "KL_completion_ids": other[prompt:],
            }
            label = bool(plan.rows.desirable[row])
            rows.append({**{name: values.tolist() for name, values in ids.items()}, "label": label})
    return rows


def trl_curve(folder: Path, rows: list[dict[str, Any]], **changes: Any) -> plain.Curve:
    """Loss and gradient norm of TRL's trainer, whose micro-batch is the global batch."""
    settings = config("full", False, **kto_options())
    arguments = KTOConfig(
        output_dir=str(folder), max_steps=STEPS, per_device_train_batch_size=settings.global_batch_size,
        learning_rate=settings.learning_rate, lr_scheduler_type="cosine", weight_decay=settings.weight_decay,
        max_grad_norm=settings.max_grad_norm, logging_steps=1, logging_nan_inf_filter=False, save_strategy="no",
        report_to=[], use_cpu=True, bf16=False, gradient_checkpointing=False, max_length=None,
        dataloader_pin_memory=False, train_sampling_strategy="sequential", **WEIGHTS, **changes,
    )  # fmt: skip
    models = [AutoModelForCausalLM.from_pretrained(BASE_DIR, dtype=torch.float32) for _ in range(2)]
    trainer = InOrder(
        models[0], models[1], arguments, train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(BASE_DIR),
    )  # fmt: skip
    trainer.train()
    logged = [row for row in trainer.state.log_history if "grad_norm" in row]
    return plain.Curve([row["loss"] for row in logged], [row["grad_norm"] for row in logged])


def stepped(folder: Path, loss_type: str) -> plain.Curve:
    """Our loss and gradient norm, in this process; a step is one micro-batch, as TRL's is."""
    changes = {**options("full", False, **kto_options()), "loss_type": loss_type, "per_device_train_batch_size": 4}
    for name in ("packing", "global_batch_size"):
        del changes[name]
    with steps(folder, 4, False, **changes) as taken:
        set_reference(taken.context, load_strategy("single"), None)
        results = [taken.take(step) for step in range(STEPS)]
    return plain.Curve([result.loss for result in results], [result.grad_norm for result in results])


@pytest.mark.parametrize("loss_type", mostly_long(["kto", "apo_zero_unpaired"], ["kto"]))
def test_losses_and_gradient_norms_equal_those_of_trl(loss_type: str, tmp_path: Path) -> None:
    rows = trl_rows()
    theirs = trl_curve(tmp_path, rows, loss_type=loss_type)
    assert stepped(tmp_path, loss_type).agrees(theirs)
    if loss_type == "kto":  # control: other answers in place of the mismatched ones are another divergence
        others = [{**row, "KL_completion_ids": row["completion_ids"]} for row in rows]
        assert not trl_curve(tmp_path, others, loss_type=loss_type).agrees(theirs)
