"""Adafactor (https://arxiv.org/abs/1804.04235): the second moments of a matrix by means of its rows and columns.

It is `transformers.optimization.Adafactor` as fine-tuning uses it: an external learning rate (`scale_parameter=False`,
`relative_step=False`) and no first moment. torch's own always scales a step by the size of the weight.

A strategy may have divided a matrix over ranks: its sums are those of all parts. Two small collectives per step do it,
and no matrix is gathered. Every rank keeps the means of all matrices, which are as long as their rows and columns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import Any

import torch
from torch.nn import functional

from trainers.parallel.ranks import Ranks
from trainers.parallel.shards import WEIGHT, Shard, ShardsOf, local_part

ROWS, COLUMNS = "exp_avg_sq_row", "exp_avg_sq_col"
MEANS = (ROWS, COLUMNS)
SQUARES = "exp_avg_sq"
UPDATE = "update"
"""Key of gradient and update in the state of a weight during a step."""
SMALLEST_SQUARE = 1e-30
DECAY_POWER = -0.8
"""The share of a new square in its mean is the number of the update to this power."""
LARGEST_UPDATE = 1.0
"""Root mean square of an update of a weight, before the learning rate."""
Means = dict[str, torch.Tensor]
"""Of one matrix: `ROWS`, `[..., rows]`, and `COLUMNS`, `[..., columns]`."""


class Adafactor(torch.optim.Optimizer):
    """Adafactor with an external learning rate. `attach` must be called before the first step.

    Args:
        groups: parameter groups of fp32 weights, which may be shards of any form; see `parameter_groups`.
        lr: learning rate.

    Attributes:
        means: the moments of each matrix by name, the same on every rank.
    """

    def __init__(self, groups: list[dict[str, Any]], lr: float):
        super().__init__(groups, {"lr": lr, "weight_decay": 0.0})
        self.means: dict[str, Means] = {}

    def attach(self, shapes: Mapping[str, torch.Size], shards_of: ShardsOf, ranks: Ranks) -> None:
        """Tells the optimizer where the shards of its weights are. Collective.

        Args:
            shapes: shapes of the trained weights by name, in the same order on every rank.
            shards_of: finds this rank's shards of named weights.
            ranks: all processes of the run.
        """
        self.names, self.shards_of, self.ranks = [*shapes], shards_of, ranks
        local = shards_of(self.names, None)
        self.divided = set().union(*ranks.gather([shard.name for shard in local if shard.elements < shard.numel]))
        # A rank without elements of a weight may not know its full shape.
        self.shapes = dict[str, torch.Size]()
        for known in ranks.gather({shard.name: tuple(shard.shape) for shard in local if shard.elements}):
            self.shapes |= {name: torch.Size(shape) for name, shape in known.items()}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Updates the weights of the current parameter groups. Collective."""
        assert closure is None
        weights = [(weight, group) for group in self.param_groups for weight in group["params"]]
        for weight, group in weights:
            self._begin(weight, group)
        shards = self.shards_of(self.names, [weight for weight, _ in weights])
        count = float(self.state[weights[0][0]]["step"])  # every weight has been updated as often
        share = count**DECAY_POWER
        self._average(shards, share)
        local = [shard for shard in shards if shard.elements]
        for shard in local:
            self._make_update(shard, share)
        sizes = self._squared_sizes(shards)
        groups = {name: group for group in self.param_groups for name in group["names"]}
        for shard in local:
            group, value, update = groups[shard.name], shard.tensors[WEIGHT], shard.tensors[UPDATE]
            root = (sizes[shard.name] / shard.numel).sqrt()
            update.div_((root / LARGEST_UPDATE).clamp(min=1.0)).mul_(group["lr"])
            value.add_(value, alpha=-group["weight_decay"] * group["lr"]).sub_(update)
        for weight, _ in weights:
            del self.state[weight][UPDATE]

    def _begin(self, weight: torch.Tensor, group: dict[str, Any]) -> None:
        """Counts the update, and puts the gradient into the state, of which the shards are views."""
        state = self.state[weight]
        if not state:  # the update count is on the CPU, where reading it does not wait for the device
            state["step"] = torch.zeros((), dtype=torch.float32)
            if not group["matrix"]:
                state[SQUARES] = torch.zeros_like(weight)
        state["step"] += 1
        gradient = torch.zeros_like(weight) if weight.grad is None else weight.grad
        state[UPDATE] = local_part(gradient).reshape(-1)

    def _counts(self, shard: Shard) -> bool:
        """Whether this rank adds its elements to a sum over all ranks, or needs none as every rank has all weights."""
        if not self.divided:
            return True
        return shard.elements > 0 and (shard.primary if shard.name in self.divided else self.ranks.is_main)

    def _summed(self, sums: torch.Tensor) -> torch.Tensor:
        return self.ranks.sum(sums) if self.divided else sums

    def _average(self, shards: list[Shard], share: float) -> None:
        """Updates the means of every matrix by its squared gradients."""
        shapes = {shard.name: self.shapes[shard.name] for shard in shards if len(self.shapes[shard.name]) > 1}
        sizes = {name: (prod(shape[:-1]), prod(shape[:-2]) * shape[-1]) for name, shape in shapes.items()}
        flat = torch.zeros(sum(map(sum, sizes.values())), device=self.ranks.device)
        parts = iter(flat.split([size for pair in sizes.values() for size in pair]))
        sums = {name: _shaped(next(parts), next(parts), shape) for name, shape in shapes.items()}
        for shard in shards:
            if shard.name in sums and self._counts(shard):
                squares = shard.tensors[UPDATE].square().add_(SMALLEST_SQUARE)
                add_sums(shard, squares, sums[shard.name])
        self._summed(flat)
        for name, shape in shapes.items():
            means = self.means.setdefault(name, {key: torch.zeros_like(part) for key, part in sums[name].items()})
            for key, length in ((ROWS, shape[-1]), (COLUMNS, shape[-2])):
                means[key].mul_(1 - share).add_(sums[name][key].div_(length), alpha=share)

    def _make_update(self, shard: Shard, share: float) -> None:
        """Replaces the gradient by the update, before it is clipped."""
        update = shard.tensors[UPDATE]
        if shard.name in self.means:
            update.mul_(factors(shard, self.means[shard.name]))
            return
        squares = shard.tensors[SQUARES]
        squares.mul_(1 - share).add_(update.square().add_(SMALLEST_SQUARE), alpha=share)
        update.mul_(squares.rsqrt())

    def _squared_sizes(self, shards: list[Shard]) -> dict[str, torch.Tensor]:
        """The sum of the squared elements of every full update, by name."""
        sums = torch.zeros(len(shards), device=self.ranks.device)
        for index, shard in enumerate(shards):
            if self._counts(shard):
                sums[index] = shard.tensors[UPDATE].square().sum()
        return dict(zip([shard.name for shard in shards], self._summed(sums), strict=True))


def _shaped(rows: torch.Tensor, columns: torch.Tensor, shape: torch.Size) -> Means:
    """Views of flat vectors as means of a matrix, or of a stack of matrices."""
    return {ROWS: rows.view(shape[:-1]), COLUMNS: columns.view(*shape[:-2], shape[-1])}


def _rectangle(shard: Shard) -> tuple[tuple[slice, ...], list[int], int, int]:
    """The rectangle that has the shard's span, its sides, and the first and last-plus-one row that the span touches."""
    slices = shard.slices or tuple(slice(0, size) for size in shard.shape)
    sides = [side.stop - side.start for side in slices]
    return slices, sides, shard.start // sides[-1], -(-(shard.start + shard.elements) // sides[-1])


def add_sums(shard: Shard, values: torch.Tensor, sums: Means) -> None:
    """Adds the elements of a span to the sums of the rows and columns that they are in.

    Args:
        shard: the span, of a matrix or a stack of matrices.
        values: `[local elements]`.
        sums: of the full weight; modified in place.
    """
    slices, sides, first, last = _rectangle(shard)
    width, height = sides[-1], sides[-2]
    # Complete the first and the last row with zeros.
    missing = shard.start - first * width, last * width - shard.start - shard.elements
    lines = (functional.pad(values, missing) if any(missing) else values).view(-1, width)
    rows = values.new_zeros(prod(sides[:-1]))
    rows[first:last] = lines.sum(-1)
    sums[ROWS][slices[:-1]] += rows.view(sides[:-1])
    columns = values.new_zeros(prod(sides[:-2]), width)
    for matrix in range(first // height, -(-last // height)):
        own = lines[max(0, matrix * height - first) : (matrix + 1) * height - first]
        columns[matrix] = own.sum(0)
    sums[COLUMNS][(*slices[:-2], slices[-1])] += columns.view(*sides[:-2], width)


def factors(shard: Shard, means: Means) -> torch.Tensor:
    """`[local elements]`: the reciprocal roots of the second moments that the means of rows and columns stand for."""
    slices, sides, first, last = _rectangle(shard)
    width, height = sides[-1], sides[-2]
    by_row = (means[ROWS] / means[ROWS].mean(-1, keepdim=True)).rsqrt_()[slices[:-1]].reshape(-1)[first:last]
    by_column = means[COLUMNS].rsqrt()[(*slices[:-2], slices[-1])].reshape(-1, width)
    if len(by_column) > 1:  # a stack: each row has the columns of its own matrix
        by_column = by_column[torch.arange(first, last, device=by_column.device) // height]
    offset = shard.start - first * width
    return (by_row[:, None] * by_column).view(-1)[offset : offset + shard.elements]
