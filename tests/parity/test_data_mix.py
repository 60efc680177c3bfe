"""Training on a mix of sources: the same model under every strategy, and losses that are told apart by source."""

from __future__ import annotations

import functools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from tests.launching import Finished, launch, launch_well
from tests.parity import plain
from tests.parity.checks import equal_after_resume
from tests.parity.runs import config, curve, mostly_long, options, run
from tests.shared import once
from trainers.config.mix import read_mix
from trainers.data.batches import TrainPlan
from trainers.data.prepare import prepare
from trainers.tools.preflight import make_rows, plan_training

NAMES = ("chat", "numbers", "all")


def mix(weights: tuple[float, ...] = (2.5, 1.0, 0.5)) -> str:
    """A mix of replies, of plain text, and of chats of which every token is trained."""

    def write(folder: Path) -> None:
        texts = [{"text": f"number {number} is {number * 7 % 10} " * (1 + number % 5)} for number in range(90)]
        (folder / "numbers.jsonl").write_text("\n".join(map(json.dumps, texts)))
        sources: list[dict[str, Any]] = [
            {"dataset_name": "embedded", "name": "chat", "limit": 100},
            {"dataset_name": "numbers.jsonl"},
            {"dataset_name": "embedded", "name": "all", "limit": 40, "loss": "all"},
        ]  # fmt: skip
        for source, weight in zip(sources, weights, strict=True):
            source["weight"] = weight
        document = {"sources": sources, "stopping_strategy": "all_exhausted"}
        (folder / "mix.yaml").write_text(yaml.safe_dump(document))

    return str(once("mix-" + "-".join(map(str, weights)), write) / "mix.yaml")


def mixed(**changes: Any) -> dict[str, Any]:
    """Changes of the options of a parity run that train on a mix."""
    own = {
        "mix": mix(),
        "dataset_name": "none",
        "eval_dataset_name": "none",
        "eval_share": 0.1,
        "max_eval_samples": None,
    }
    return {**own, "max_train_samples": None, "eval_on_start": True, **changes}


def trained(name: str, method: str = "full", packing: bool = True, **changes: Any) -> Finished:
    return run(1 if name == "single" else 2, method, packing, name, **mixed(**changes))


@functools.cache
def plainly(method: str, packing: bool, file: str) -> plain.Curve:
    return plain.train(config(method, packing, **mixed(mix=file)))


@pytest.mark.parametrize(
    ("name", "method", "packing"),
    mostly_long(
        [(name, "full", True) for name in ("single", "ddp", "fsdp1", "fsdp2", "zero2", "zero3", "tp", "sp", "cp", "pp")]
        + [("single", "lora", False), ("ddp", "lora", True), ("fsdp2", "lora", False)],
        [("ddp", "full", True)],
    ),
)
def test_a_mix_trains_the_same_model_under_every_strategy(name: str, method: str, packing: bool) -> None:
    finished = curve(trained(name, method, packing))
    assert finished.agrees(plainly(method, packing, mix()))
    if (name, method) == ("ddp", "full"):
        assert not finished.agrees(plainly(method, packing, mix((1.0, 1.0, 0.5)))), "control: other weights"


def mean_losses(plan: TrainPlan, rows: np.ndarray) -> dict[str, float]:
    """Mean loss of the base model on the trained tokens of each source in some rows."""
    model = plain.build(plan.config)
    sources = np.searchsorted(plan.rows.bounds, rows, side="right") - 1
    with torch.no_grad():
        return {
            name: plain.document_losses(model, plan.rows, of_source).item() / int(plan.rows.trained[of_source].sum())
            for source, name in enumerate(NAMES)
            if len(of_source := rows[sources == source])
        }


@pytest.mark.parametrize("name", mostly_long(["single", "ddp", "fsdp2", "zero3", "tp", "sp", "cp", "pp"], ["ddp"]))
def test_losses_are_told_apart_by_source(name: str) -> None:
    settings, finished = config("full", True, **mixed()), trained(name)
    plan = plan_training(settings, prepare(settings, "train"), 1)
    first = finished.rows("loss")[0]
    expected = mean_losses(plan, plan.rows_of(0))
    assert len(expected) == 3
    for source, loss in expected.items():
        assert math.isclose(first[f"loss/{source}"], loss, rel_tol=1e-5)
    assert len({round(loss, 3) for loss in expected.values()}) == 3, "control: they differ"
    evaluation = make_rows(settings, prepare(settings, "eval"), split="eval")
    plan.rows = evaluation
    at_start = next(row for row in finished.rows("eval_loss") if row["step"] == 0)
    for source, loss in mean_losses(plan, np.arange(len(evaluation))).items():
        assert math.isclose(at_start[f"eval_loss/{source}"], loss, rel_tol=1e-5)
    last = finished.rows("loss")[-1]
    copied = read_mix(str(finished.run.mix))
    assert copied == read_mix(mix())
    assert sum(last[f"tokens/{source}"] for source in NAMES) == last["tokens"]
    rows = last["step"] * settings.global_batch_size
    for source, share in zip(NAMES, (0.625, 0.25, 0.125), strict=True):
        assert abs(last[f"share/{source}"] - share) * rows < 1


@pytest.mark.parametrize(("name", "processes"), mostly_long([("ddp", 2), ("single", 1), ("fsdp2", 2)], [("ddp", 2)]))
def test_a_resume_goes_on_with_the_same_rows(name: str, processes: int, tmp_path: Path) -> None:
    undisturbed = trained("ddp")
    checkpoint = undisturbed.checkpoints[0]
    again = options("full", True, **mixed(), resume_from_checkpoint=str(checkpoint))
    resumed = launch_well(tmp_path / "run", processes, again, strategy=name)
    if name == "ddp":
        assert equal_after_resume(undisturbed, resumed)
    before = {row["step"]: row for row in undisturbed.rows("loss")}
    for row in resumed.rows("loss"):
        for source in NAMES:
            assert row[f"tokens/{source}"] == before[row["step"]][f"tokens/{source}"]
            assert abs(row[f"loss/{source}"] - before[row["step"]][f"loss/{source}"]) < 1e-5
    changed = {**again, "mix": mix((1.0, 1.0, 0.5))}
    refused = launch(tmp_path / "changed", processes, changed, strategy=name)
    assert refused.status != 0
    assert "the data, its tokenizer or its options changed" in refused.output
