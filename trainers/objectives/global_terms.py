"""What the loss of a step needs of the global batch before any backward pass, from passes without gradients.

A loss with a factor that is a mean over the global batch is no sum over micro-batches, unless they all know that mean.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from trainers.data.micro_batch import StepBatch
from trainers.objectives.load_balancing import LoadBalancing, count_routing


def global_terms(
    balancing: LoadBalancing | None,
    model: Any,
    batch: StepBatch,
    device: torch.device,
    all_reduce: Callable[[torch.Tensor], torch.Tensor],
    contributes: bool,
) -> tuple[StepBatch, torch.Tensor, torch.Tensor | None]:
    """Measures the KL divergence of mismatched documents, and counts the routing of balanced experts. Collective.

    Args:
        balancing: the load-balancing loss that the model's config requests; None without.
        model: the wrapped `LossModule`.
        batch: this rank's share of the step.
        device: device of the model.
        all_reduce: sums a tensor over all ranks.
        contributes: False if another rank counts the same tokens.

    Returns:
        The batch, whose documents know the divergence; the load-balancing loss (a scalar) and its `expert_weights`,
        0 and None without.
    """
    if batch.mismatched:
        kl = _divergence(model, batch, device, all_reduce, contributes)
        batch = replace(batch, micro_batches=[micro_batch.with_kl(kl) for micro_batch in batch.micro_batches])
    if balancing is None:
        return batch, torch.zeros((), device=device), None
    return batch, *count_routing(balancing, model, batch, device, all_reduce, contributes)


@torch.no_grad()
def _divergence(
    model: Any,
    batch: StepBatch,
    device: torch.device,
    all_reduce: Callable[[torch.Tensor], torch.Tensor],
    contributes: bool,
) -> torch.Tensor:
    """The KL divergence over the global batch, an fp32 scalar; without dropout, as the initial model's part is."""
    total = torch.zeros((), dtype=torch.float64, device=device)
    model.eval()
    for micro_batch in batch.mismatched:
        log_ratios, _ = model(**micro_batch.inputs(device))
        total += log_ratios
    model.train()
    summed = all_reduce(total if contributes else torch.zeros_like(total))
    return divergence(summed, batch.divisor)


def divergence(log_ratios: torch.Tensor, documents: int) -> torch.Tensor:
    """Estimate of the KL divergence, an fp32 scalar: a mean over documents, 0 if it is negative.

    Args:
        log_ratios: sum over the documents of log-probability - the same under the initial model.
        documents: their number.
    """
    return (log_ratios / max(documents, 1)).clamp(min=0).float()
