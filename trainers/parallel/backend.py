"""What the loop asks of a strategy. One file for each family that Accelerate knows: replicated, fsdp, zero."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import nn

from trainers.parallel.shards import Shard


class Backend(Protocol):
    """A wrapped model with its optimizer.

    Args of every implementation:
        model: the wrapped module, called for the loss.
        optimizer: with `param_groups`, whose rate is set by us.
    """

    model: nn.Module
    optimizer: Any

    def clip(self, limit: float) -> torch.Tensor:
        """Clips to a global norm (infinity: not at all); returns the norm before, a scalar, alike on every rank."""

    def step(self) -> None:
        """Updates the weights and drops the gradients."""

    def drop(self) -> None:
        """Drops the gradients, whose norm is not finite, without an update."""

    def held(self) -> tuple[int, int, int]:
        """Elements on this rank of what is cut, elements of the whole, and into how many parts it is cut."""

    def shards(self) -> list[Shard]:
        """This rank's run of every trained weight, in the same order on every rank."""

    def put_back(self, shards: list[Shard]) -> None:
        """Makes what was written to these shards, all of `shards()`, count where they are copies and not views."""

    def make_state(self, keys: Iterable[str], steps: dict[str, float]) -> None:
        """Gives the optimizer a state of zeros for the weights in `steps`, for a checkpoint to be read into."""


class MicroBatched(Backend, Protocol):
    """One that takes the micro-batches of a step one after the other; a pipeline takes them all at once."""

    def accumulate(self, last: bool) -> AbstractContextManager[Any]:
        """Around forward and backward of one micro-batch; `last` in its step."""

    def backward(self, loss: torch.Tensor) -> None:
        """Gradients of `loss`, averaged over the data-parallel ranks at the latest in the last micro-batch."""


def set_rate(optimizer: Any, rate: float) -> None:
    """The learning rate of every parameter group."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def trained_names(bare: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Trained weights by name, before anything wraps the model."""
    return [(name, weight) for name, weight in bare.named_parameters() if weight.requires_grad]


def whole_elements(model: nn.Module, tensor: Any) -> int:
    """Elements of a whole model.

    Args:
        model: transformers' or peft's, before anything wraps it.
        tensor: what tensor parallelism (`TensorParallel`) has left this rank of it; None: all.
    """
    cuts = tensor.cuts if tensor else {}
    shapes = ((name, weight.shape) for name, weight in model.named_parameters())
    return sum((cuts[name].shape if name in cuts else shape).numel() for name, shape in shapes)
