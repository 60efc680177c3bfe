"""Real training steps in this process: `train_step` on a real model and data, what comes after it left out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState

from trainers import build
from trainers.config.options import TrainConfig
from trainers.data.prepare import prepare
from trainers.loop import Job, StepResult, train_step
from trainers.monitor.stragglers import Pace
from trainers.parallel.ranks import Ranks
from trainers.strategy.mesh import Mesh, MeshSizes
from trainers.strategy.strategy import load_strategy
from trainers.tools.preflight import plan_training

NOTHING_ASKED: Any = SimpleNamespace(asked=lambda: (False, False, False))


class Steps:
    """Optimizer steps of one process.

    Args:
        config: what is trained.
        at: called with section and step wherever the loop notes a heartbeat.
    """

    def __init__(self, config: TrainConfig, at: Callable[[str, int], None]):
        made = Accelerator()
        self.loss = build.module(config, main_rank=True)
        ranks, mesh = Ranks(made.device), Mesh(MeshSizes())
        backend, _ = build.backend(config, load_strategy("single"), made, ranks, mesh, self.loss)
        nothing: Any = None
        self.job = Job(
            config=config, run=nothing, ranks=ranks, mesh=mesh, backend=backend, bare=self.loss.model,
            buffers=[], balancing=self.loss.balancing, scaler=None,
            plan=plan_training(config, prepare(config, "train"), 1, pad_token_id=0),
            eval_rows=None, checkpoints=_stub(written=lambda: True), heartbeat=_stub(at=at), metrics=None,
            report=nothing, show=nothing, launcher=0, clock=nothing, pace=Pace(made.device, alone_in_forward=True),
        )  # fmt: skip

    def take(self, step: int) -> StepResult:
        """The step of this number, counted from 0."""
        return train_step(self.job, self.job.plan.batch(step, 0), step, NOTHING_ASKED)


def _stub(**attributes: Any) -> Any:
    return SimpleNamespace(**attributes)


@contextmanager
def steps(
    folder: Path, accumulation: int, packing: bool, at: Callable[[str, int], None] = lambda section, step: None,
    **changes: Any,
) -> Iterator[Steps]:  # fmt: skip
    """Steps of `accumulation` micro-batches, of the embedded model unless that is changed.

    Args:
        folder: for the data cache.
        packing: packed rows.
        at: see `Steps`.
        changes: of the options.
    """
    options: dict[str, Any] = {
        "model_name_or_path": "embedded", "dataset_name": "embedded", "max_train_samples": 400, "method": "lora",
        "max_length": 128, "packing": packing, "per_device_train_batch_size": 1, "global_batch_size": accumulation,
        "max_steps": 10, "cache_dir": str(folder),
    }  # fmt: skip
    config = TrainConfig(**{**options, **changes})
    try:
        yield Steps(config, at)
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)  # the next one in this process is another
        GradientState._reset_state()
