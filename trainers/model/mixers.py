"""Keeps packed documents apart in layers that mix tokens without attention: Mamba, linear attention, convolutions.

Their fused kernels take the borders of documents, but are for GPUs, each family's with arguments of its own; what runs
without them ignores borders. Here each document gets a row of its own, padded on the right, where causal layers do not
look, and the layer's own forward pass runs on those rows: on any device, for any family, with or without the kernels.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import nn

from trainers.data.layout import MetadataRoute
from trainers.model.attention import by_document
from trainers.objectives.output_head import decoder_of


def split_mixers(model: Any) -> None:
    """Patches the mixing layers of a model to see one document at a time, as `MetadataRoute.current` lists them.

    They are found by their depthwise convolution over the sequence, and get the attribute `sees_documents`, by which
    the loss knows them.

    Args:
        model: a transformers causal language model.
    """
    for layer in (decoder_of(model) or model).modules():
        if any(map(_is_depthwise, layer.children())):
            layer.forward, layer.sees_documents = MethodType(_forward, layer), True


def _is_depthwise(module: nn.Module) -> bool:
    return isinstance(module, nn.Conv1d) and module.groups == module.in_channels > 1


@torch.compiler.disable  # the number of documents and their lengths differ in each micro-batch
def _forward(self: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Runs the layer's own forward pass on each document of `[batch, sequence, hidden size]` states.

    ZAYA's layer returns queries, keys and values, each `[batch, sequence, heads, head size]`.
    """
    layout = MetadataRoute.current.layout if MetadataRoute.current is not None else None
    if layout is None:
        return type(self).forward(self, hidden_states, *args, **kwargs)
    sizes: list[torch.Size] = []

    def run(rows: torch.Tensor) -> torch.Tensor:
        output: Any = type(self).forward(self, rows, *args, **kwargs)
        if isinstance(output, torch.Tensor):
            return output
        sizes[:] = [part.shape[2:] for part in output]
        return torch.cat([part.flatten(2) for part in output], dim=-1)

    mixed = by_document(run, layout, hidden_states.flatten(0, 1))
    if not sizes:
        return mixed.view_as(hidden_states)
    parts = mixed.split([size.numel() for size in sizes], dim=-1)
    return tuple(part.reshape(*hidden_states.shape[:2], *size) for part, size in zip(parts, sizes, strict=True))
