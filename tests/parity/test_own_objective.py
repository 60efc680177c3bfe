"""An objective in a file of one's own, with a column and a metric of its own, trains the same model everywhere.

Each pair has a weight. Were the weights of other pairs taken on some rank, or those of a packed row in another order,
the losses would differ, as the control with shuffled weights shows.
"""

from __future__ import annotations

import functools
import json
import random
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.launching import Finished, launch, launch_well
from tests.parity import plain
from tests.parity.checks import equal_after_resume
from tests.parity.runs import config, curve, mostly_long, options, run
from tests.parity.test_objectives import PAIRS, log_prob, plain_curve, sigmoid_loss
from tests.shared import once
from trainers.config.objectives import is_free_metric
from trainers.data.batches import TrainPlan
from trainers.embedded import PREFERENCES_DIR
from trainers.strategy.strategy import load_strategy

SOURCE = """
import torch
from trainers.objectives.pairs import PairLoss


class Weighted(PairLoss):
    spec = {"like": "dpo", "columns": ["weight"], "metrics": ["gap"]}

    def losses(self, pairs):
        chosen, rejected = self.rewards(pairs)
        return -pairs.columns["weight"] * torch.nn.functional.logsigmoid(chosen - rejected)

    def rewards(self, pairs):
        chosen, rejected = pairs.chosen - pairs.chosen_reference, pairs.rejected - pairs.rejected_reference
        return self.beta * chosen, self.beta * rejected

    def metrics(self, pairs):
        return [pairs.columns["weight"] * (pairs.chosen - pairs.rejected)]


class Judged:
    spec = {"like": "kto", "columns": ["weight"], "metrics": ["mean_weight"]}

    def __init__(self, **options):
        self.beta = options["beta"]

    def __call__(self, log_probs, documents):
        ratios = log_probs - documents.reference
        if documents.desirable is None:  # a mismatched document, which has no column
            return ratios.sum(), ratios.new_zeros(0)
        weights, distances = documents.columns["weight"], self.beta * (ratios - documents.kl)
        signed = torch.where(documents.desirable, distances, -distances)
        loss = (weights * torch.sigmoid(-signed)).sum()
        with torch.no_grad():
            values = [(signed > 0).float(), signed, distances, ratios, documents.kl.expand_as(ratios), weights]
            return loss, torch.stack([value.sum() for value in values])


class Short(Weighted):
    spec = {"like": "dpo", "columns": ["weight"], "metrics": ["gap", "spread"]}
"""


def write_data(folder: Path) -> None:
    """The file of the objectives, and pairs with weights; in `shuffled.jsonl`, with those of other pairs."""
    (folder / "own.py").write_text(SOURCE, encoding="utf-8")
    lines = (PREFERENCES_DIR / "train.jsonl").read_text(encoding="utf-8").splitlines()[:80]
    rng = random.Random(1)
    weights = [round(rng.uniform(0, 3), 2) for _ in lines]
    for name in ("rows", "shuffled"):
        rows = [{**json.loads(line), "importance": weight} for line, weight in zip(lines, weights, strict=True)]
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
        rng.shuffle(weights)


def own_options(kind: str = "Weighted", rows: str = "rows") -> dict[str, Any]:
    """What these runs change in those of the other parity tests."""
    folder = once("own-objective", write_data)
    data = str(folder / f"{rows}.jsonl")
    own = {"objective": f"{folder}/own.py:{kind}", "columns": "weight=importance"}
    return {**PAIRS, **own, "dataset_name": data, "eval_dataset_name": data}


def own(name: str, method: str = "full", packing: bool = True, kind: str = "Weighted", rows: str = "rows") -> Finished:
    """A run under a strategy, with as many processes as its file says."""
    return run(load_strategy(name).num_processes, method, packing, name, **own_options(kind, rows))


def plain_weighted() -> plain.Curve:
    """The same in a page: each document alone, the weights straight from the data."""
    settings = config("full", True, **{**own_options(), "columns": {"weight": "importance"}})
    rows = [json.loads(line) for line in Path(settings.dataset_name).read_text(encoding="utf-8").splitlines()]

    def mean_loss(plan: TrainPlan, model: nn.Module, initial: nn.Module, members: np.ndarray) -> torch.Tensor:
        losses = []
        for pair in members.reshape(-1, 2).tolist():
            documents = [plan.rows.documents.document(member) for member in pair]
            with torch.no_grad():
                before = [log_prob(initial, *document) for document in documents]
            chosen, rejected = (
                log_prob(model, *document) - old for document, old in zip(documents, before, strict=True)
            )
            line = int(plan.rows.documents.where(pair[0]).rpartition(":")[2])
            losses.append(rows[line - 1]["importance"] * sigmoid_loss(chosen, rejected))
        return torch.stack(losses).mean()

    return plain_curve(settings, mean_loss)


@functools.cache
def wanted() -> plain.Curve:
    """The curve of the plain page."""

    def train(folder: Path) -> None:
        (folder / "curve.json").write_text(json.dumps(asdict(plain_weighted())))

    return plain.Curve(**json.loads((once("plain-own-objective", train) / "curve.json").read_text()))


STRATEGIES = ["single", "ddp", "fsdp1", "fsdp2", "zero3", "tp", "sp", "cp"]


@pytest.mark.parametrize("name", mostly_long(STRATEGIES, ["single", "fsdp2"], ["single"]))
def test_p2_equals_a_plain_page_of_pytorch(name: str) -> None:
    finished = own(name)
    assert curve(finished).agrees(wanted())
    assert finished.series("eval_gap") == pytest.approx(own("single").series("eval_gap"), abs=1e-3)
    assert len(finished.series("gap")) == len(wanted().losses)


@pytest.mark.parametrize("name", mostly_long(["single", "fsdp2"], ["single"]))
def test_the_weights_of_other_pairs_do_not_agree(name: str) -> None:
    shuffled = own(name, rows="shuffled")
    assert not curve(shuffled).agrees(wanted())
    assert shuffled.series("eval_gap") != pytest.approx(own(name).series("eval_gap"), abs=1e-3)


@pytest.mark.parametrize("name", mostly_long(["ddp", "fsdp2", "sp"], []))
def test_p2_with_adapters_and_without_packing(name: str) -> None:
    single, other = own("single", "lora", False), own(name, "lora", False)
    assert curve(other).agrees(curve(single))
    assert other.series("gap") == pytest.approx(single.series("gap"), abs=1e-2)


@pytest.mark.parametrize("name", mostly_long(["ddp", "fsdp2", "sp"], []))
def test_p2_of_single_answers_with_mismatched_ones(name: str) -> None:
    single, other = own("single", kind="Judged"), own(name, kind="Judged")
    assert curve(other).agrees(curve(single))
    assert other.series("mean_weight") == pytest.approx(single.series("mean_weight"), abs=1e-5)
    assert not curve(own("single", kind="Judged", rows="shuffled")).agrees(curve(single))  # control


def test_a_resumed_run_is_the_same_bit_for_bit(tmp_path: Path) -> None:
    undisturbed = own("single")
    again = {**options("full", True, **own_options()), "resume_from_checkpoint": undisturbed.checkpoints[0]}
    assert equal_after_resume(undisturbed, launch_well(tmp_path / "again", 1, again, strategy="single"))


def test_no_value_of_a_row_of_metrics_has_a_name_that_is_free() -> None:
    keys = {key.removeprefix("eval_") for line in own("single").run.metrics.open() for key in json.loads(line)}
    assert {key for key in keys if is_free_metric(key)} == {"gap"}


def test_fewer_metrics_than_names_end_the_run_at_its_first_step(tmp_path: Path) -> None:
    short = launch(tmp_path / "short", 2, options("full", True, **own_options("Short")), strategy="fsdp2")
    assert short.status != 0
    assert "objective=Short returns 5 metrics, and its spec has 6: " in str(short.state["cause"])
    assert not short.run.metrics.exists() or not short.rows()
