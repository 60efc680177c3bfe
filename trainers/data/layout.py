"""Where the documents of a packed micro-batch lie, in the forms that attention kernels ask for; parts of rows."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch
    from torch.nn.attention.flex_attention import BlockMask


@dataclass(frozen=True)
class DocumentLayout:
    """The documents of a micro-batch; the padding at the end of a row counts as one.

    Args:
        ids: `[batch, sequence]` document number of each token; tokens see earlier tokens of the same number.
        borders: `[documents + 1]` int32, where each starts in the flattened batch.
        longest: tokens of the longest.
        places: `borders` in the host's memory.
    """

    ids: torch.Tensor
    borders: torch.Tensor
    longest: int
    places: tuple[int, ...]

    @classmethod
    def of(cls, borders: np.ndarray, rows: int) -> DocumentLayout:
        """The layout of documents that fill `rows` rows of one length; no document goes on in the next row."""
        import torch

        lengths = borders[1:] - borders[:-1]
        ids = torch.from_numpy(np.arange(len(lengths)).repeat(lengths).reshape(rows, -1))
        return cls(ids, torch.from_numpy(borders.astype(np.int32)), int(lengths.max()), tuple(borders.tolist()))

    @cached_property
    def side_by_side(self) -> tuple[torch.Tensor, tuple[tuple[int, int], ...]]:
        """`[batch * sequence]` slot of each token once documents of like length lie side by side; their groups.

        Of each group the documents and the width, in the order of the slots. Made when a kernel first asks for it.
        """
        import torch

        borders = np.array(self.places)
        slots, buckets = _buckets(borders[1:] - borders[:-1])
        return torch.from_numpy(slots).to(self.ids.device), buckets

    def to(self, device: torch.device, non_blocking: bool = False) -> DocumentLayout:
        """The same with its tensors there."""
        moved = {name: getattr(self, name).to(device, non_blocking=non_blocking) for name in ("ids", "borders")}
        return replace(self, **moved)


@dataclass(frozen=True)
class RowPart:
    """The part of every row that a rank has.

    Args:
        index: which of them, from 0.
        count: parts of a row.
        zigzag: two pieces a rank, one from either end, so that causal attention is as much work for each.
    """

    index: int = 0
    count: int = 1
    zigzag: bool = False

    def padded(self, width: int) -> int:
        """The next width that can be cut into equal parts."""
        unit = self.count * (2 if self.zigzag and self.count > 1 else 1)
        return -(-width // unit) * unit

    def runs(self, width: int) -> list[tuple[int, int]]:
        """First and last-plus-one column of each piece, in order."""
        if not self.zigzag or self.count == 1:
            size = width // self.count
            return [(self.index * size, (self.index + 1) * size)]
        size = width // (2 * self.count)
        return [(piece * size, (piece + 1) * size) for piece in (self.index, 2 * self.count - 1 - self.index)]

    def columns(self, width: int) -> np.ndarray:
        """Every column, in order."""
        return np.concatenate([np.arange(start, stop) for start, stop in self.runs(width)])


WHOLE = RowPart()


class CurrentDocuments:
    """The documents of the present micro-batch, for attention; its masks are built once for all layers."""

    def __init__(self) -> None:
        self.layout: DocumentLayout | None = None
        self.masks: dict[int | None, torch.Tensor] = {}
        self.blocks: dict[tuple[int, int | None], BlockMask] = {}
        self.over_ranks: Any = None
        self.pieces: dict[int | None, Any] = {}


current_documents = CurrentDocuments()


def use_documents(layout: DocumentLayout | None, over_ranks: Any = None) -> None:
    """Sets what the next forward and backward pass may attend to.

    Args:
        layout: the documents; tokens see earlier tokens of their own. None: each row is one document, padded on
            the right if at all.
        over_ranks: how attention looks at the parts of rows on other ranks (`trainers/parallel/sequence.py`); None
            where rows are whole.
    """
    current_documents.layout, current_documents.masks, current_documents.blocks = layout, {}, {}
    current_documents.over_ranks, current_documents.pieces = over_ranks, {}


def _buckets(lengths: np.ndarray) -> tuple[np.ndarray, tuple[tuple[int, int], ...]]:
    """Documents grouped by length, four groups to a doubling, each as wide as its longest.

    Args:
        lengths: `[documents]`.

    Returns:
        `[tokens]` slot of each token, and documents and width of each group.
    """
    sizes, groups = lengths.tolist(), dict[int, list[int]]()  # tens of them: lists are quicker than arrays
    for document, size in enumerate(sizes):
        groups.setdefault(_group(size), []).append(document)
    first_slot, buckets, used = [0] * len(sizes), [], 0
    for _, members in sorted(groups.items()):
        width = max(2, *(sizes[one] for one in members))  # one query alone is what kernels take for generating
        for place, one in enumerate(members):
            first_slot[one] = used + place * width
        buckets.append((len(members), width))
        used += width * len(members)
    ends = lengths.cumsum()
    return np.arange(ends[-1]) + (np.array(first_slot) + lengths - ends).repeat(lengths), tuple(buckets)


@cache
def _group(size: int) -> int:
    return math.ceil(4 * math.log2(size))
