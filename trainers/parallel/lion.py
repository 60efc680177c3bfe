"""Lion (https://arxiv.org/abs/2302.06675): every weight moves by the learning rate, up or down."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from trainers.parallel.shards import local_part


class Lion(torch.optim.Optimizer):
    """Steps of the sign of a momentum, with decoupled weight decay; element by element, so any shard can be updated.

    Args:
        groups: parameter groups of fp32 weights, which may be DTensors.
        lr: learning rate.
        betas: share of the momentum in an update, and decay rate of the momentum.
    """

    def __init__(self, groups: list[dict[str, Any]], lr: float, betas: tuple[float, float]):
        super().__init__(groups, {"lr": lr, "betas": betas, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Updates every weight that has a gradient."""
        assert closure is None
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self._update(weight, weight.grad, group)

    def _update(self, weight: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]) -> None:
        state, (beta1, beta2), rate = self.state[weight], group["betas"], group["lr"]
        if not state:  # the update count is for checkpoints only
            state["step"] = torch.zeros((), dtype=torch.float32)
            state["exp_avg"] = torch.zeros_like(weight)
        state["step"] += 1
        value, slope, mean = local_part(weight), local_part(gradient), local_part(state["exp_avg"])
        value.mul_(1 - rate * group["weight_decay"])
        value.add_(mean.mul(beta1).add_(slope, alpha=1 - beta1).sign_(), alpha=-rate)
        mean.mul_(beta2).add_(slope, alpha=1 - beta2)
