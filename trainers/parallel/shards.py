"""The part of each trained weight that this rank holds, whatever sharded it; how the whole is put together for a save.

Every backend cuts a weight, read as one long vector, into runs of consecutive elements. A `Shard` is one such run, so
that a checkpoint can be written from any layout and read into any other without knowing which ones they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import distributed

from trainers.errors import TrainingError
from trainers.parallel.ranks import Ranks

WEIGHT = "model"


@dataclass(frozen=True)
class Shard:
    """This rank's run of one trained weight.

    Args:
        name: the weight's name in transformers and peft.
        shape: of the whole weight.
        start: index of the first element held here in the flattened weight.
        tensors: `[elements here]` vectors that share the layout: the weight (`WEIGHT`) and the optimizer's
            (`exp_avg`, ...). They are views: writing to them changes model and optimizer (see `Backend.put_back`).
        step: the optimizer's count of updates of this weight, None before the first.
        primary: False where another rank holds the same run.
    """

    name: str
    shape: torch.Size
    start: int
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    step: float | None = None
    primary: bool = True

    @property
    def numel(self) -> int:
        """Elements of the whole weight."""
        return self.shape.numel()

    @property
    def elements(self) -> int:
        """Elements held here."""
        return self.tensors[WEIGHT].numel()

    def copied(self) -> Shard:
        """The same run with tensors of its own, in CPU memory."""
        return replace(self, tensors={key: tensor.detach().cpu().clone() for key, tensor in self.tensors.items()})

    def take(self, other: Shard) -> None:
        """Copies the tensors of another shard of the same run into this one's."""
        for key, tensor in self.tensors.items():
            tensor.copy_(other.tensors[key])

    def fill(self, key: str, whole: torch.Tensor) -> None:
        """Takes this rank's run out of a whole tensor."""
        here = self.tensors[key]
        here.copy_(whole.reshape(-1)[self.start : self.start + here.numel()])


def check_whole(shards: list[Shard], ranks: Ranks) -> None:
    """Every element of every weight is on exactly one rank, replicas apart: what a checkpoint relies on. Collective.

    Raises:
        TrainingError: naming a weight of which there is too little or too much.
    """
    mine = {one.name: one.elements if one.primary else 0 for one in shards}
    sizes = ranks.gather(mine)
    for one in shards:
        held = [size[one.name] for size in sizes]
        if sum(held) != one.numel and held != [one.numel] * ranks.world:
            raise TrainingError(f"{one.name} has {one.numel} elements, the ranks hold {held} of them")


def steps_of(shards: list[Shard], ranks: Ranks) -> dict[str, float]:
    """The update count of every weight that the optimizer has a state for. Collective."""
    mine = {one.name: one.step for one in shards if one.step is not None and one.elements}
    return {name: step for part in ranks.gather(mine) for name, step in part.items()}


def wholes(
    shards: list[Shard], steps: dict[str, float], ranks: Ranks
) -> Iterator[tuple[str, str, int, torch.Tensor | None]]:
    """Every tensor of the weights and of their optimizer state, put together on one rank each. Collective.

    Yields:
        weight name, key, owning rank, and the whole tensor on its owner (None elsewhere). One whole tensor
        is in memory at a time.
    """
    keys = sorted(set().union(*ranks.gather({key for one in shards for key in one.tensors if key != WEIGHT})))
    split = ranks.gather([one.name for one in shards if one.elements < one.numel])
    scattered = set().union(*split)
    number = 0
    for one in sorted(shards, key=lambda one: one.name):
        for key in [WEIGHT, *(keys if one.name in steps else [])]:
            owner, number = number % ranks.world, number + 1
            if one.name not in scattered:
                whole = one.tensors[key].reshape(one.shape) if ranks.rank == owner else None
            else:
                whole = _put_together(one, key, owner, ranks)
            yield one.name, key, owner, whole


def _put_together(one: Shard, key: str, owner: int, ranks: Ranks) -> torch.Tensor | None:
    """Sums the runs, each in its place among zeros, as integers: the bits come over as they are."""
    here = one.tensors.get(key)
    dtype = one.tensors[WEIGHT].dtype if key == WEIGHT else torch.float32
    bits = {torch.float32: torch.int32, torch.bfloat16: torch.int16}[dtype]
    buffer = torch.zeros(one.numel, dtype=torch.int32, device=ranks.device)
    if here is not None and one.primary:
        buffer[one.start : one.start + here.numel()] = here.detach().to(ranks.device).view(bits)
    distributed.reduce(buffer, owner)
    return buffer.to(bits).view(dtype).reshape(one.shape) if ranks.rank == owner else None
