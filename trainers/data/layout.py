"""Where the documents of a packed micro-batch lie, in the forms that attention kernels ask for."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class DocumentLayout:
    """The documents of a micro-batch; the padding at the end of a row counts as one.

    Args:
        ids: `[batch, sequence]` document number of each token; tokens see earlier tokens of the same number.
        borders: `[documents + 1]` int32, where each starts in the flattened batch.
        longest: tokens of the longest.
        slots: `[batch * sequence]` place of each token once documents of like length are laid side by side.
        buckets: documents and width of each group of like length, in the order of `slots`.
    """

    ids: torch.Tensor
    borders: torch.Tensor
    longest: int
    slots: torch.Tensor
    buckets: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, ids: np.ndarray) -> DocumentLayout:
        """The layout of `[batch, sequence]` document numbers; those of a document stand together in one row."""
        import torch

        new = np.ones(ids.shape, dtype=bool)
        new[:, 1:] = ids[:, 1:] != ids[:, :-1]
        borders = np.append(np.flatnonzero(new), ids.size)
        lengths = np.diff(borders)
        slots, buckets = _buckets(lengths)
        tensors = (torch.from_numpy(part) for part in (ids, borders.astype(np.int32), slots))
        ids_t, borders_t, slots_t = tensors
        return cls(ids_t, borders_t, int(lengths.max()), slots_t, buckets)

    def to(self, device: torch.device, non_blocking: bool = False) -> DocumentLayout:
        """The same with its tensors there."""
        moved = {
            name: getattr(self, name).to(device, non_blocking=non_blocking) for name in ("ids", "borders", "slots")
        }
        return replace(self, **moved)


def _buckets(lengths: np.ndarray) -> tuple[np.ndarray, tuple[tuple[int, int], ...]]:
    """Documents grouped by length, within a factor of two, each group as wide as its longest.

    Args:
        lengths: `[documents]`.

    Returns:
        `[tokens]` slot of each token, and documents and width of each group.
    """
    kind = np.ceil(np.log2(lengths)).astype(np.int64)
    first_slot, buckets, used = np.empty(len(lengths), dtype=np.int64), [], 0
    for one in np.unique(kind):
        members = np.flatnonzero(kind == one)
        width = max(2, int(lengths[members].max()))  # one query alone is what kernels take for generating
        first_slot[members] = used + width * np.arange(len(members))
        buckets.append((len(members), width))
        used += width * len(members)
    starts = np.cumsum(lengths) - lengths
    return np.arange(lengths.sum()) + np.repeat(first_slot - starts, lengths), tuple(buckets)
