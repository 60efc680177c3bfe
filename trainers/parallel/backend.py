"""What the loop asks of a strategy: `Backend`. One file for each kind: replicated, fsdp, zero, pipeline."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from trainers.parallel.optimizer import empty_state, state_vectors, write_state_vectors
from trainers.parallel.shards import WEIGHT, Shard, local_part

if TYPE_CHECKING:
    from trainers.data.batches import MicroBatch
    from trainers.parallel.tensor import TensorParallel

Beat = Callable[[str], None]
"""Called with the section of the step that begins, for the heartbeat."""


def no_beat(section: str) -> None:
    """A `Beat` that nobody hears."""


class Backend(ABC):
    """A wrapped model with its optimizer.

    The methods that are written out here suit a strategy that runs the micro-batches of a step one after another, and
    whose optimizer keeps a state for each weight. A pipeline has its own way of the first, ZeRO of the second.

    Attributes:
        model: the wrapped module, called for the loss.
        optimizer: with `param_groups`, whose rate the loop sets.
        device: of this rank.
        trained: trained weights here, by the names that transformers or peft gives them.
        shapes: of the trained weights, by name; without tensor parallelism, of the full ones.
        tensor: what tensor parallelism left this rank of the model, None without.
        starts: index of this rank's first element in each flattened weight; 0 for a name that is missing.
        primary: False where another rank holds the same shards.
    """

    model: Any
    optimizer: Any
    device: torch.device
    trained: list[tuple[str, nn.Parameter]]
    shapes: dict[str, torch.Size]
    tensor: TensorParallel | None
    starts: dict[str, int]
    primary: bool

    def forward_backward(
        self,
        micro_batches: Sequence[MicroBatch],
        shares: Sequence[float],
        beat: Beat = no_beat,
        first_forward: AbstractContextManager[Any] | None = None,
        expert_weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Forward and backward of this rank's share of a step; the gradients are averaged over the `grad_group`.

        Args:
            micro_batches: of the step.
            shares: what the summed loss of each is multiplied with before its gradients are taken.
            beat: called with `forward` and `backward`.
            first_forward: around the first forward pass, to time it.
            expert_weights: `[experts]` of a load-balancing loss.

        Returns:
            The summed loss of the micro-batches, not multiplied, an fp32 scalar. No value is read by the host.
        """
        total = torch.zeros((), dtype=torch.float32, device=self.device)
        for index, (micro_batch, share) in enumerate(zip(micro_batches, shares, strict=True)):
            with self.accumulate(last=index == len(micro_batches) - 1):
                beat("forward")
                with first_forward if first_forward and index == 0 else nullcontext():
                    loss, _ = self.model(**micro_batch.inputs(self.device, expert_weights))
                total += loss.detach()
                beat("backward")
                self.backward(loss * share)
        return total

    def accumulate(self, last: bool) -> AbstractContextManager[Any]:
        """Around forward and backward of one micro-batch; `last` in its step. Here: gradients are reduced in each."""
        return nullcontext()

    def backward(self, loss: torch.Tensor) -> None:
        """Adds the gradients of `loss`."""
        loss.backward()

    @abstractmethod
    def clip_grad_norm(self, limit: float) -> torch.Tensor:
        """Clips the gradients to a global norm, now or in `step`; updates nothing.

        Args:
            limit: the largest norm; infinity: not clipped.

        Returns:
            The norm before, an fp32 scalar, alike on every rank. No value is read by the host.
        """

    def step(self) -> None:
        """Updates the weights, and drops the gradients. After `clip_grad_norm`."""
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def skip_step(self) -> None:
        """In place of `step`: drops the gradients; no weight changes, and nothing that the optimizer keeps."""
        self.optimizer.zero_grad(set_to_none=True)

    @torch.no_grad()
    def evaluate(self, micro_batches: Iterable[MicroBatch], beat: Beat = no_beat) -> torch.Tensor:
        """Summed loss and tokens predicted right of some micro-batches: `[2]` in fp64.

        Args:
            beat: called with `evaluation` before each one.
        """
        sums = torch.zeros(2, dtype=torch.float64)
        for micro_batch in micro_batches:
            beat("evaluation")
            loss, correct = self.model(**micro_batch.inputs(self.device))
            sums += torch.stack([loss.double().cpu(), correct.double().cpu()])
        return sums

    def extra_metrics(self, seconds: float) -> dict[str, float]:
        """What only this strategy can say in a metrics row, such as a pipeline's bubble. Collective.

        Args:
            seconds: of training since the last row.
        """
        return {}

    def warm_up_buckets(self) -> None:
        """Before the first step: lets go by what only a wrapper's first passes do, so that a resumed run is alike."""
        return

    @abstractmethod
    def local_and_total_numel(self) -> tuple[int, int, int]:
        """Elements on this rank of what is sharded, elements of all of it, and the number of ranks that share it."""

    def shards(self) -> list[Shard]:
        """This rank's span of every trained weight, in the same order on every rank."""
        return [self._weight_shard(name, weight) for name, weight in self.trained]

    def _weight_shard(self, name: str, weight: nn.Parameter) -> Shard:
        state = self.optimizer.state.get(weight, {})
        step = float(state["step"]) if "step" in state else None
        tensors = {WEIGHT: local_part(weight).reshape(-1), **state_vectors(state)}
        return self._shard(name, self.starts.get(name, 0), tensors, step)

    def _shard(self, name: str, start: int, tensors: dict[str, torch.Tensor], step: float | None) -> Shard:
        """A span of a weight, or of what tensor parallelism left of it; what it left alone, its first rank saves."""
        part = self.tensor.slices.get(name) if self.tensor else None
        if part is not None:
            return Shard(name, part.shape, start, tensors, step, self.primary, part.slices)
        primary = self.primary and (self.tensor is None or self.tensor.rank == 0)
        return Shard(name, self.shapes[name], start, tensors, step, primary)

    def write_shards(self, shards: list[Shard]) -> None:
        """Makes what was written to these shards, all of `shards()`, count where they are copies and not views."""
        written = {shard.name: shard for shard in shards}
        for name, weight in self.trained:
            write_state_vectors(self.optimizer.state.get(weight, {}), written[name].tensors)

    def init_optimizer_state(self, keys: Sequence[str], steps: dict[str, float]) -> None:
        """Gives the optimizer a state of zeros for the weights in `steps`, for a checkpoint to be read into.

        Args:
            keys: of the state's tensors.
            steps: updates of each weight so far, by name.
        """
        for name, weight in self.trained:
            if name in steps:
                self.optimizer.state[weight] = empty_state(self.optimizer, weight, keys, steps[name])


def set_rate(optimizer: Any, rate: float) -> None:
    """The learning rate of every parameter group."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def trained_weights(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Trained weights by name, before anything wraps the model."""
    return [(name, weight) for name, weight in model.named_parameters() if weight.requires_grad]


def total_numel(model: nn.Module, tensor: TensorParallel | None) -> int:
    """Elements of the full model.

    Args:
        model: transformers' or peft's, before anything wraps it.
        tensor: what tensor parallelism has left this rank of it; None: all.
    """
    slices = tensor.slices if tensor else {}
    return sum(slices.get(name, weight).shape.numel() for name, weight in model.named_parameters())
