"""One process, or DistributedDataParallel: every rank holds everything."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from trainers.config.options import TrainConfig
from trainers.parallel.backend import trained_names, whole_elements
from trainers.parallel.norm import clip
from trainers.parallel.optimizer import build_optimizer, empty_state, parameter_groups, put_back, state_vectors
from trainers.parallel.shards import WEIGHT, Shard


class Replicated:
    """`single` and `ddp`.

    Args:
        loss: the module that computes the loss; its `.model` is the transformers or peft model.
        accelerator: wraps it as its Accelerate file says.
    """

    def __init__(self, loss: Any, config: TrainConfig, accelerator: Any):
        self.accelerator, self.trained = accelerator, trained_names(loss.model)
        self.tensor = getattr(loss, "tensor", None)  # what tensor parallelism left this rank
        shapes = {name: weight.shape for name, weight in self.trained}
        self.whole = whole_elements(loss.model, self.tensor)
        optimizer = build_optimizer(parameter_groups(self.trained, shapes, config), config)
        self.model, self.optimizer = accelerator.prepare(loss.to(accelerator.device), optimizer)

    def settle(self) -> None:
        """Two passes whose gradients are thrown away, on more than two ranks.

        DDP regroups its buckets once, by the order in which the first gradients come, and with more than two ranks the
        grouping decides the order of their sums: a resumed run would begin in the first groups again, and differ.
        """
        model = self.model
        if not isinstance(model, DistributedDataParallel) or distributed.get_world_size(model.process_group) <= 2:
            return
        device = self.accelerator.device
        ids = torch.zeros(1, 2, dtype=torch.long, device=device)
        place, first = torch.arange(2, device=device)[None], torch.zeros(1, dtype=torch.long, device=device)
        with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.compiler.set_stance("force_eager"):
            for _ in range(2):
                self.model(ids, place, None, first, first)[0].backward()
        self.optimizer.zero_grad(set_to_none=True)

    def accumulate(self, last: bool) -> AbstractContextManager[Any]:
        """Under DDP the gradients are summed over the ranks in the last micro-batch only."""
        return nullcontext() if last else self.accelerator.no_sync(self.model)

    def backward(self, loss: torch.Tensor) -> None:
        """See `Backend`."""
        self.accelerator.backward(loss)

    def clip(self, limit: float) -> torch.Tensor:
        """See `Backend`."""
        if self.tensor is not None:
            self.accelerator.unscale_gradients()
            return clip(self.trained, self.tensor.cuts, self.tensor.group, limit)
        return self.accelerator.clip_grad_norm_([weight for _, weight in self.trained], limit)

    def step(self) -> None:
        """See `Backend`."""
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def drop(self) -> None:
        """See `Backend`; unless fp16's scaler hears of it, it takes the next gradients for scaled back already."""
        if self.accelerator.scaler is not None:
            self.accelerator.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)

    def held(self) -> tuple[int, int, int]:
        """See `Backend`; nothing is cut but by tensor parallelism."""
        here = sum(weight.numel() for weight in self.model.parameters())
        return here, self.whole, 1 if self.tensor is None else self.tensor.size

    def shards(self) -> list[Shard]:
        """See `Backend`; every run is a whole weight, or all that tensor parallelism leaves of it."""
        return [self._shard(name, weight) for name, weight in self.trained]

    def _shard(self, name: str, weight: nn.Parameter) -> Shard:
        state = self.optimizer.state.get(weight, {})
        step = float(state["step"]) if "step" in state else None
        held = {WEIGHT: weight.detach().reshape(-1), **state_vectors(state)}
        cut = self.tensor.cuts.get(name) if self.tensor else None
        if cut is None or self.tensor is None:
            return Shard(name, weight.shape, 0, held, step)
        return Shard(name, cut.shape, 0, held, step, self.tensor.first, cut.box)

    def put_back(self, shards: list[Shard]) -> None:
        """See `Backend`."""
        for (_, weight), shard in zip(self.trained, shards, strict=True):
            put_back(self.optimizer.state.get(weight, {}), shard.tensors)

    def make_state(self, keys: Iterable[str], steps: dict[str, float]) -> None:
        """See `Backend`."""
        for name, weight in self.trained:
            if name in steps:
                self.optimizer.state[weight] = empty_state(self.optimizer, weight, keys, steps[name])
