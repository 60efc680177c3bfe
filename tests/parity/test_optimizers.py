"""Optimizers besides AdamW: the curves of their own libraries under every strategy, and the same after a resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lion_pytorch
import pytest
import schedulefree
import torch
from peft import AutoPeftModelForCausalLM
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.optimization import Adafactor

from tests.launching import Finished, launch_well
from tests.parity import plain
from tests.parity.checks import equal_after_resume, reference, same_bits, stock_loss
from tests.parity.runs import HALF, STEPS, config, curve, mostly_long, options, run
from trainers.strategy.strategy import load_strategy

LION: dict[str, Any] = {"optim": "lion", "learning_rate": 5e-5}
MUON: dict[str, Any] = {"optim": "muon"}
ADAFACTOR: dict[str, Any] = {"optim": "adafactor"}
SCHEDULE_FREE: dict[str, Any] = {
    "optim": "schedule_free_adamw", "lr_scheduler_type": "constant", "warmup_steps": 5, "learning_rate": 2e-3,
    "eval_steps": 3,
}  # fmt: skip
ELEMENTWISE = ["single", "ddp", "fsdp2", "hsdp", "tp", "sp", "cp", "pp", "3d", "pp_fsdp2", "fsdp2_tp"]
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
    trained_run = finished(name, method, LION)
    settings = config(method, True, **LION)
    assert curve(trained_run).agrees(plain.train(settings, adamw=of_library))
    assert "optim=lion: lion_beta1=0.9, lion_beta2=0.99" in trained_run.output
    assert "outside the promise" not in trained_run.output
    if name == "fsdp2":  # controls
        assert not curve(trained_run).agrees(plain.train(settings))
        other = config(method, True, **LION, lion_beta2=0.999)
        assert not curve(trained_run).agrees(plain.train(other, adamw=of_library))


class TorchMuon:
    """torch's Muon for the matrices of the layers and torch's AdamW for all else, as one optimizer.

    Args:
        half: iterate in bf16, as torch does; otherwise in fp32.
    """

    def __init__(self, model: nn.Module, settings: Any, half: bool = False):
        hidden, others = list[nn.Parameter](), list[nn.Parameter]()
        for name, weight in model.named_parameters():
            if weight.requires_grad:
                (hidden if ".layers." in name and weight.ndim == 2 else others).append(weight)
        decay = settings.weight_decay
        scale, momentum = "match_rms_adamw", settings.muon_momentum
        self.parts: list[torch.optim.Optimizer] = [
            torch.optim.Muon(hidden, lr=1.0, weight_decay=decay, momentum=momentum, adjust_lr_fn=scale)
        ]
        if others:
            groups = [{"params": [weight], "weight_decay": decay * (weight.ndim >= 2)} for weight in others]
            self.parts.append(torch.optim.AdamW(groups, lr=1.0))
        self.half, self.param_groups = half, [group for part in self.parts for group in part.param_groups]

    def step(self) -> None:
        with pytest.MonkeyPatch.context() as patch:
            if not self.half:
                patch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)
            for part in self.parts:
                part.step()

    def zero_grad(self) -> None:
        for part in self.parts:
            part.zero_grad()


@pytest.mark.parametrize(
    ("name", "method"),
    mostly_long(
        [*((name, "full") for name in STRATEGIES), *((name, "lora") for name in ("ddp", "fsdp1", "zero3", "tp"))],
        [("fsdp2", "full")],
    ),
)
def test_muon_is_torchs_in_fp32(name: str, method: str) -> None:
    trained_run = finished(name, method, MUON)
    settings = config(method, True, **MUON)
    assert curve(trained_run).agrees(plain.train(settings, adamw=torch_muon()))
    assert "muon_momentum=0.95, adam_beta1=0.9, adam_beta2=0.999, adam_epsilon=1e-08; Muon for" in trained_run.output
    assert "outside the promise" not in trained_run.output
    if name == "fsdp2":  # controls: another optimizer, and torch's own precision
        assert not curve(trained_run).agrees(plain.train(settings))
        assert not curve(trained_run).agrees(plain.train(settings, adamw=torch_muon(half=True)))


def torch_muon(half: bool = False) -> Any:
    return lambda model, settings: TorchMuon(model, settings, half)


def of_transformers(model: nn.Module, settings: Any) -> torch.optim.Optimizer:
    """Adafactor of transformers with an external learning rate, which decays matrices alone."""
    groups = [
        {"params": [weight], "weight_decay": settings.weight_decay * (weight.ndim >= 2)}
        for weight in model.parameters()
        if weight.requires_grad
    ]
    return Adafactor(groups, lr=1.0, scale_parameter=False, relative_step=False)


@pytest.mark.parametrize(
    ("name", "method"),
    mostly_long(
        [
            *((name, "full") for name in (*STRATEGIES, "zero2_tp", "pp_fsdp2", "hsdp_tp")),
            *((name, "lora") for name in ("single", "ddp", "fsdp1", "fsdp2", "zero2", "zero3", "tp", "pp")),
        ],
        [("fsdp2", "full")],
    ),
)
def test_adafactor_is_that_of_transformers(name: str, method: str) -> None:
    trained_run = finished(name, method, ADAFACTOR)
    settings = config(method, True, **ADAFACTOR)
    assert curve(trained_run).agrees(plain.train(settings, adamw=of_transformers))
    assert "optim=adafactor: second moments by rows and columns" in trained_run.output
    assert "outside the promise" not in trained_run.output
    if method == "full":  # control
        assert not curve(trained_run).agrees(reference("full", True))


def rising(settings: Any, step: int, total: int) -> float:
    """A constant learning rate after a warm-up."""
    return float(settings.learning_rate * min(1.0, (step + 1) / max(settings.warmup_steps, 1)))


@pytest.mark.parametrize(
    ("name", "method"),
    mostly_long(
        [*((name, "full") for name in ELEMENTWISE), *((name, "lora") for name in ("single", "fsdp2", "pp"))],
        [("fsdp2", "full")],
    ),
)
def test_schedule_free_adamw_is_that_of_its_library(name: str, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The curve, and the losses of evaluations and of the export, which are those of the averaged point."""
    trained_run, kept = finished(name, method, SCHEDULE_FREE), dict[str, Any]()
    settings = config(method, True, **SCHEDULE_FREE)

    def of_schedulefree(model: nn.Module, settings: Any) -> torch.optim.Optimizer:
        trained = [weight for weight in model.parameters() if weight.requires_grad]
        groups = [
            {"params": [weight], "weight_decay": settings.weight_decay * (weight.ndim >= 2)} for weight in trained
        ]
        optimizer = schedulefree.AdamWScheduleFree(groups, lr=1.0)
        optimizer.train()
        kept.update(model=model, optimizer=optimizer)
        return optimizer

    monkeypatch.setattr(plain, "rate", rising)
    assert curve(trained_run).agrees(plain.train(settings, adamw=of_schedulefree))
    evaluated = trained_run.series("eval_loss")
    assert len(evaluated) == STEPS // 3 + 1
    assert abs(stock_loss(kept["model"], method, True) - evaluated[-1]) > 1e-4  # control: the point of the gradients
    kept["optimizer"].eval()
    assert stock_loss(kept["model"], method, True) == pytest.approx(evaluated[-1], abs=1e-5)
    loader: Any = AutoModelForCausalLM if method == "full" else AutoPeftModelForCausalLM
    assert stock_loss(loader.from_pretrained(trained_run.run.model), method, True) == pytest.approx(
        evaluated[-1], abs=1e-5
    )
    if method == "full":  # control
        assert not curve(trained_run).agrees(reference("full", True))


@pytest.mark.parametrize("name", mostly_long(["single", "fsdp2", "pp_fsdp2"], []))
def test_evaluations_of_the_average_leave_training_as_it_is(name: str) -> None:
    evaluated, not_evaluated = (finished(name, "full", SCHEDULE_FREE | {"eval_steps": steps}) for steps in (3, 0))
    assert same_bits(evaluated, not_evaluated)


def resumed(folder: Path, undisturbed: Finished, name: str, changes: dict[str, Any]) -> Finished:
    """The second half under a strategy, from the middle of a run."""
    more = {"resume_from_checkpoint": undisturbed.checkpoints[0]}
    processes = load_strategy(name).num_processes
    return launch_well(folder, processes, options("full", True) | changes | more, strategy=name)


RESUMED = [
    (name, optim)
    for name in ("single", "fsdp1", "fsdp2", "zero1", "zero3", "tp", "pp")
    for optim in ("lion", "muon", "adafactor")
] + [(name, "schedule_free_adamw") for name in ("single", "fsdp2", "tp", "pp")]
CHANGES = {"lion": LION, "muon": MUON, "adafactor": ADAFACTOR, "schedule_free_adamw": SCHEDULE_FREE}


@pytest.mark.parametrize(("name", "optim"), mostly_long(RESUMED, [("fsdp2", "muon")]))
def test_a_resume_goes_on_bit_for_bit(name: str, optim: str, tmp_path: Path) -> None:
    undisturbed = finished(name, "full", CHANGES[optim])
    assert equal_after_resume(undisturbed, resumed(tmp_path / "again", undisturbed, name, CHANGES[optim]))


MOVES = [
    (before, after) for before in ("single", "fsdp2", "zero2", "pp") for after in ("hsdp", "zero3", "tp", "single")
]


@pytest.mark.parametrize(("before", "after"), mostly_long(MOVES, [("fsdp2", "single")]))
@pytest.mark.parametrize("optim", ["lion", "muon", "adafactor"])
def test_a_checkpoint_moves_to_another_strategy(before: str, after: str, optim: str, tmp_path: Path) -> None:
    moves(before, after, optim, tmp_path)


@pytest.mark.parametrize(("before", "after"), mostly_long([("fsdp2", "pp"), ("tp", "single")], []))
def test_a_schedule_free_checkpoint_moves_to_another_strategy(before: str, after: str, tmp_path: Path) -> None:
    moves(before, after, "schedule_free_adamw", tmp_path)


def moves(before: str, after: str, optim: str, tmp_path: Path) -> None:
    undisturbed = finished(before, "full", CHANGES[optim])
    again = curve(resumed(tmp_path / "again", undisturbed, after, CHANGES[optim]))
    full_curve = curve(undisturbed)
    joined = plain.Curve(full_curve.losses[:HALF] + again.losses, full_curve.norms[:HALF] + again.norms)
    assert joined.agrees(full_curve)
