"""Distillation from the recorded predictions of a teacher keeps the promises: `tunesmith record`, then runs on them."""

from __future__ import annotations

import functools
import json
import shutil
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from torch import nn
from transformers import AutoModelForCausalLM

from tests.launching import Finished, launch, launch_well
from tests.parity import plain
from tests.parity.checks import equal_after_resume
from tests.parity.runs import config, curve, mostly_long, options, run
from tests.parity.test_distill import distill, distill_options, divergence, teacher
from tests.parity.test_objectives import plain_curve
from tests.shared import once
from trainers.config.options import TrainConfig
from trainers.data.batches import TrainPlan
from trainers.strategy.strategy import load_strategy

TOP_K, VOCABULARY = 8, 1024
STRATEGIES = ["ddp", "fsdp1", "fsdp2", "hsdp", "zero2", "zero3", "sp", "cp", "tp", "fsdp2_tp"]


def record(folder: Path, top_k: int, **changes: Any) -> dict[str, Any]:
    """What `tunesmith record` prints."""
    settings = {**options("full", True, **distill_options(**changes)), "output_dir": str(folder / "run")}
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    argv = ["--config", str(folder / "config.yaml"), "--top_k", str(top_k), "--folder", str(folder / "recorded")]
    done = subprocess.run(
        [sys.executable, "-m", "app.cli", "record", *argv, "--json"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def recording(top_k: int = TOP_K) -> Path:
    return once(f"distill-recorded-{top_k}", lambda folder: record(folder, top_k) and None) / "recorded"


def recorded_options(folder: Path | None = None, **changes: Any) -> dict[str, Any]:
    own = distill_options(**changes)
    return {**own, "teacher": None, "teacher_log_probs": str(folder or recording())}


def learn(name: str, method: str = "full", packing: bool = True, **changes: Any) -> Finished:
    """A run under a strategy, with as many processes as its file says."""
    return run(load_strategy(name).num_processes, method, packing, name, 0, **recorded_options(**changes))


def plain_classes(settings: TrainConfig, shift: int = 0) -> plain.Curve:
    """In a page: the stock teacher's most likely tokens, and all others as one class.

    Args:
        settings: options of the run.
        shift: control: the teacher's predictions of the token so many places before.
    """
    other = AutoModelForCausalLM.from_pretrained(teacher(), dtype=torch.float32, attn_implementation="eager").eval()

    def classes(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """`[tokens, k + 1]` logarithms of probabilities, wide enough to subtract from 1."""
        probabilities = (logits[:, :VOCABULARY].double() / settings.distill_temperature).softmax(-1)
        chosen = probabilities.gather(1, ids)
        return torch.cat([chosen, 1 - chosen.sum(1, keepdim=True)], 1).log() * settings.distill_temperature

    def mean_loss(plan: TrainPlan, model: nn.Module, initial: nn.Module, members: np.ndarray) -> torch.Tensor:
        total, count = torch.zeros(()), 0
        for member in members:
            tokens, mask = plan.rows.documents.document(int(member))
            ids, trained = torch.from_numpy(tokens.astype(np.int64))[None], torch.from_numpy(np.array(mask))[1:]
            with torch.no_grad():
                expected = other(input_ids=ids).logits[0, :-1][trained].roll(shift, 0)
            best = expected[:, :VOCABULARY].topk(TOP_K, -1).indices
            logits = model(input_ids=ids).logits[0, :-1][trained]
            total = total + divergence(classes(logits, best), classes(expected, best), settings)
            if weight := settings.nll_weight or 0:
                labels = ids[0, 1:][trained]
                total = total + weight * nn.functional.cross_entropy(logits, labels, reduction="sum")
            count += int(trained.sum())
        return total / count

    return plain_curve(settings, mean_loss)


@functools.cache
def wanted(method: str = "full", packing: bool = True, **changes: Any) -> plain.Curve:
    """The curve of the plain page."""

    def train(folder: Path) -> None:
        settings = config(method, packing, **recorded_options(**changes))
        (folder / "curve.json").write_text(json.dumps(asdict(plain_classes(settings))))

    folder = once(f"plain-recorded-{method}-{packing}-{sorted(changes.items())}".replace("/", "_"), train)
    return plain.Curve(**json.loads((folder / "curve.json").read_text()))


@pytest.mark.parametrize("name", mostly_long(["single", *STRATEGIES], ["fsdp2"]))
def test_p2_equals_a_plain_page_of_pytorch(name: str) -> None:
    assert curve(learn(name)).agrees(wanted())


@pytest.mark.long
def test_with_all_tokens_but_one_it_learns_what_a_loaded_teacher_says() -> None:
    every = learn("single", folder=recording(VOCABULARY - 1))
    assert curve(every).agrees(curve(distill("single")))
    assert every.series("eval_kl")[-1] == pytest.approx(distill("single").series("eval_kl")[-1], rel=1e-4)
    assert not wanted().agrees(curve(distill("single")))  # control: a few of them say less


@pytest.mark.long
@pytest.mark.parametrize("loss_type", ["reverse_kl", "jsd"])
def test_p2_of_the_other_losses(loss_type: str) -> None:
    changes = {"loss_type": loss_type, "nll_weight": 0.5, "jsd_beta": 0.3}
    assert curve(learn("single", **changes)).agrees(wanted(**changes))


@pytest.mark.long
@pytest.mark.parametrize("name", ["single", "ddp", "fsdp1", "fsdp2", "zero3"])
def test_p2_with_adapters_and_without_packing(name: str) -> None:
    assert curve(learn(name, "lora", False)).agrees(wanted("lora", False))


@pytest.mark.long
def test_predictions_of_other_tokens_do_not_agree() -> None:
    settings = config("full", True, **recorded_options())
    assert not plain_classes(settings, shift=1).agrees(wanted())


def test_a_resumed_run_ends_as_if_never_interrupted_and_another_recording_is_refused(tmp_path: Path) -> None:
    undisturbed = learn("single")
    moved = shutil.copytree(recording(), tmp_path / "moved")
    resumed = {"resume_from_checkpoint": undisturbed.checkpoints[0]}
    settings = {**options("full", True, **recorded_options(moved)), **resumed}
    again = launch_well(tmp_path / "again", 1, settings, strategy="single")
    assert equal_after_resume(undisturbed, again)
    changed = np.load(moved / "train.log_probs.npy")
    changed[0, :2] = changed[0, :2].mean()
    changed[0] -= np.log(np.exp(changed[0].astype(np.float64)).sum())
    np.save(moved / "train.log_probs.npy", changed)
    refused = launch(tmp_path / "other", 1, settings, strategy="single")
    assert refused.status != 0
    assert "the recorded teacher is" in refused.output
