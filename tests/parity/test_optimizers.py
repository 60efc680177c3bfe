"""Optimizers besides AdamW: the curves of their own libraries under every strategy, and the same after a resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lion_pytorch
import pytest
import torch
from torch import nn

from tests.launching import Finished, launch_well
from tests.parity import plain
from tests.parity.checks import equal_after_resume
from tests.parity.runs import config, curve, mostly_long, options, run
from trainers.strategy.strategy import load_strategy

LION: dict[str, Any] = {"optim": "lion", "learning_rate": 5e-5}
STRATEGIES = ["single", "ddp", "fsdp1", "fsdp2", "hsdp", "zero1", "zero2", "zero3", "tp", "sp", "cp", "pp", "3d"]


def of_library(model: nn.Module, settings: Any) -> torch.optim.Optimizer:
    """Lion of lion-pytorch that decays matrices alone."""
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    groups = [
        {"params": [weight for weight in trained if (weight.ndim >= 2) is decays], "weight_decay": decay}
        for decays, decay in ((True, settings.weight_decay), (False, 0.0))
    ]
    betas = settings.lion_beta1, settings.lion_beta2
    return lion_pytorch.Lion([group for group in groups if group["params"]], lr=1.0, betas=betas)


def finished(name: str, method: str, changes: dict[str, Any]) -> Finished:
    return run(load_strategy(name).num_processes, method, True, name, **changes)


@pytest.mark.parametrize(
    ("name", "method"),
    mostly_long(
        [*((name, "full") for name in STRATEGIES), *((name, "lora") for name in ("ddp", "fsdp1", "zero3"))],
        [("fsdp2", "full")],
    ),
)
def test_lion_is_that_of_its_library(name: str, method: str) -> None:
    found = finished(name, method, LION)
    settings = config(method, True, **LION)
    assert curve(found).agrees(plain.train(settings, adamw=of_library))
    assert "optim=lion: lion_beta1=0.9, lion_beta2=0.99" in found.output
    assert "outside the promise" not in found.output
    if name == "fsdp2":  # controls
        assert not curve(found).agrees(plain.train(settings))
        other = config(method, True, **LION, lion_beta2=0.999)
        assert not curve(found).agrees(plain.train(other, adamw=of_library))


@pytest.mark.parametrize("name", mostly_long(["single", "fsdp1", "fsdp2", "zero1", "zero3", "tp", "pp"], ["fsdp2"]))
def test_a_resume_goes_on_bit_for_bit(name: str, tmp_path: Path) -> None:
    undisturbed = finished(name, "full", LION)
    more = {"resume_from_checkpoint": undisturbed.checkpoints[0]}
    processes = load_strategy(name).num_processes
    again = launch_well(tmp_path / "again", processes, options("full", True) | LION | more, strategy=name)
    assert equal_after_resume(undisturbed, again)
