"""A single process, or DistributedDataParallel: every rank holds all weights, or under ep all but some experts."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from trainers.config.options import TrainConfig
from trainers.model.reachability import reach_noted
from trainers.parallel.backend import (
    Backend,
    Beat,
    no_beat,
    total_numel,
    trained_weights,
    unsplit_numel,
    zero_missing_gradients,
)
from trainers.parallel.fill import fill
from trainers.parallel.norm import clip_grad_norm
from trainers.parallel.optimizer import build_optimizer, parameter_groups

if TYPE_CHECKING:
    from trainers.data.micro_batch import MicroBatch


class Replicated(Backend):
    """`single`, `ddp`, `tp` and `ep`.

    Args:
        loss: the module that computes the loss; its `.model` is the transformers or peft model.
        config: the run's config.
        accelerator: wraps `loss` as its Accelerate file specifies.
    """

    def __init__(self, loss: Any, config: TrainConfig, accelerator: Any):
        self.accelerator, self.device = accelerator, accelerator.device
        fill(loss, self.device)
        self.trained = trained_weights(loss.model)
        self.tensor = getattr(loss, "tensor", None)
        self.shapes = {name: weight.shape for name, weight in self.trained}
        self.starts = {}
        self.primary = self.tensor is None or self.tensor.first
        self.total_numel, self.unsplit = total_numel(loss, self.tensor), unsplit_numel(loss, self.tensor)
        if accelerator.ddp_handler is not None:  # it costs a walk through the graph of each step
            accelerator.ddp_handler.find_unused_parameters = reach_noted(loss.base).varies
        self.experts = self._own_experts()
        slices = self.tensor.slices if self.tensor else {}
        self.expert_numel = sum(weight.numel() for name, weight in loss.model.named_parameters() if name in slices)
        # Other ranks have other experts: DDP must neither copy rank 0's to them nor sum their gradients.
        ignored = [f"model.{name}" for name in self.tensor.slices] if self.tensor and self.tensor.by_expert else []
        if loss.teacher is not None:  # frozen, and read from the same files on every rank
            ignored += [f"teacher.{name}" for name in loss.teacher.state_dict(keep_vars=True)]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(loss, ignored)
        optimizer = build_optimizer(parameter_groups(self.trained, self.shapes, config), config)
        self.model, self.optimizer = accelerator.prepare(loss.to(self.device), optimizer)

    def _own_experts(self) -> list[nn.Parameter]:
        """Trained experts that ranks of other groups have as well, and those of this rank's group do not."""
        if self.tensor is None or not self.tensor.by_expert:
            return []
        return [weight for name, weight in self.trained if name in self.tensor.slices]

    def forward_backward(
        self,
        micro_batches: Sequence[MicroBatch],
        shares: Sequence[float],
        beat: Beat = no_beat,
        first_forward: AbstractContextManager[Any] | None = None,
        expert_weights: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Backend`; averages the gradients of divided experts, which DDP leaves alone, once per step."""
        sums = super().forward_backward(micro_batches, shares, beat, first_forward, expert_weights)
        self._average_experts()
        return sums

    @torch.no_grad()
    def _average_experts(self) -> None:
        """Averages over all ranks: the gradient of an expert already sums the tokens of its group."""
        zero_missing_gradients(("", weight) for weight in self.experts)
        for weight in self.experts:
            gradient: Any = weight.grad
            gradient.div_(self.accelerator.num_processes)
            if self.tensor is not None and self.tensor.copies is not None:
                distributed.all_reduce(gradient, group=self.tensor.copies)

    def warm_up_buckets(self) -> None:
        """Runs two passes and discards their gradients, on more than two ranks.

        DDP rebuilds its buckets once, in the order in which the first gradients arrive. With more than two ranks the
        buckets decide the summation order, so a resumed run, starting again from the initial buckets, would differ.
        """
        model = self.model
        if not isinstance(model, DistributedDataParallel) or distributed.get_world_size(model.process_group) <= 2:
            return
        device = self.device
        ids = torch.zeros(1, 2, dtype=torch.long, device=device)
        positions = torch.arange(2, device=device)[None]
        first = torch.zeros(1, dtype=torch.long, device=device)
        with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.compiler.set_stance("force_eager"):
            for _ in range(2):
                self.model(ids, positions, None, first, first)[0].backward()
        self.optimizer.zero_grad(set_to_none=True)

    def accumulate(self, last: bool) -> AbstractContextManager[Any]:
        """See `Backend`; DDP reduces gradients in the last micro-batch only."""
        return nullcontext() if last else self.accelerator.no_sync(self.model)

    def backward(self, loss: torch.Tensor) -> None:
        """See `Backend`."""
        self.accelerator.backward(loss)

    def clip_grad_norm(self, limit: float) -> torch.Tensor:
        """See `Backend`."""
        zero_missing_gradients(self.trained)
        if self.tensor is not None:
            self.accelerator.unscale_gradients()
            return clip_grad_norm(self.trained, self.tensor.slices, self.tensor.group, limit)
        return self.accelerator.clip_grad_norm_([weight for _, weight in self.trained], limit)

    def skip_step(self) -> None:
        """See `Backend`; also updates the fp16 scaler, which would otherwise treat the next gradients as unscaled."""
        if self.accelerator.scaler is not None:
            self.accelerator.scaler.update()
        super().skip_step()

    def local_and_total_numel(self) -> tuple[int, int, int]:
        """See `Backend`; tensor parallelism shards nearly all weights here, expert parallelism the experts only."""
        if self.tensor is not None and self.tensor.by_expert:
            slices = self.tensor.slices
            total = sum(part.shape.numel() for part in slices.values())
            return self.expert_numel, total, self.tensor.size
        local = sum(weight.numel() for weight in self.model.parameters())
        return local - self.unsplit, self.total_numel - self.unsplit, 1 if self.tensor is None else self.tensor.size
