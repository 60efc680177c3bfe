"""Length-dependent rotary frequencies (longrope, dynamic NTK), chosen by the length of each document.

transformers chooses them by the longest position in the micro-batch, or for dynamic ones the longest seen so far, so
that a document would be affected by the others next to it.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map


def choose_by_document(model: nn.Module) -> None:
    """Patches the length-dependent rotary embeddings of a model to choose frequencies by document.

    They get the attribute `needs_positions`, by which the loss knows to hand them the positions of unpacked rows too.
    """
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        kinds = kinds.values() if isinstance(kinds, dict) else [kinds]
        if any(isinstance(kind, str) and _depends_on_length(kind) for kind in kinds):
            module.forward = MethodType(_forward, module)
            module.needs_positions = True  # type: ignore[assignment]


def _depends_on_length(kind: str) -> bool:
    return kind == "longrope" or "dynamic" in kind  # the same test as in transformers' `dynamic_rope_update`


@torch.no_grad()
def _forward(
    self: Any, x: torch.Tensor, position_ids: torch.Tensor, layer_type: str | None = None
) -> tuple[torch.Tensor, ...]:
    """Runs the module's own forward pass once for each set of frequencies that the documents need, and merges them.

    Args:
        x: determines dtype and device.
        position_ids: `[batch, sequence]`, restarting at 0 in each document.
        layer_type: type of the layer, for models whose frequencies differ by layer type.

    Returns:
        Cosines and sines, each `[batch, sequence, rotary size]`.

    Raises:
        ValueError: if positions have more than two dimensions.
    """
    more = () if layer_type is None else (layer_type,)
    kind = self.rope_type if layer_type is None else self.rope_type[layer_type]
    if not _depends_on_length(kind):
        return type(self).forward(self, x, position_ids, *more)
    if position_ids.ndim != 2:
        raise ValueError(f"its {kind} rotary embedding takes positions of {position_ids.ndim} dimensions")
    # Tokens of a group share their frequencies: longrope has two sets, dynamic NTK one per length beyond the original.
    lengths = document_lengths(position_ids)
    if kind == "longrope":
        rope = self.config.rope_parameters
        rope = rope if layer_type is None else rope[layer_type]
        groups = (lengths > rope["original_max_position_embeddings"]).long()
    else:
        groups = lengths.where(lengths > self.original_max_seq_len, 0)
    merged: Any = None
    for group in groups.unique().tolist():
        inside = groups == group
        if kind != "longrope":
            type(self).forward(self, x, position_ids.new_zeros(1, 1), *more)  # reset the longest length seen
        rotation = type(self).forward(self, x, position_ids.where(inside, 0), *more)
        merged = rotation if merged is None else _merge(inside, rotation, merged)
    return merged


def _merge(inside: torch.Tensor, new: Any, old: Any) -> Any:
    """Merges trees of `[batch, sequence, ...]` tensors: `new` where `inside` is True, `old` elsewhere."""

    def choose(inner: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return torch.where(inside.reshape(inside.shape + (1,) * (inner.ndim - 2)), inner, other)

    return tree_map(choose, new, old)


def document_lengths(position_ids: torch.Tensor) -> torch.Tensor:
    """Length of each token's document, `[batch, sequence]`, from positions that restart at 0 in each document."""
    documents = (position_ids == 0).cumsum(1)  # from 1; 0 continues an earlier call, as in generation
    room = position_ids.new_zeros(position_ids.shape[0], position_ids.shape[1] + 1)
    longest = room.scatter_reduce(1, documents, position_ids, "amax")
    return longest.gather(1, documents) + 1
