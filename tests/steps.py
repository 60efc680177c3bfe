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
from trainers.monitor.stragglers import Stragglers
from trainers.parallel.ranks import Ranks
from trainers.parallel.sequence import sequence_shard
from trainers.step import StepResult, TrainContext, train_step
from trainers.strategy.mesh import Mesh, MeshSizes
from trainers.strategy.strategy import Strategy, load_strategy
from trainers.tools.preflight import plan_training

NOTHING_ASKED: Any = SimpleNamespace(poll=lambda: (False, False, False))


class Steps:
    """Optimizer steps of one process, or of this rank.

    Args:
        config: what is trained.
        at: called with section and step wherever the loop notes a heartbeat.
        strategy: that this process was launched with; None for one process.
        folder: of a run, for a strategy.
    """

    def __init__(
        self, config: TrainConfig, at: Callable[[str, int], None], strategy: Strategy | None = None,
        folder: Path = Path(),
    ):  # fmt: skip
        if strategy is None:
            built = Accelerator()
            ranks, mesh = Ranks(built.device), Mesh(MeshSizes())
        else:
            built, ranks, mesh = build.accelerator(config, strategy)
        self.loss = build.module(config, main_rank=True)
        backend, _ = build.backend(config, strategy or load_strategy("single"), built, ranks, mesh, self.loss)
        nothing: Any = None
        self.context = TrainContext(
            config=config, run=nothing, ranks=ranks, mesh=mesh, backend=backend, bare=self.loss.model,
            buffers=[], balancing=self.loss.balancing, matmul_parameters=(0, 0, 0), scaler=None,
            plan=plan_training(config, prepare(config, "train"), mesh.sizes.data, sequence_shard(mesh)),
            eval_rows=None, checkpoints=_stub(written=lambda: True, extra={}), metrics=None,
            heartbeat=_stub(at=lambda section, step, **allowed: at(section, step)),
            report=nothing, show=nothing, launcher=0, clock=nothing,
            stragglers=Stragglers(built.device, local_forward=True), profiler=nothing,
        )  # fmt: skip

    def take(self, step: int) -> StepResult:
        """The step of this number, counted from 0."""
        return train_step(self.context, self.context.plan.batch(step, self.context.mesh.data_rank), step, NOTHING_ASKED)


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
