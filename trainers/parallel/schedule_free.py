"""Schedule-free AdamW (https://arxiv.org/abs/2405.15682): an average of the steps takes the place of a decaying rate.

There are three points: z, which AdamW without momentum moves; x, the average of all z so far; and y between them, at
which gradients are taken. The weights of the model are y in training, and x when they are evaluated or exported. State
and checkpoints have y and z, of which x is a linear function.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from trainers.config.optimizer_options import STEPPED
from trainers.parallel.shards import local_part


def averaging_share(count: int, warmup_steps: int) -> float:
    """The share of the newest z in the average after update `count`, counted from 1.

    Each z weighs as the square of its learning rate, which rises linearly over the warm-up and is constant then.
    """
    rising = min(count, warmup_steps)
    total = rising * (rising + 1) * (2 * rising + 1) / 6 / max(warmup_steps, 1) ** 2 + count - rising
    return min(1.0, count / max(warmup_steps, 1)) ** 2 / total


class ScheduleFreeAdamW(torch.optim.Optimizer):
    """The AdamW of `schedulefree`, element by element, so any shard can be updated.

    Args:
        groups: parameter groups of fp32 weights, which may be DTensors.
        lr: learning rate.
        betas: beta1 is the share of x in y; beta2 the decay rate of the second moment.
        eps: added to the denominator.
        warmup_steps: updates over which the caller raises the learning rate.
    """

    def __init__(
        self, groups: list[dict[str, Any]], lr: float, betas: tuple[float, float], eps: float, warmup_steps: int
    ):
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})
        self.warmup_steps = warmup_steps

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
        if not state:  # the update count is on the CPU, where reading it does not wait for the device
            state["step"] = torch.zeros((), dtype=torch.float32)
            state["exp_avg_sq"] = torch.zeros_like(weight)
            state[STEPPED] = weight.detach().clone()
        state["step"] += 1
        count = int(state["step"])
        share = averaging_share(count, self.warmup_steps)
        value, slope = local_part(weight), local_part(gradient)
        stepped, squares = local_part(state[STEPPED]), local_part(state["exp_avg_sq"])
        squares.mul_(beta2).addcmul_(slope, slope, value=1 - beta2)
        direction = slope / squares.div(1 - beta2**count).sqrt_().add_(group["eps"])
        direction.add_(value, alpha=group["weight_decay"])
        value.lerp_(stepped, share).add_(direction, alpha=rate * (beta1 * (1 - share) - 1))
        stepped.sub_(direction, alpha=rate)

    @torch.no_grad()
    def to_average(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Moves the weights from y to x.

        Returns:
            Each local part with a copy of what it was: on the way back by arithmetic, bits would change.
        """
        before = []
        for group in self.param_groups:
            for weight in group["params"]:
                if STEPPED in self.state[weight]:
                    value = local_part(weight)
                    before.append((value, value.clone()))
                    value.lerp_(local_part(self.state[weight][STEPPED]), 1 - 1 / group["betas"][0])
        return before
