"""The moving average of the weights: torch's own over the weights of every step, also after a move, and its export."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AutoPeftModelForCausalLM
from safetensors.torch import load_file
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from transformers import AutoModelForCausalLM

from app.launch.actions import ExportRequest, export
from tests.launching import Finished, launch_well
from tests.parity.runs import mostly_long, options, run
from trainers.checkpoint.weights import saved_tensors
from trainers.config.mistakes import ConfigError
from trainers.strategy.strategy import load_strategy

DECAY = 0.7
EMA: dict[str, Any] = {"ema_decay": DECAY, "max_steps": 6, "save_steps": 1, "save_total_limit": 9}
STRATEGIES = ["single", "ddp", "fsdp1", "fsdp2", "hsdp", "zero1", "zero2", "zero3", "tp", "sp", "cp", "pp", "3d"]


def finished(name: str, method: str, **changes: Any) -> Finished:
    return run(load_strategy(name).num_processes, method, True, name, **EMA, **changes)


def tensors(checkpoint: Path) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Trained weights and their averages in a checkpoint."""
    found: dict[str, torch.Tensor] = {}
    for file in checkpoint.glob("*.safetensors"):
        found |= load_file(file)
    averages = {
        name.removeprefix("optim.state.").removesuffix(".ema"): tensor
        for name, tensor in found.items()
        if name.endswith(".ema")
    }
    return {name: found[f"model.{name}"].float() for name in averages}, averages


def of_torch(checkpoints: list[Path], start: dict[str, torch.Tensor] | None = None) -> dict[str, torch.Tensor]:
    """What torch's own average makes of the weights of consecutive steps.

    Args:
        checkpoints: of every step.
        start: the average before them; None for that of a new run.
    """
    names = [name.replace(".", "/") for name in tensors(checkpoints[0])[0]]
    model = nn.Module()
    model.weights = nn.ParameterDict({name: nn.Parameter(torch.zeros(())) for name in names})

    def take(values: dict[str, torch.Tensor]) -> None:
        for name in names:
            model.weights[name].data = values[name.replace("/", ".")].clone()

    take(start or tensors(checkpoints[0])[0])
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    if start:
        average.n_averaged.fill_(1)
    for checkpoint in checkpoints:
        take(tensors(checkpoint)[0])
        average.update_parameters(model)
    return {name.replace("/", "."): average.module.weights[name].detach() for name in names}


def distance(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    assert ours.keys() == theirs.keys()
    return max(float((ours[name] - theirs[name]).abs().max()) for name in ours)


@pytest.mark.parametrize(
    ("name", "method", "more"),
    mostly_long(
        [
            *((name, "full", ()) for name in STRATEGIES),
            *((name, "lora", ()) for name in ("ddp", "fsdp1", "zero2", "zero3", "tp", "pp")),
            *(("fsdp2", "full", (("optim", optim),)) for optim in ("lion", "muon", "adafactor", "adamw_8bit")),
            ("zero3", "full", (("optim", "adafactor"),)),
            ("fsdp2", "full", (("master_weights", False), ("mixed_precision", "bf16"))),
        ],
        [("fsdp2", "full", ())],
    ),
)
def test_it_is_torchs_own_over_every_step(name: str, method: str, more: tuple[tuple[str, Any], ...]) -> None:
    trained = finished(name, method, **dict(more))
    weights, averages = tensors(trained.checkpoints[-1])
    assert len(averages) > 10
    assert distance(averages, of_torch(trained.checkpoints)) <= 1e-6
    assert distance(averages, of_torch(trained.checkpoints[1:])) > 1e-6  # control: a step that is missing
    assert distance(averages, weights) > 1e-5  # control: the weights themselves
    assert f"ema_decay={DECAY}: `tunesmith export RUN --ema` exports the moving average" in trained.output


@pytest.mark.parametrize(
    ("before", "after"),
    mostly_long(
        [
            ("fsdp2", "fsdp2"), ("zero1", "zero1"), ("zero3", "zero3"), ("pp", "pp"), ("fsdp2", "single"),
            ("single", "hsdp"), ("fsdp1", "zero2"), ("zero2", "tp"), ("pp", "zero3"), ("tp", "fsdp1"),
        ],
        [("fsdp2", "single")],
    ),
)  # fmt: skip
def test_it_goes_on_after_a_resume(before: str, after: str, tmp_path: Path) -> None:
    undisturbed = finished(before, "full")
    middle, processes = undisturbed.checkpoints[2], load_strategy(after).num_processes
    more = {**EMA, "resume_from_checkpoint": middle}
    again = launch_well(tmp_path / "again", processes, options("full", True) | more, strategy=after)
    averages = tensors(again.checkpoints[-1])[1]
    assert [row["step"] for row in again.rows("loss")] == [4, 5, 6]
    assert distance(averages, of_torch(again.checkpoints, tensors(middle)[1])) <= 1e-6
    assert distance(averages, of_torch(again.checkpoints)) > 1e-5  # control: begun anew
    if before == after:
        expected = tensors(undisturbed.checkpoints[-1])[1]
        assert all(torch.equal(averages[name], expected[name]) for name in expected)


@pytest.mark.parametrize("method", mostly_long(["full", "lora"], ["lora"]))
def test_stock_libraries_load_its_export(method: str, tmp_path: Path) -> None:
    trained = finished("fsdp2" if method == "full" else "zero2", method)
    folder = export(trained.run, ExportRequest(output=tmp_path / "averaged", averaged=True)).folder
    assert f"ema_decay={DECAY}" in (folder / "README.md").read_text()
    loader: Any = AutoModelForCausalLM if method == "full" else AutoPeftModelForCausalLM
    model = loader.from_pretrained(folder)
    loaded = saved_tensors(model) if method == "full" else dict(model.named_parameters())
    weights, averages = tensors(trained.checkpoints[-1])
    assert all(torch.equal(loaded[name], tensor) for name, tensor in averages.items())
    assert not all(torch.equal(loaded[name], tensor) for name, tensor in weights.items())  # control


def test_a_run_without_one_refuses_to_export_it(tmp_path: Path) -> None:
    trained = run(1, "lora", True, "single", max_steps=1)
    with pytest.raises(ConfigError, match=r"keeps no moving average of its weights; train with ema_decay=0\.999"):
        export(trained.run, ExportRequest(output=tmp_path / "averaged", averaged=True))
    assert not (tmp_path / "averaged").exists()
