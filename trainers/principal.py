"""Sets the first weights of the adapters of PiSSA and LoftQ: computed by all ranks together, or a checkpoint's."""

from __future__ import annotations

import time
from pathlib import Path

import torch
from torch import distributed

from trainers.checkpoint.checkpoint import Checkpoints
from trainers.model.principal import (
    FACTORS,
    PREFIX,
    Factors,
    begin_principal,
    leave_residual,
    modules_to_begin,
)
from trainers.objectives.loss_module import LossModule
from trainers.parallel.ranks import Ranks


def set_initial_adapter(start: str, checkpoints: Checkpoints, folder: Path | None, loss: LossModule) -> None:
    """Begins adapters with singular vectors: of their weights, or of what quantization took from these. Collective.

    With `pissa`, the base keeps the residual.

    Args:
        start: `pissa` or `loftq`; adapters of the latter fit the base as it is, and are in any checkpoint.
        checkpoints: the run's checkpoints, which hold the first adapters.
        folder: the checkpoint that the run resumes from; None for a new run.
        loss: holds the unwrapped model, with the weights of that checkpoint.

    Raises:
        TrainingError: on every rank, if the checkpoint cannot be read.
    """
    ranks = checkpoints.ranks
    if folder is None:
        began = time.perf_counter()
        factors = _computed(start, loss, ranks)
        begin_principal(loss.model, factors)
        if ranks.is_main:
            seconds = time.perf_counter() - began
            print(f"{start}: singular vectors of {len(factors) // 2} weights in {seconds:.1f} s", flush=True)
    elif start == "pissa":
        saved = checkpoints.extra_tensors(folder)
        factors = {name: tensor for name, tensor in saved.items() if name.startswith(PREFIX)}
    if start == "pissa":
        checkpoints.extra |= factors
        leave_residual(loss.model, loss.stored, factors)


def _computed(start: str, loss: LossModule, ranks: Ranks) -> Factors:
    """The factors of every adapted weight, each computed on one of the ranks and sent to all. Collective."""
    parts, own = list(modules_to_begin(start, loss.model, loss.stored)), dict[int, list[torch.Tensor]]()
    error: Exception | None = None
    try:  # each rank computes all of its own before any is sent, so that none waits for another
        for number in range(ranks.rank, len(parts), ranks.world):
            own[number] = FACTORS[start](parts[number], loss.stored)
            if not all(tensor.isfinite().all() for tensor in own[number]):
                raise ValueError(f"{parts[number].name} has infinite or undefined weights")
    except Exception as problem:
        error = problem
    ranks.agree(error, "computing the singular vectors")
    factors: dict[str, torch.Tensor] = {}
    for number, part in enumerate(parts):
        shapes = (part.layer.lora_A["default"].weight.shape, part.layer.lora_B["default"].weight.shape)
        pair = own.get(number) or [torch.empty(shape) for shape in shapes]
        for key, tensor in zip(("lora_A", "lora_B"), pair, strict=True):
            factors[f"{PREFIX}{part.name}.{key}"] = _sent(tensor.contiguous(), number % ranks.world, ranks)
    return factors


def _sent(tensor: torch.Tensor, owner: int, ranks: Ranks) -> torch.Tensor:
    if ranks.world == 1:
        return tensor
    on_device = tensor.to(ranks.device)
    distributed.broadcast(on_device, src=owner)
    return on_device.cpu()
