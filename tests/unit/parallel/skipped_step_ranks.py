"""The ranks of `test_skipped_steps.py`: what a step that must not update leaves behind. Run by `accelerate launch`."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed, nn

from tests.steps import Steps
from trainers.config.options import TrainConfig
from trainers.parallel.backend import Backend
from trainers.parallel.shards import local_part
from trainers.run.errors import TrainingError
from trainers.strategy.strategy import load_strategy, resolve


def snapshot(backend: Backend) -> dict[str, torch.Tensor]:
    """Copies of this rank's weights as the model computes with them, of its shards, and of the updates of each."""
    model: Any = backend.model
    kept = {}
    for name, weight in model.named_parameters():
        kept[f"computed {name}"] = local_part(getattr(weight, "ds_tensor", weight)).clone()  # ZeRO 3 keeps them there
    for shard in backend.shards():
        kept |= {f"{key} {shard.name}": part.clone() for key, part in shard.tensors.items() if part.numel()}
        kept[f"step {shard.name}"] = torch.tensor(shard.step or 0.0)
    return kept


def changed(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> set[str]:
    """The kinds of what differs: `computed`, `model`, `exp_avg`, `exp_avg_sq`, `step`."""
    return {name.split()[0] for name, one in after.items() if name not in before or not torch.equal(before[name], one)}


@contextmanager
def infinite_loss(backend: Backend) -> Iterator[None]:
    """The gradients stay finite."""
    plain = backend.forward_backward

    def spoiled(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        loss, metrics = plain(*args)
        return loss + math.inf, metrics

    backend.forward_backward = spoiled  # type: ignore[method-assign]
    yield
    backend.forward_backward = plain  # type: ignore[method-assign]


@contextmanager
def infinite_gradient(backend: Backend) -> Iterator[None]:
    """On the last rank alone, while every loss stays finite."""

    def spoil(module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
        if output.requires_grad:
            output.register_hook(lambda gradient: gradient * math.inf)

    hooks = []
    if distributed.get_rank() == distributed.get_world_size() - 1:
        linear = [one for one in backend.model.modules() if isinstance(one, nn.Linear)]
        hooks = [one.register_forward_hook(spoil) for one in linear]
    yield
    for hook in hooks:
        hook.remove()


def nothing_changes(taken: Steps, step: int, spoil: Callable[[Backend], Any], refused: bool) -> None:
    backend = taken.context.backend
    before = snapshot(backend)
    with spoil(backend):
        if refused:
            with pytest.raises(TrainingError, match="no weight was updated"):
                taken.take(step)
            backend.skip_step()  # in place of the end of the run
        else:
            assert not taken.take(step).updated
    assert changed(before, snapshot(backend)) == set()


def all_changes(taken: Steps, step: int) -> None:
    before = snapshot(taken.context.backend)
    assert taken.take(step).updated
    assert changed(before, snapshot(taken.context.backend)) == {"computed", "model", "exp_avg", "exp_avg_sq", "step"}


def main(file: str, folder: str) -> None:
    torch.set_num_threads(1)
    given = load_strategy(file)
    options: dict[str, Any] = {
        "model_name_or_path": "embedded", "dataset_name": "embedded", "max_train_samples": 200, "max_length": 64,
        "per_device_train_batch_size": 1, "global_batch_size": 8, "max_steps": 10, "learning_rate": 1e-3,
        "cache_dir": folder, "pp_size": given.pp_size,
    }  # fmt: skip
    config = TrainConfig(**options)
    strategy = resolve(given, given.num_processes, config.mixed_precision, config.pp_size, config.pp_schedule)
    taken = Steps(config, lambda section, step: None, strategy, Path(folder) / "run")
    all_changes(taken, 0)
    nothing_changes(taken, 1, infinite_loss, refused=True)
    nothing_changes(taken, 1, infinite_gradient, refused=True)
    taken.context.config = config.model_copy(update={"non_finite": "skip"})
    nothing_changes(taken, 1, infinite_gradient, refused=False)
    nothing_changes(taken, 2, infinite_loss, refused=True)
    all_changes(taken, 2)
    Path(folder, f"rank-{distributed.get_rank()}").touch()
    distributed.barrier()


if __name__ == "__main__":
    main(*sys.argv[1:])
