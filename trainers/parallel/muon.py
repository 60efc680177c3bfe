"""Muon (https://kellerjordan.github.io/posts/muon/) for the matrices in the layers, AdamW for everything else.

An update is a matrix whose singular values are all about 1, so it takes the full matrix, which a strategy may have
divided over ranks. Everything else is element by element. The ranks get the matrices in turn, orthogonalize them, and
send the results to all, so that each matrix is computed once, and in the same way under every strategy.

torch's own Muon iterates in bf16, where a difference of 1e-7 between strategies can become one of 1e-3. This one
iterates in fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import distributed

from trainers.parallel.ranks import Ranks
from trainers.parallel.shards import Shard, ShardsOf, local_part
from trainers.run.disk import layer_of

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the quintic iteration: the steepest at 0 whose values stay near 1."""
ITERATIONS = 5
SMALLEST_NORM = 1e-7
UPDATE = "update"
"""Key of the update in the state of a weight during a step."""


def is_hidden_matrix(name: str, shape: Sequence[int]) -> bool:
    """Whether Muon updates a weight: a matrix in a layer. Embedding, head, norms and biases are left to AdamW."""
    return len(shape) == 2 and name.endswith(".weight") and layer_of(name) is not None


def orthogonalized(matrix: torch.Tensor) -> torch.Tensor:
    """The matrix with singular values of about 1 (0.7 to 1.2), by Newton-Schulz iteration in its own dtype.

    Args:
        matrix: `[rows, columns]`.
    """
    a, b, c = COEFFICIENTS
    wide = matrix.T if matrix.size(0) > matrix.size(1) else matrix
    wide = wide / wide.norm().clamp(min=SMALLEST_NORM)
    for _ in range(ITERATIONS):
        gram = wide @ wide.T
        wide = torch.addmm(wide, torch.addmm(gram, gram, gram, beta=b, alpha=c), wide, beta=a)
    return wide.T if matrix.size(0) > matrix.size(1) else wide


def held_elements(shape: Sequence[int]) -> int:
    """Elements that a rank holds while it orthogonalizes a matrix: three of its size, and two products with itself."""
    return 3 * shape[0] * shape[1] + 2 * min(shape) ** 2


class Muon(torch.optim.AdamW):
    """Muon for parameter groups that are `hidden`, fused AdamW for the others.

    An update is scaled to the size of AdamW's (https://arxiv.org/abs/2502.16982), so that both kinds share one learning
    rate. `attach` must be called before the first step.

    Args:
        groups: parameter groups of fp32 weights, which may be shards of any form.
        lr: learning rate.
        momentum: decay rate of the momentum.
        betas, eps: of AdamW.
    """

    def __init__(
        self, groups: list[dict[str, Any]], lr: float, momentum: float, betas: tuple[float, float], eps: float
    ):
        super().__init__(groups, lr=lr, betas=betas, eps=eps, fused=True)
        self._step_supports_amp_scaling = False  # GradScaler skips a step itself, as for any optimizer of ours
        self.momentum = momentum

    def attach(self, shapes: Mapping[str, torch.Size], shards_of: ShardsOf, ranks: Ranks) -> None:
        """Tells the optimizer where the shards of its matrices are. Collective.

        Args:
            shapes: shapes of the trained weights by name, in the same order on every rank.
            shards_of: finds this rank's shards of named weights.
            ranks: all processes of the run.
        """
        self.shards_of, self.ranks = shards_of, ranks
        self.names = [name for name, shape in shapes.items() if is_hidden_matrix(name, shape)]
        local = shards_of(self.names, None)
        self.divided = set().union(*ranks.gather([shard.name for shard in local if shard.elements < shard.numel]))

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Updates the weights of the current parameter groups. Collective."""
        assert closure is None
        groups = self.param_groups
        self.param_groups = [group for group in groups if not group["hidden"] and group["params"]]
        if self.param_groups:
            super().step()
        self.param_groups = groups
        matrices = [(weight, group) for group in groups if group["hidden"] for weight in group["params"]]
        for weight, group in matrices:
            self._average(weight, group)
        self._orthogonalize([weight for weight, _ in matrices])
        for weight, group in matrices:
            update = self.state[weight].pop(UPDATE)
            local_part(weight).view(-1).add_(update, alpha=-group["lr"])

    def _average(self, weight: torch.Tensor, group: dict[str, Any]) -> None:
        """Decays a weight, updates its momentum, and leaves what is to be orthogonalized in its state (Nesterov's)."""
        state = self.state[weight]
        if not state:  # the update count is for checkpoints only
            state["step"] = torch.zeros((), dtype=torch.float32)
            state["momentum_buffer"] = torch.zeros_like(weight)
        state["step"] += 1
        gradient = torch.zeros_like(weight) if weight.grad is None else weight.grad
        slope, mean = local_part(gradient).reshape(-1), local_part(state["momentum_buffer"]).view(-1)
        mean.lerp_(slope, 1 - self.momentum)
        local_part(weight).mul_(1 - group["lr"] * group["weight_decay"])
        state[UPDATE] = slope.lerp_(mean, self.momentum)  # in place of the gradient, which is not needed any more

    def _orthogonalize(self, weights: list[torch.Tensor]) -> None:
        """Replaces the updates of these weights, each on one rank at a time; two full matrices are held at most."""
        shards = self.shards_of(self.names, weights)
        for first in range(0, len(shards), self.ranks.world):
            turn, own = shards[first : first + self.ranks.world], None
            for owner, shard in enumerate(turn):
                gathered = self._gathered(shard, owner)
                own = gathered if gathered is not None else own
            if own is not None:
                rows, columns = turn[self.ranks.rank].shape
                matrix = own.view(rows, columns)
                matrix.copy_(orthogonalized(matrix).mul_(0.2 * max(rows, columns) ** 0.5))
            for owner, shard in enumerate(turn):
                result = own if owner == self.ranks.rank else None
                result = torch.empty(shard.numel, device=self.ranks.device) if result is None else result
                if self.ranks.grouped:
                    distributed.broadcast(result, owner)
                if shard.elements:
                    shard.fill(UPDATE, result)

    def _gathered(self, shard: Shard, owner: int) -> torch.Tensor | None:
        """The full update of a matrix, flat, if this rank is its owner. Collective if the matrix is divided."""
        if shard.name not in self.divided:
            own = owner == self.ranks.rank
            return shard.tensors[UPDATE].to(self.ranks.device, copy=True).view(-1) if own else None
        full = torch.zeros(shard.numel, device=self.ranks.device)
        if shard.primary and shard.elements:
            shard.put(shard.tensors[UPDATE].to(self.ranks.device), full)
        distributed.reduce(full, owner)
        return full if owner == self.ranks.rank else None
