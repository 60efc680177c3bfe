"""`Backend`: the interface between the training loop and a strategy.

Implementations: `replicated`, `fsdp`, `zero` and `pipeline`, one file each.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from trainers.model.reachability import silent_weights
from trainers.objectives.sampling import Sampled, SampleRequest
from trainers.parallel.optimizer import empty_state, state_vectors, update_average, write_state_vectors
from trainers.parallel.schedule_free import ScheduleFreeAdamW
from trainers.parallel.shards import WEIGHT, Shard, local_part

if TYPE_CHECKING:
    from trainers.data.micro_batch import MicroBatch
    from trainers.parallel.tensor import TensorParallel

Beat = Callable[[str], None]
"""Called with the name of each section of a step as it begins, for the heartbeat."""


def no_beat(section: str) -> None:
    """A `Beat` that does nothing."""


class Backend(ABC):
    """A wrapped model and its optimizer.

    The default methods fit strategies that run the micro-batches of a step one after another and whose optimizer keeps
    one state per weight. `Pipelined` overrides the former, `Zero` the latter.

    Attributes:
        model: the wrapped module; calling it returns the loss.
        optimizer: has `param_groups`, whose learning rate the loop sets.
        device: the device of this rank.
        trained: trained weights on this rank, with their transformers or peft names.
        shapes: shapes of the trained weights by name, before FSDP or ZeRO shards them (but after tensor parallelism).
        tensor: the tensor-parallel group and this rank's slices; None without tensor parallelism.
        starts: index of this rank's first element in each flattened weight; 0 for missing names.
        primary: False if another rank holds the same shards and saves them.
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
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Runs forward and backward for this rank's share of a step; averages gradients over the `grad_group`.

        Args:
            micro_batches: the micro-batches of the step.
            shares: factor on the summed loss of each micro-batch before its backward pass.
            beat: called with `forward` and `backward`.
            first_forward: context manager around the first forward pass, to time it.
            expert_weights: `[experts]` weights of a load-balancing loss.

        Returns:
            The summed loss of the micro-batches, without the factors (an fp32 scalar), and their summed metrics
            `[metrics]`, if the objective has any in training. Does not synchronize with the host.
        """
        total = torch.zeros((), dtype=torch.float32, device=self.device)
        metrics = torch.zeros(0, device=self.device)
        for index, (micro_batch, share) in enumerate(zip(micro_batches, shares, strict=True)):
            with self.accumulate(last=index == len(micro_batches) - 1):
                beat("forward")
                with first_forward if first_forward and index == 0 else nullcontext():
                    loss, values = self.model(**micro_batch.inputs(self.device, expert_weights))
                total += loss.detach()
                if micro_batch.scored is not None or micro_batch.sources is not None:
                    metrics = values if index == 0 else metrics + values
                beat("backward")
                self.backward(loss * share)
        return total, metrics

    def accumulate(self, last: bool) -> AbstractContextManager[Any]:
        """Context manager around forward and backward of one micro-batch. Default: reduce gradients in every one.

        Args:
            last: whether it is the last micro-batch of its step.
        """
        return nullcontext()

    def backward(self, loss: torch.Tensor) -> None:
        """Accumulates the gradients of `loss`."""
        loss.backward()

    @abstractmethod
    def clip_grad_norm(self, limit: float) -> torch.Tensor:
        """Clips the gradients to a global norm, either immediately or in `step`. Does not update weights.

        Args:
            limit: maximum norm; infinity disables clipping.

        Returns:
            The norm before clipping, an fp32 scalar, equal on every rank. Does not synchronize with the host.
        """

    def step(self) -> None:
        """Updates the weights and clears the gradients. Call after `clip_grad_norm`."""
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def skip_step(self) -> None:
        """Clears the gradients without changing weights or optimizer state. Call in place of `step`."""
        self.optimizer.zero_grad(set_to_none=True)

    def update_average(self, decay: float) -> None:
        """Updates the moving average of the weights. Call after a `step` that changed them.

        Args:
            decay: share of the average that stays.
        """
        update_average(self._updated(), decay)

    def _updated(self) -> Iterator[tuple[torch.Tensor, dict[str, Any]]]:
        """What the optimizer updates on this rank: weights, and their states."""
        for _, weight in self.trained:
            yield local_part(weight), self.optimizer.state.get(weight, {})

    @contextmanager
    def evaluated_weights(self) -> Iterator[None]:
        """While active, the weights are those to evaluate: for schedule-free AdamW others than it trains."""
        optimizer = getattr(self.optimizer, "optimizer", self.optimizer)
        before = optimizer.to_average() if isinstance(optimizer, ScheduleFreeAdamW) else []
        try:
            if before:
                self.reshard()
            yield
        finally:
            for value, trained in before:
                value.copy_(trained)
            if before:
                self.reshard()

    def reshard(self) -> None:
        """Frees the weights of other ranks that a wrapper has left gathered, so that it gathers changed ones."""
        return

    @torch.no_grad()
    def evaluate(self, micro_batches: Iterable[MicroBatch], beat: Beat = no_beat) -> torch.Tensor:
        """Evaluates micro-batches.

        Args:
            micro_batches: this rank's share of the evaluation data.
            beat: called with `evaluation` before each micro-batch.

        Returns:
            `[1 + metrics]` in fp64: summed loss and summed metrics, such as the number of correctly predicted tokens.
        """
        sums = torch.zeros(1, dtype=torch.float64)
        for micro_batch in micro_batches:
            beat("evaluation")
            loss, metrics = self.model(**micro_batch.inputs(self.device))
            sums = sums + torch.cat([loss.double().reshape(1).cpu(), metrics.double().reshape(-1).cpu()])
        return sums

    @torch.no_grad()
    def log_probs(
        self, micro_batches: Iterable[MicroBatch], beat: Beat = no_beat
    ) -> Iterator[tuple[np.ndarray, torch.Tensor]]:
        """Computes the log-probability of each document, summed over its trained tokens on this rank.

        Args:
            micro_batches: this rank's share of the data.
            beat: called with `reference` before each micro-batch.

        Yields:
            For each micro-batch: `[documents]` their numbers in the data set, and `[documents]` fp32 on the CPU.
        """
        for micro_batch in micro_batches:
            beat("reference")
            summed, _ = self.model(**micro_batch.inputs(self.device), only_log_probs=True)
            assert micro_batch.scored is not None
            yield micro_batch.scored.numbers, summed.float().cpu()

    @torch.no_grad()
    def label_log_probs(
        self, micro_batches: Iterable[MicroBatch], beat: Beat = no_beat
    ) -> Iterator[tuple[np.ndarray, list[np.ndarray]]]:
        """Computes the log-probability of each label, where no rank has labels of the same rows.

        Args:
            micro_batches: this rank's share of the data.
            beat: called with `sampling` before each micro-batch.

        Yields:
            For each micro-batch: `[documents]` their numbers in the data set, and fp32 `[labels]` of each document.
        """
        for micro_batch in micro_batches:
            beat("sampling")
            values, _ = self.model(**micro_batch.inputs(self.device), per_label=True)
            assert micro_batch.scored is not None
            numbers, of_label = micro_batch.scored.numbers, micro_batch.scored.of_label.numpy()
            borders = np.searchsorted(of_label, np.arange(1, len(numbers)))
            yield numbers, np.split(values.float().cpu().numpy(), borders)[: len(numbers)]

    @torch.no_grad()
    def sample(self, request: SampleRequest) -> Sampled:
        """Samples answers to this rank's prompts. Collective, if the request is synchronized."""
        nothing = torch.zeros(0, dtype=torch.int64, device=self.device)
        answers: Sampled = self.model(nothing, nothing, None, nothing, nothing, request=request)
        return answers

    def extra_metrics(self, seconds: float) -> dict[str, float]:
        """Metrics specific to this strategy, such as a pipeline's bubble. Collective.

        Args:
            seconds: training time since the last metrics row.
        """
        return {}

    def finish(self) -> None:
        """Reports what was measured over the whole run, when training has ended. Collective."""
        return

    def warm_up_buckets(self) -> None:
        """Runs what a wrapper does only in its first passes, so that a resumed run matches an uninterrupted one."""
        return

    @abstractmethod
    def local_and_total_numel(self) -> tuple[int, int, int]:
        """Sharded elements on this rank, sharded elements in total, and the number of ranks that share them."""

    def shards(self) -> list[Shard]:
        """This rank's span of every trained weight, in the same order on every rank."""
        return [self._weight_shard(name, weight) for name, weight in self.trained]

    def _weight_shard(self, name: str, weight: nn.Parameter) -> Shard:
        state = self.optimizer.state.get(weight, {})
        step = float(state["step"]) if "step" in state else None
        tensors = {WEIGHT: local_part(weight).reshape(-1), **state_vectors(state)}
        return self._shard(name, self.starts.get(name, 0), tensors, step)

    def _shard(self, name: str, start: int, tensors: dict[str, torch.Tensor], step: float | None) -> Shard:
        """Builds the shard of a weight, or of this rank's tensor-parallel slice of it.

        Weights that tensor parallelism does not split are saved by the first tensor-parallel rank only.
        """
        part = self.tensor.slices.get(name) if self.tensor else None
        if part is not None:
            return Shard(name, part.shape, start, tensors, step, self.primary, part.slices)
        primary = self.primary and (self.tensor is None or self.tensor.rank == 0)
        return Shard(name, self.shapes[name], start, tensors, step, primary)

    def write_shards(self, shards: list[Shard]) -> None:
        """Applies changes to the tensors of `shards` where those are copies of the state, not views.

        Args:
            shards: the full result of `shards()`, modified in place.
        """
        written = {shard.name: shard for shard in shards}
        for name, weight in self.trained:
            write_state_vectors(self.optimizer.state.get(weight, {}), written[name].tensors)

    def shards_of(self, names: Sequence[str], within: Sequence[torch.Tensor] | None = None) -> list[Shard]:
        """This rank's spans of some trained weights, without a collective; an empty span where it has none.

        Args:
            names: names of the weights, equal on every rank.
            within: leave out weights that are not in these parameters, if the optimizer updates them one by one.
        """
        local = dict(self.trained)
        return [
            self._weight_shard(name, local[name])
            if name in local
            else Shard(name, self.shapes[name], 0, {WEIGHT: torch.empty(0)})
            for name in names
        ]

    def init_optimizer_state(self, keys: dict[str, list[str]], steps: dict[str, float]) -> None:
        """Creates zero-filled optimizer state, to be overwritten from a checkpoint.

        Args:
            keys: names of each weight's state tensors.
            steps: number of updates so far for each weight that has state, by name.
        """
        for name, weight in self.trained:
            if name in steps:
                self.optimizer.state[weight] = empty_state(self.optimizer, weight, keys[name], steps[name])


def zero_missing_gradients(weights: Iterable[tuple[str, nn.Parameter]]) -> None:
    """Gives weights that no token of a step used, such as those of an expert, a gradient of zeros, on every strategy.

    FSDP 1 does so by itself. Without, AdamW would leave such a weight alone under some strategies and decay it, and
    continue its momentum, under others.
    """
    for _, weight in weights:
        if weight.grad is None:
            weight.grad = torch.zeros_like(weight)


def set_rate(optimizer: Any, rate: float) -> None:
    """Sets the learning rate of every parameter group to `rate` times the group's own factor."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get("rate_factor", 1.0)


def trained_weights(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Trained weights of an unwrapped model, with their names."""
    return [(name, weight) for name, weight in model.named_parameters() if weight.requires_grad]


def total_numel(loss: Any, tensor: TensorParallel | None) -> int:
    """Number of elements in the full model, and in its teacher if it has one.

    Args:
        loss: the loss module, before its weights are sharded.
        tensor: this rank's tensor-parallel slices of the model; None if it is not split.
    """
    models = [(loss.model, tensor)]
    if loss.teacher is not None:
        models.append((loss.teacher.model, loss.teacher.tensor))
    total = 0
    for model, parts in models:
        slices = parts.slices if parts else {}
        total += sum(slices.get(name, weight).shape.numel() for name, weight in model.named_parameters())
    return total


def unsplit_numel(loss: Any, tensor: TensorParallel | None) -> int:
    """Number of elements on this rank in weights that no text reaches, which tensor parallelism leaves whole.

    Args:
        loss, tensor: as for `total_numel`; the weights may be sharded by FSDP.
    """
    return sum(local_part(weight).numel() for weight in silent_weights(loss.base)) if tensor is not None else 0
