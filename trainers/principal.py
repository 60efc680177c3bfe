"""Sets the first weights of PiSSA's adapters: computed by all ranks together, or those of a checkpoint."""

from __future__ import annotations

import time
from pathlib import Path

import torch
from torch import distributed

from trainers.checkpoint.checkpoint import Checkpoints
from trainers.model.principal import PREFIX, Factors, adapted, begin_principal, leave_residual, principal_factors
from trainers.objectives.loss_module import LossModule
from trainers.parallel.ranks import Ranks


def set_initial_adapter(checkpoints: Checkpoints, folder: Path | None, loss: LossModule) -> None:
    """Begins adapters with the singular vectors of their weights, of which the base keeps the residual. Collective.

    Args:
        checkpoints: the run's checkpoints, which hold the first adapters.
        folder: the checkpoint that the run resumes from; None for a new run.
        loss: holds the unwrapped model, with the weights of that checkpoint.

    Raises:
        TrainingError: on every rank, if the checkpoint cannot be read.
    """
    ranks = checkpoints.ranks
    if folder is None:
        began = time.perf_counter()
        factors = _computed(loss, ranks)
        begin_principal(loss.model, factors)
        if ranks.is_main:
            seconds = time.perf_counter() - began
            print(f"pissa: singular vectors of {len(factors) // 2} weights in {seconds:.1f} s", flush=True)
    else:
        saved = checkpoints.extra_tensors(folder)
        factors = {name: tensor for name, tensor in saved.items() if name.startswith(PREFIX)}
    checkpoints.extra |= factors
    leave_residual(loss.model, loss.stored, factors)


def _computed(loss: LossModule, ranks: Ranks) -> Factors:
    """The factors of every adapted weight, each computed on one of the ranks and sent to all. Collective."""
    parts, own = list(adapted(loss.model)), dict[int, list[torch.Tensor]]()
    error: Exception | None = None
    try:  # each rank computes all of its own before any is sent, so that none waits for another
        for number in range(ranks.rank, len(parts), ranks.world):
            own[number] = principal_factors(parts[number], loss.stored)
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
