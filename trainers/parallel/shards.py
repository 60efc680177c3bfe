"""A common description of this rank's shard of each trained weight, and gathering of full tensors for checkpoints.

Tensor parallelism leaves each rank one rectangle of a weight; every backend then splits the flattened rectangle into
spans of consecutive elements. A `Shard` is one such span, so that checkpoints written from any layout can be read into
any other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations

import torch
from torch import distributed
from torch.distributed.tensor import DTensor

from trainers.parallel.ranks import Ranks
from trainers.run.errors import TrainingError

WEIGHT = "model"
"""Key of the weight itself in `Shard.tensors`."""


@torch.no_grad()
def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """The local part of a tensor, detached and sharing its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


@dataclass(frozen=True)
class TensorSlice:
    """The rectangle of a weight that tensor parallelism leaves this rank, before a backend splits it further.

    Args:
        shape: shape of the full weight.
        slices: a slice with start and stop for each dimension.
    """

    shape: torch.Size
    slices: tuple[slice, ...]


@dataclass(frozen=True)
class Shard:
    """This rank's span of one trained weight.

    Args:
        name: transformers or peft name of the weight.
        shape: shape of the full weight.
        start: index of the first local element in the flattened weight, or in its flattened rectangle.
        tensors: `[local elements]` vectors with the same layout: the weight (`WEIGHT`) and its optimizer state
            (`exp_avg`, ...). Usually views: writing to them changes model and optimizer (see `Backend.write_shards`).
        step: the optimizer's update count of this weight; None before the first update.
        primary: False if another rank saves the same span.
        slices: the rectangle of the full weight that contains the span, a slice per dimension; empty for all of it.
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
        """Number of elements of the full weight."""
        return self.shape.numel()

    @property
    def elements(self) -> int:
        """Number of local elements."""
        return self.tensors[WEIGHT].numel()

    def copied(self) -> Shard:
        """The same span with its tensors copied to CPU memory."""
        return replace(self, tensors={key: tensor.detach().cpu().clone() for key, tensor in self.tensors.items()})

    def take(self, other: Shard) -> None:
        """Copies the tensors of another shard with the same span into this one's."""
        for key, tensor in self.tensors.items():
            tensor.copy_(other.tensors[key])

    def fill(self, key: str, full: torch.Tensor) -> None:
        """Copies this rank's span from a full tensor into `tensors[key]`."""
        span = self.tensors[key]
        rectangle = full.reshape(self.shape)[self.slices] if self.slices else full
        span.copy_(rectangle.reshape(-1)[self.start : self.start + span.numel()])

    def put(self, span: torch.Tensor, full: torch.Tensor) -> None:
        """Writes `span`, which has this shard's layout, to its place in `full`, a flattened full tensor of zeros."""
        if not self.slices:
            full[self.start : self.start + span.numel()] = span
            return
        rectangle = full.view(self.shape)[self.slices]
        flat = full.new_zeros(rectangle.numel())
        flat[self.start : self.start + span.numel()] = span
        rectangle.copy_(flat.view(rectangle.shape))


ShardsOf = Callable[[Sequence[str], Sequence[torch.Tensor] | None], list[Shard]]
"""`Backend.shards_of`."""
_Piece = tuple[tuple[tuple[int, int], ...], int, int]
"""`(start, stop)` of a rectangle in each dimension, then first and last-plus-one element of a span in it."""


def check_coverage(shards: list[Shard], ranks: Ranks) -> None:
    """Checks that the primary shards cover every element of every weight exactly once, as checkpoints need. Collective.

    Raises:
        TrainingError: naming a weight with missing or duplicate elements.
    """
    everywhere = ranks.gather({shard.name: _piece(shard) for shard in shards})
    for shard in shards:
        by_rank = [pieces[shard.name] for pieces in everywhere]
        counts = [0 if piece is None else piece[2] - piece[1] for piece in by_rank]
        if counts == [shard.numel] * ranks.world:  # not sharded at all
            continue
        pieces = [piece for piece in by_rank if piece is not None and piece[2] > piece[1]]
        if sum(counts) != shard.numel or any(_overlap(a, b) for a, b in combinations(pieces, 2)):
            raise TrainingError(f"{shard.name} has {shard.numel} elements, the ranks hold {counts} of them")


def _piece(shard: Shard) -> _Piece | None:
    """The part of a weight that this rank saves; None if it is not primary."""
    slices = shard.slices or tuple(slice(0, size) for size in shard.shape)
    borders = tuple((side.start, side.stop) for side in slices)
    return (borders, shard.start, shard.start + shard.elements) if shard.primary else None


def _overlap(a: _Piece, b: _Piece) -> bool:
    """Whether two pieces may share an element. Different rectangles that intersect always count as overlapping."""
    meet = all(x[0] < y[1] and y[0] < x[1] for x, y in zip(a[0], b[0], strict=True))
    return meet and (a[0] != b[0] or (a[1] < b[2] and b[1] < a[2]))


def steps_of(shards: list[Shard], ranks: Ranks) -> dict[str, float]:
    """The update count of every weight with optimizer state, by name. Collective."""
    local = {shard.name: shard.step for shard in shards if shard.step is not None and shard.elements}
    return {name: step for steps in ranks.gather(local) for name, step in steps.items()}


def gather_full_tensors(
    shards: list[Shard], steps: dict[str, float], ranks: Ranks, onto: int | None = None
) -> Iterator[tuple[str, str, int, torch.Tensor | None]]:
    """Gathers every tensor of the weights and their optimizer state, each onto one rank. Collective.

    Args:
        shards: this rank's shards; every rank passes the same names.
        steps: the result of `steps_of`; names the weights that have optimizer state.
        ranks: all processes of the run.
        onto: the rank that gets every tensor; None to spread them over the ranks.

    Yields:
        Weight name, key, owning rank, and the full tensor on its owner (None elsewhere). Only one full tensor is in
        memory at a time.
    """
    # A rank that holds no elements of a weight knows neither its state keys nor whether it is sharded: ask all ranks.
    keys: dict[str, set[str]] = {shard.name: set() for shard in shards}
    for known in ranks.gather({shard.name: shard.tensors.keys() - {WEIGHT} for shard in shards}):
        for name, of_weight in known.items():
            keys[name] |= of_weight
    sharded = set().union(*ranks.gather([shard.name for shard in shards if shard.elements < shard.numel]))
    # All ranks visit the tensors in the same order; owners alternate, so that each rank writes a similar amount.
    index = 0
    for shard in sorted(shards, key=lambda shard: shard.name):
        for key in [WEIGHT, *(sorted(keys[shard.name]) if shard.name in steps else [])]:
            owner, index = index % ranks.world if onto is None else onto, index + 1
            if shard.name in sharded:
                full = _gather_full_tensor(shard, key, owner, ranks)
            else:  # the owner already holds all of it
                full = shard.tensors[key].reshape(shard.shape) if ranks.rank == owner else None
            yield shard.name, key, owner, full


def _gather_full_tensor(shard: Shard, key: str, owner: int, ranks: Ranks) -> torch.Tensor | None:
    """Sums the spans, each placed in a tensor of zeros, as integers: this preserves every bit, even of NaN and -0."""
    span = shard.tensors.get(key)
    dtype = shard.tensors[WEIGHT].dtype if key == WEIGHT else torch.float32
    bits = {torch.float32: torch.int32, torch.bfloat16: torch.int16}[dtype]
    buffer = torch.zeros(shard.numel, dtype=torch.int32, device=ranks.device)
    if span is not None and shard.primary:
        shard.put(span.detach().to(ranks.device).view(bits), buffer)
    distributed.reduce(buffer, owner)
    return buffer.to(bits).view(dtype).reshape(shard.shape) if ranks.rank == owner else None
