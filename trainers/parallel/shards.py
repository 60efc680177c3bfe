"""The shard of each trained weight that this rank holds, whatever made it; how full tensors are gathered for a save.

Tensor parallelism leaves a rank one rectangle of a weight; every backend then splits that, read as one long vector,
into spans of consecutive elements. A `Shard` is one such span, so that a checkpoint can be written from any layout and
read into any other without knowing which ones they are.
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
class TensorSlice:
    """The rectangle of a weight that tensor parallelism leaves this rank, before a backend splits it again.

    Args:
        shape: of the full weight.
        slices: with start and stop, one for each dimension.
    """

    shape: torch.Size
    slices: tuple[slice, ...]


@dataclass(frozen=True)
class Shard:
    """This rank's span of one trained weight.

    Args:
        name: the weight's name in transformers and peft.
        shape: of the full weight.
        start: index of the first element held here in the flattened weight, or in its flattened rectangle.
        tensors: `[elements here]` vectors that share the layout: the weight (`WEIGHT`) and the optimizer's
            (`exp_avg`, ...). They are views: writing to them changes model and optimizer (see `Backend.write_shards`).
        step: the optimizer's count of updates of this weight, None before the first.
        primary: False where another rank holds the same span.
        slices: the rectangle of the full weight that the span lies in, a slice for each dimension; empty: all of it.
    """

    name: str
    shape: torch.Size
    start: int
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    step: float | None = None
    primary: bool = True
    slices: tuple[slice, ...] = ()

    @property
    def numel(self) -> int:
        """Elements of the full weight."""
        return self.shape.numel()

    @property
    def elements(self) -> int:
        """Elements held here."""
        return self.tensors[WEIGHT].numel()

    def copied(self) -> Shard:
        """The same span with tensors of its own, in CPU memory."""
        return replace(self, tensors={key: tensor.detach().cpu().clone() for key, tensor in self.tensors.items()})

    def take(self, other: Shard) -> None:
        """Copies the tensors of another shard of the same span into this one's."""
        for key, tensor in self.tensors.items():
            tensor.copy_(other.tensors[key])

    def fill(self, key: str, full: torch.Tensor) -> None:
        """Takes this rank's span out of a full tensor."""
        span = self.tensors[key]
        rectangle = full.reshape(self.shape)[self.slices] if self.slices else full
        span.copy_(rectangle.reshape(-1)[self.start : self.start + span.numel()])

    def put(self, span: torch.Tensor, full: torch.Tensor) -> None:
        """Writes a span that lies as this one does into a full flattened tensor of zeros."""
        if not self.slices:
            full[self.start : self.start + span.numel()] = span
            return
        rectangle = full.view(self.shape)[self.slices]
        flat = full.new_zeros(rectangle.numel())
        flat[self.start : self.start + span.numel()] = span
        rectangle.copy_(flat.view(rectangle.shape))


_Piece = tuple[tuple[tuple[int, int], ...], int, int]
"""Borders of a rectangle, first element of a span in it, and the element after its last."""


def check_coverage(shards: list[Shard], ranks: Ranks) -> None:
    """Every element of every weight is on exactly one rank, replicas apart: what a checkpoint relies on. Collective.

    Raises:
        TrainingError: naming a weight of which there is too little or too much.
    """
    everywhere = ranks.gather({shard.name: _piece(shard) for shard in shards})
    for shard in shards:
        by_rank = [pieces[shard.name] for pieces in everywhere]
        counts = [0 if piece is None else piece[2] - piece[1] for piece in by_rank]
        if counts == [shard.numel] * ranks.world:
            continue
        pieces = [piece for piece in by_rank if piece is not None and piece[2] > piece[1]]
        if sum(counts) != shard.numel or any(_overlap(a, b) for a, b in combinations(pieces, 2)):
            raise TrainingError(f"{shard.name} has {shard.numel} elements, the ranks hold {counts} of them")


def _piece(shard: Shard) -> _Piece | None:
    """What this rank answers for."""
    slices = shard.slices or tuple(slice(0, size) for size in shard.shape)
    borders = tuple((side.start, side.stop) for side in slices)
    return (borders, shard.start, shard.start + shard.elements) if shard.primary else None


def _overlap(a: _Piece, b: _Piece) -> bool:
    """Whether two pieces share an element, or might: different rectangles must not meet at all."""
    meet = all(x[0] < y[1] and y[0] < x[1] for x, y in zip(a[0], b[0], strict=True))
    return meet and (a[0] != b[0] or (a[1] < b[2] and b[1] < a[2]))


def steps_of(shards: list[Shard], ranks: Ranks) -> dict[str, float]:
    """The update count of every weight that the optimizer has a state for. Collective."""
    local = {shard.name: shard.step for shard in shards if shard.step is not None and shard.elements}
    return {name: step for steps in ranks.gather(local) for name, step in steps.items()}


def gather_full_tensors(
    shards: list[Shard], steps: dict[str, float], ranks: Ranks
) -> Iterator[tuple[str, str, int, torch.Tensor | None]]:
    """Every tensor of the weights and of their optimizer state, each gathered on one rank. Collective.

    Yields:
        weight name, key, owning rank, and the full tensor on its owner (None elsewhere). One full tensor is in memory
        at a time.
    """
    # A rank may hold nothing of a weight, and so know neither the keys of its state nor that it is sharded.
    keys = sorted(set().union(*ranks.gather({key for shard in shards for key in shard.tensors if key != WEIGHT})))
    sharded = set().union(*ranks.gather([shard.name for shard in shards if shard.elements < shard.numel]))
    # All ranks go through the tensors in one order, and the owner changes with each, so that all write as much.
    index = 0
    for shard in sorted(shards, key=lambda shard: shard.name):
        for key in [WEIGHT, *(keys if shard.name in steps else [])]:
            owner, index = index % ranks.world, index + 1
            if shard.name in sharded:
                full = _gather_full_tensor(shard, key, owner, ranks)
            else:  # whoever owns it holds all of it
                full = shard.tensors[key].reshape(shard.shape) if ranks.rank == owner else None
            yield shard.name, key, owner, full


def _gather_full_tensor(shard: Shard, key: str, owner: int, ranks: Ranks) -> torch.Tensor | None:
    """Sums the spans, each in its place among zeros, as integers: the bits come over as they are."""
    span = shard.tensors.get(key)
    dtype = shard.tensors[WEIGHT].dtype if key == WEIGHT else torch.float32
    bits = {torch.float32: torch.int32, torch.bfloat16: torch.int16}[dtype]
    buffer = torch.zeros(shard.numel, dtype=torch.int32, device=ranks.device)
    if span is not None and shard.primary:
        shard.put(span.detach().to(ranks.device).view(bits), buffer)
    distributed.reduce(buffer, owner)
    return buffer.to(bits).view(dtype).reshape(shard.shape) if ranks.rank == owner else None
