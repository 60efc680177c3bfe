"""Asked equals got: every run begins with this check, or stops.

Accelerate falls back in silence (one process for two, plain DDP for FSDP); what was not asked for is not trained.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from trainers.attention import KERNELS
from trainers.config import TrainConfig
from trainers.errors import TrainingError
from trainers.models import base_dtype
from trainers.objectives.sft import inner_model
from trainers.parallel.ranks import Ranks
from trainers.strategies import Strategy


@dataclass(frozen=True)
class Line:
    """One thing that was asked for and what it turned out to be."""

    what: str
    asked: str
    got: str


def _dtypes(weights: list[nn.Parameter]) -> str:
    census = Counter(str(weight.dtype).removeprefix("torch.") for weight in weights)
    return ", ".join(sorted(census)) or "none"


def compare(strategy: Strategy, config: TrainConfig, accelerator: Any, wrapped: nn.Module) -> list[Line]:
    """What was asked for beside what this rank got, line by line."""
    model: Any = accelerator.unwrap_model(wrapped).model
    base = inner_model(model)
    weights = list(wrapped.parameters())
    trained = [weight for weight in weights if weight.requires_grad]
    frozen = [weight for weight in weights if not weight.requires_grad]
    frozen_dtype = str(base_dtype(config)).removeprefix("torch.") if config.method == "lora" else "none"
    wrapper = "none" if type(wrapped).__name__ == "SupervisedLoss" else type(wrapped).__name__
    return [
        Line("processes", str(strategy.num_processes), str(accelerator.num_processes)),
        Line("distributed type", strategy.distributed_type, accelerator.distributed_type.value),
        Line("wrapper", strategy.wrapped_class or "none", wrapper),
        Line("trained weights", "float32", _dtypes(trained)),
        Line("frozen weights", frozen_dtype, _dtypes(frozen)),
        Line("mixed precision", config.mixed_precision, accelerator.mixed_precision),
        Line("autocast", str(config.mixed_precision != "no"), str(accelerator.native_amp)),
        Line("own accumulation", "1", str(accelerator.gradient_accumulation_steps)),
        Line("attention", KERNELS[config.attn_implementation], str(base.config._attn_implementation)),
    ]


def check(lines: list[Line], ranks: Ranks) -> None:
    """Stops the run when any rank got something else.

    Raises:
        TrainingError: with both values of each mismatch.
    """
    wrong = [f"{line.what}: asked {line.asked}, got {line.got}" for line in lines if line.asked != line.got]
    problem = TrainingError("; ".join(wrong)) if wrong else None
    if problem is not None and ranks.world == 1:
        raise TrainingError(f"this is not the run that was asked for: {problem}")
    ranks.agree(problem, "checking that this is the run that was asked for")


def table(lines: list[Line], ranks: Ranks, wrapped: nn.Module) -> str:
    """The check as rank 0 prints it."""
    weights = list(wrapped.parameters())
    trained = sum(weight.numel() for weight in weights if weight.requires_grad)
    total = sum(weight.numel() for weight in weights)
    device = torch.cuda.get_device_name(ranks.device) if ranks.device.type == "cuda" else ranks.device.type
    rows = [(line.what, line.got) for line in lines]
    rows += [("device", device), ("weights", f"{total:,}, {trained:,} of them trained")]
    return "\n".join(f"  {what:<16} {value}" for what, value in rows)
