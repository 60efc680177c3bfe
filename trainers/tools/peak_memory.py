"""Tracks the peak bytes of the tensors of a forward and backward pass, which may be fake."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from trainers.run.host_memory import MAPPED


@dataclass
class Peaks:
    """Peak bytes of a micro-batch's tensors.

    Args:
        full: While every layer's activations are held: until the last layer's backward pass is over.
        later: After that, such as when the embedding's gradient is added to the head's.
        heap: As `full`, of tensors smaller than `MAPPED` alone.
    """

    full: int = 0
    later: int = 0
    heap: int = 0

    @property
    def highest(self) -> int:
        return max(self.full, self.later)


class PeakMemoryMode(TorchDispatchMode):
    """Tracks the current and the peak bytes of live tensors created inside the context.

    Args:
        known: Existing tensors, which are not counted.
    """

    def __init__(self, known: Iterable[torch.Tensor]):
        super().__init__()
        self.now, self.in_heap, self.peaks, self.turned = 0, 0, Peaks(), False
        self._seen = WeakIdKeyDictionary({tensor.untyped_storage(): True for tensor in known})

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an operator, and counts new storages among its outputs."""
        run = _grouped_product if func is torch.ops.aten._grouped_mm.default else func
        result = run(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._see(leaf.untyped_storage())
        return result

    def _see(self, storage: Any) -> None:
        if storage in self._seen:
            return
        self._seen[storage] = True
        self._add(storage.nbytes(), 1)
        weakref.finalize(storage, self._add, storage.nbytes(), -1)

    def _add(self, size: int, sign: int) -> None:
        peaks = self.peaks
        self.now += sign * size
        if self.turned:
            peaks.later = max(peaks.later, self.now)
            return
        self.in_heap += sign * size * (size < MAPPED)
        peaks.full, peaks.heap = max(peaks.full, self.now), max(peaks.heap, self.in_heap)

    def watch(self, layer: nn.Module) -> None:
        """Ends `Peaks.full` when a layer's backward pass is over."""

        def turn(gradient: torch.Tensor) -> None:
            self.turned = True

        def hook(module: nn.Module, inputs: Any, kwargs: dict[str, Any]) -> None:
            hidden = inputs[0] if inputs else kwargs.get("hidden_states")
            if isinstance(hidden, torch.Tensor) and hidden.requires_grad:
                hidden.register_hook(turn)

        layer.register_forward_pre_hook(hook, with_kwargs=True)


def _grouped_product(left: torch.Tensor, right: torch.Tensor, ends: Any = None, *_: Any, **__: Any) -> torch.Tensor:
    """Stands in for the product of tokens grouped by expert, whose fake in torch takes bf16 only."""
    if left.ndim == right.ndim == 2:  # the gradient of the experts' weights
        return left.new_empty(len(ends), left.shape[0], right.shape[1])
    return left.new_empty(left.shape[0], right.shape[-1])
