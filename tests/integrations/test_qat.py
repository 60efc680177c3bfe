"""Quantization-aware training against torchao's own: curves, resumes, exports that are quantized, and what it gains."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torchao.quantization import quantize_
from torchao.quantization.qat import QATConfig
from transformers import AutoModelForCausalLM

from tests.launching import Finished
from tests.parity import plain
from tests.parity.checks import equal_after_resume, same_bits, stock_loss
from tests.parity.runs import HALF, config, curve, options, run
from tests.launching import launch_well
from trainers.config.options import TrainConfig
from trainers.model.qat import quantization_config, rounded_layers
from trainers.strategy.strategy import load_strategy

WEIGHTS: dict[str, Any] = {"qat": "int4"}
INPUTS_TOO: dict[str, Any] = {"qat": "8da4w"}
EIGHT_BITS: dict[str, Any] = {"qat": "int8", "qat_group_size": 64}


def prepared(settings: TrainConfig) -> nn.Module:
    """The stock model with torchao's rounding in the layers of its decoder."""
    model: Any = plain.build(settings)
    quantize_(model.model, QATConfig(quantization_config(settings), step="prepare"))
    return model


def finished(name: str, changes: dict[str, Any]) -> Finished:
    return run(load_strategy(name).num_processes, "full", True, name, **changes)


@pytest.mark.parametrize("name", ["single", "ddp", "fsdp1", "fsdp2", "hsdp", "cp", "sp"])
@pytest.mark.parametrize("changes", [WEIGHTS, INPUTS_TOO, EIGHT_BITS], ids=lambda changes: changes["qat"])
def test_it_is_torchaos(name: str, changes: dict[str, Any]) -> None:
    settings = config("full", True, **changes)
    a, b = curve(finished(name, changes)), plain.train(settings, build=prepared)
    losses = max(abs(x - y) for x, y in zip(a.losses, b.losses, strict=True))
    norms = max(abs(x - y) / y for x, y in zip(a.norms, b.norms, strict=True))
    print("MEASURED", name, changes, losses, norms)
