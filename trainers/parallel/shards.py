"""The part of each trained weight that this rank holds, whatever sharded it; how the whole is put together for a save.

Tensor parallelism leaves a rank one rectangle of a weight; every backend then cuts that, read as one long vector, into
runs of consecutive elements. A `Shard` is one such run, so that a checkpoint can be written from any layout and read
into any other without knowing which ones they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import combinations

import torch
from torch import distributed
from torch.distributed.tensor import DTensor

from trainers.parallel.ranks import Ranks
from trainers.run.errors import TrainingError

WEIGHT = "model"


@torch.no_grad()
def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank has of a tensor, sharing its memory, without a gradient of its own."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


@dataclass(frozen=True)
class Cut:
    """The rectangle of a weight that this rank has of it, before a backend cuts it again.

    Args:
        shape: of the whole weight.
        box: a slice with start and stop for each dimension.
    """

    shape: torch.Size
    box: tuple[slice, ...]


@dataclass(frozen=True)
class Shard:
    """This rank's run of one trained weight.

    Args:
        name: the weight's name in transformers and peft.
        shape: of the whole weight.
        start: index of the first element held here in the flattened weight, or in its flattened rectangle.
        tensors: `[elements here]` vectors that share the layout: the weight (`WEIGHT`) and the optimizer's
            (`exp_avg`, ...). They are views: writing to them changes model and optimizer (see `Backend.put_back`).
        step: the optimizer's count of updates of this weight, None before the first.
        primary: False where another rank holds the same run.
        box: the rectangle of the whole weight that the run lies in, a slice for each dimension; empty: all of it.
    """

    name: str
    shape: torch.Size
    start: int
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    step: float | None = None
    primary: bool = True
    box: tuple[slice, ...] = ()

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
        rectangle = whole.reshape(self.shape)[self.box] if self.box else whole
        here.copy_(rectangle.reshape(-1)[self.start : self.start + here.numel()])

    def put(self, run: torch.Tensor, whole: torch.Tensor) -> None:
        """Writes a run that lies as this one does into a whole flattened tensor of zeros."""
        if not self.box:
            whole[self.start : self.start + run.numel()] = run
            return
        rectangle = whole.view(self.shape)[self.box]
        flat = whole.new_zeros(rectangle.numel())
        flat[self.start : self.start + run.numel()] = run
        rectangle.copy_(flat.view(rectangle.shape))


_Piece = tuple[tuple[tuple[int, int], ...], int, int]
"""Borders of a rectangle, first element of a run in it, and the one after its last."""


def check_whole(shards: list[Shard], ranks: Ranks) -> None:
    """Every element of every weight is on exactly one rank, replicas apart: what a checkpoint relies on. Collective.

    Raises:
        TrainingError: naming a weight of which there is too little or too much.
    """
    everywhere = ranks.gather({one.name: _piece(one) for one in shards})
    for one in shards:
        pieces = [pieces[one.name] for pieces in everywhere]
        held = [0 if piece is None else piece[2] - piece[1] for piece in pieces]
        if held == [one.numel] * ranks.world:
            continue
        some = [piece for piece in pieces if piece is not None and piece[2] > piece[1]]
        if sum(held) != one.numel or any(_overlap(a, b) for a, b in combinations(some, 2)):
            raise TrainingError(f"{one.name} has {one.numel} elements, the ranks hold {held} of them")


def _piece(one: Shard) -> _Piece | None:
    """What this rank answers for."""
    box = one.box or tuple(slice(0, size) for size in one.shape)
    borders = tuple((side.start, side.stop) for side in box)
    return (borders, one.start, one.start + one.elements) if one.primary else None


def _overlap(a: _Piece, b: _Piece) -> bool:
    """Whether two pieces share an element, or might: different rectangles must not meet at all."""
    meet = all(x[0] < y[1] and y[0] < x[1] for x, y in zip(a[0], b[0], strict=True))
    return meet and (a[0] != b[0] or (a[1] < b[2] and b[1] < a[2]))


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
        one.put(here.detach().to(ranks.device).view(bits), buffer)
    distributed.reduce(buffer, owner)
    return buffer.to(bits).view(dtype).reshape(one.shape) if ranks.rank == owner else None
