"""Objectives that compare documents keep the promises: against plain PyTorch, over strategies, after a resume."""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.launching import Finished, launch, launch_well
from tests.parity import plain
from tests.parity.checks import equal_after_resume, same_bits
from tests.parity.runs import HALF, config, curve, mostly_long, options, run
from tests.shared import once
from trainers.config.options import TrainConfig
from trainers.data.batches import TrainPlan
from trainers.data.prepare import prepare
from trainers.strategy.strategy import load_strategy
from trainers.tools.preflight import plan_training

PAIRS = {
    "learning_rate": 2e-4,
    "max_train_samples": 61,
    "max_length": 96,
    "global_batch_size": 4,
    "per_device_train_batch_size": 1,
}
STRATEGIES = ["ddp", "fsdp1", "fsdp2", "hsdp", "zero1", "zero2", "zero3", "tp", "sp", "cp", "fsdp2_tp"]
IN_CHECK = ["fsdp2", "sp"]


def log_prob(model: nn.Module, tokens: np.ndarray, mask: np.ndarray) -> torch.Tensor:
    """Summed log-probability of a document's trained tokens, by the stock model."""
    ids, wanted = torch.from_numpy(tokens.astype(np.int64))[None], torch.from_numpy(np.array(mask))[1:]
    logits = model(input_ids=ids).logits[0, :-1]
    return -functional.cross_entropy(logits[wanted], ids[0, 1:][wanted], reduction="sum")


def sigmoid_loss(chosen: torch.Tensor, rejected: torch.Tensor) -> torch.Tensor:
    return -functional.logsigmoid(0.1 * (chosen - rejected))


def plain_curve(
    settings: TrainConfig,
    mean_loss: Callable[[TrainPlan, nn.Module, nn.Module, np.ndarray], torch.Tensor],
    build: Callable[[TrainConfig], nn.Module] = plain.build,
) -> plain.Curve:
    """Training in half a page.

    Args:
        settings: options of the run.
        mean_loss: of the plan, the model, the initial model and the numbers of the documents of a batch.
        build: makes the model.
    """
    plan = plan_training(settings, prepare(settings, "train"), 1)
    model = build(settings)
    initial = copy.deepcopy(model).requires_grad_(False)
    matrices = [weight for weight in model.parameters() if weight.requires_grad and weight.ndim >= 2]
    vectors = [weight for weight in model.parameters() if weight.requires_grad and weight.ndim < 2]
    groups = [{"params": matrices, "weight_decay": settings.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW([group for group in groups if group["params"]], lr=0.0)
    curve = plain.Curve()
    for step in range(plan.total_steps):
        plan.rows, chosen = plan.chosen(step)  # of a stream, those of this batch
        total = mean_loss(plan, model, initial, plan.rows.members_of(chosen))
        total.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), settings.max_grad_norm)
        for group in optimizer.param_groups:
            group["lr"] = plain.rate(settings, step, plan.total_steps)
        optimizer.step()
        optimizer.zero_grad()
        curve.losses.append(total.item())
        curve.norms.append(norm.item())
    return curve


def plain_dpo(
    settings: TrainConfig,
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = sigmoid_loss,
    moves: bool = False,
) -> plain.Curve:
    """DPO in a page: each document alone, the initial model beside the trained one, one mean over the pairs.

    Args:
        settings: options of the run.
        loss: of the log-ratios of the chosen and the rejected document.
        moves: control: the reference is the model as it is at each step.
    """
    references = dict[str, list[torch.Tensor]]()

    def mean_loss(plan: TrainPlan, model: nn.Module, initial: nn.Module, members: np.ndarray) -> torch.Tensor:
        losses = []
        for pair in members.reshape(-1, 2):
            documents = [plan.rows.documents.document(int(member)) for member in pair]
            line = plan.rows.documents.where(int(pair[0]))
            if moves or line not in references:
                with torch.no_grad():
                    before = [log_prob(model if moves else initial, *document) for document in documents]
                references[line] = before
            before = references[line]
            now = [log_prob(model, *document) for document in documents]
            losses.append(loss(now[0] - before[0], now[1] - before[1]))
        return torch.stack(losses).mean()

    return plain_curve(settings, mean_loss)


@functools.cache
def wanted(method: str, packing: bool) -> plain.Curve:
    """The curve of the plain page."""

    def train(folder: Path) -> None:
        trained = plain_dpo(config(method, packing, objective="dpo", **PAIRS))
        (folder / "curve.json").write_text(json.dumps(asdict(trained)))

    folder = once(f"plain-dpo-{method}-{packing}", train)
    return plain.Curve(**json.loads((folder / "curve.json").read_text()))


def dpo(name: str, method: str = "full", packing: bool = True, processes: int | None = None) -> Finished:
    """A run under a strategy, with as many processes as its file says."""
    count = processes or load_strategy(name).num_processes
    return run(count, method, packing, name, objective="dpo", **PAIRS)


@pytest.mark.parametrize("name", mostly_long(["single", *STRATEGIES], ["single", *IN_CHECK], ["single"]))
def test_p2_equals_a_plain_page_of_pytorch(name: str) -> None:
    finished = dpo(name)
    assert curve(finished).agrees(wanted("full", True))
    assert finished.series("reward_margin")[0] == pytest.approx(0, abs=1e-4)  # it starts as the initial model
    assert finished.series("eval_reward_margin")[-1] > 0.01


@pytest.mark.parametrize("name", mostly_long(["single", "ddp", "fsdp2", "zero3"], []))
def test_p2_with_adapters_and_without_packing(name: str) -> None:
    """The base under the adapters is the reference; each document has a row to itself."""
    assert curve(dpo(name, "lora", False)).agrees(wanted("lora", False))


@pytest.mark.parametrize("control", ["a reference that moves", "the margin the other way round"])
def test_what_is_wrong_does_not_agree(control: str) -> None:
    settings = config("full", True, objective="dpo", **PAIRS)
    wrong = (
        plain_dpo(settings, moves=True)
        if control == "a reference that moves"
        else plain_dpo(settings, lambda chosen, rejected: sigmoid_loss(rejected, chosen))
    )
    assert not wrong.agrees(wanted("full", True))


def test_evaluation_is_the_same_on_any_number_of_ranks() -> None:
    """37 pairs in batches of 4 on one and two ranks: none is lost or counted twice."""
    for key in ("eval_loss", "eval_reward_accuracy", "eval_reward_margin"):
        single, sharded = (dpo(name).series(key)[-1] for name in ("single", "fsdp2"))
        assert single == pytest.approx(sharded, abs=1e-5)


def test_a_resumed_run_keeps_the_initial_model_as_its_reference(tmp_path: Path) -> None:
    """Bit for bit, in a new folder: the reference is in the checkpoint. Elsewhere, within the tolerance of P2."""
    undisturbed = dpo("single")
    settings = options("full", True, objective="dpo", **PAIRS)
    again = {**settings, "resume_from_checkpoint": undisturbed.checkpoints[0]}
    assert equal_after_resume(undisturbed, launch_well(tmp_path / "again", 1, again, strategy="single"))
    moved = launch_well(tmp_path / "moved", 2, again, strategy="fsdp2")
    losses = zip(moved.series("loss"), wanted("full", True).losses[HALF:], strict=True)
    assert max(abs(one - other) for one, other in losses) <= plain.LOSS_TOLERANCE


def test_other_evaluation_data_on_resume_is_refused(tmp_path: Path) -> None:
    """The trained model cannot say what the initial one made of it."""
    settings = options("full", True, objective="dpo", **PAIRS)
    other = {"resume_from_checkpoint": dpo("single").checkpoints[0], "max_eval_samples": 20}
    refused = launch(tmp_path / "other", 1, {**settings, **other}, strategy="single")
    assert refused.status != 0
    assert "eval_dataset_name must be what the run started with" in str(refused.state["cause"])


@pytest.mark.parametrize("objective", ["simpo", "cpo", "orpo"])
@pytest.mark.long
def test_objectives_without_a_reference_agree_over_strategies(objective: str) -> None:
    single, *others = (run(count, "full", True, name, objective=objective, **PAIRS)
                    for count, name in ((1, "single"), (2, "fsdp2"), (2, "tp"), (2, "cp")))  # fmt: skip
    assert all(curve(other).agrees(curve(single)) for other in others)


@pytest.mark.long
def test_p0_rerun_is_the_same_bit_for_bit() -> None:
    settings = {"objective": "dpo", **PAIRS}
    assert same_bits(run(2, "full", True, "ddp", **settings), run(2, "full", True, "ddp", again=1, **settings))
