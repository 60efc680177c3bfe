"""Quantization-aware training against torchao's own: first steps, resumes, and exports that are quantized."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torchao.quantization import quantize_
from torchao.quantization.qat import QATConfig
from transformers import AutoModelForCausalLM

from tests.launching import Finished, launch_well
from tests.parity import plain
from tests.parity.checks import equal_after_resume, reference, same_bits, stock_loss, weights
from tests.parity.runs import HALF, config, curve, options, run
from trainers.config.options import TrainConfig
from trainers.model.qat import quantization_config
from trainers.strategy.strategy import load_strategy

WEIGHTS: dict[str, Any] = {"qat": "int4"}
INPUTS_TOO: dict[str, Any] = {"qat": "8da4w"}
EIGHT_BITS: dict[str, Any] = {"qat": "int8", "qat_group_size": 64}
BAND = 0.02
"""Loss by which strategies may differ after some steps: a weight in another cell of int4 is another model."""


def prepared(settings: TrainConfig) -> nn.Module:
    """The stock model with torchao's rounding in the layers of its decoder."""
    model: Any = plain.build(settings)
    quantize_(model.model, QATConfig(quantization_config(settings), step="prepare"))
    return model


def finished(name: str, changes: dict[str, Any]) -> Finished:
    return run(load_strategy(name).num_processes, "full", True, name, **changes)


@functools.cache
def torchaos(qat: str) -> plain.Curve:
    """The curve of the plain page with the stock model and torchao's own rounding."""
    changes = next(each for each in (WEIGHTS, INPUTS_TOO, EIGHT_BITS) if each["qat"] == qat)
    return plain.train(config("full", True, **changes), build=prepared)


@pytest.mark.parametrize(
    ("name", "changes"),
    [*((name, WEIGHTS) for name in ("single", "ddp", "fsdp1", "fsdp2")),
     *((name, INPUTS_TOO) for name in ("single", "fsdp2")), ("ddp", EIGHT_BITS)],
)  # fmt: skip
def test_it_is_torchaos(name: str, changes: dict[str, Any]) -> None:
    trained_run = finished(name, changes)
    ours, expected = curve(trained_run), torchaos(changes["qat"])
    differences = [abs(a - b) for a, b in zip(ours.losses, expected.losses, strict=True)]
    print("MEASURED", name, changes, differences[0], abs(ours.norms[0] / expected.norms[0] - 1), max(differences))
    assert differences[0] < (plain.LOSS_TOLERANCE if changes["qat"] != "8da4w" else 1e-3)
    assert abs(ours.norms[0] / expected.norms[0] - 1) < (plain.NORM_TOLERANCE if changes["qat"] != "8da4w" else 1e-2)
    assert max(differences) < BAND
    assert f"outside the promise that the strategy never changes the model: qat={changes['qat']}" in trained_run.output
    if name == "single":  # control
        assert abs(ours.losses[0] - reference("full", True).losses[0]) > 1e-3


@pytest.mark.parametrize("name", ["single", "ddp", "fsdp2"])
def test_reruns_and_resumes_are_equal_to_the_bit(name: str, tmp_path: Path) -> None:
    processes = load_strategy(name).num_processes
    undisturbed, again = finished(name, WEIGHTS), run(processes, "full", True, name, 1, **WEIGHTS)
    assert same_bits(undisturbed, again)
    more = {**options("full", True, **WEIGHTS), "resume_from_checkpoint": undisturbed.checkpoints[0]}
    assert undisturbed.checkpoints[0].name.endswith(f"{HALF:08d}")
    resumed = launch_well(tmp_path / "resumed", processes, more, strategy=name)
    assert equal_after_resume(undisturbed, resumed)


def quantized(folder: Path, settings: TrainConfig) -> nn.Module:
    """An export after torchao's quantization, as its users make it."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    quantize_(model.model, quantization_config(settings))
    return model


@pytest.mark.parametrize("changes", [WEIGHTS, INPUTS_TOO, EIGHT_BITS], ids=lambda changes: changes["qat"])
def test_the_export_is_plain_and_quantizes_to_what_was_evaluated(changes: dict[str, Any]) -> None:
    name = "ddp" if changes == EIGHT_BITS else "single"
    trained_run, settings = finished(name, changes), config("full", True, **changes)
    assert set(weights(trained_run)) == set(weights(finished("single", {}))), "and no scale or zero point"
    evaluated = trained_run.series("eval_loss")[-1]
    exported: Any = AutoModelForCausalLM.from_pretrained(trained_run.run.model, attn_implementation="eager").eval()
    tolerance = 1e-3 if changes == INPUTS_TOO else 1e-5
    assert stock_loss(quantized(trained_run.run.model, settings), "full") == pytest.approx(evaluated, abs=tolerance)
    least = 1e-6 if changes == EIGHT_BITS else 1e-4
    assert stock_loss(exported, "full") != pytest.approx(evaluated, abs=least), "control"
    print("MEASURED export", changes, evaluated, stock_loss(exported, "full"))
    folder = trained_run.run.model
    prepared_again: Any = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    quantize_(prepared_again.model, QATConfig(quantization_config(settings), step="prepare"))
    ids = torch.arange(3, 90)[None]
    with torch.no_grad():
        assert torch.equal(prepared_again.eval()(ids).logits, quantized(trained_run.run.model, settings)(ids).logits)


def test_it_loses_less_to_quantization_than_a_plain_run(tmp_path: Path) -> None:
    """The embedded task, once with and once without; both are quantized by the same config."""
    settings: dict[str, Any] = {"max_steps": 60, "save_steps": 60, "eval_steps": 60, "max_train_samples": None}
    costs = {}
    for qat in ("int4", "none"):
        own = {name: value for name, value in options("full", True, **settings, qat=qat).items() if value is not None}
        trained_run = launch_well(tmp_path / qat, 1, own, strategy="single")
        loss = stock_loss(quantized(trained_run.run.model, config("full", True, **WEIGHTS)), "full")
        costs[qat] = loss - trained_run.series("eval_loss")[-1]
        print("MEASURED cost of quantization", qat, costs[qat], "to", loss)
    assert abs(costs["int4"]) < 1e-5 < costs["none"]
