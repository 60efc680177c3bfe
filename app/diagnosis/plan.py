"""What a run was asked to do, which its remedies start from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from app.hardware import find_gpus
from app.runs.runs import gpu_ids, saved_step
from trainers.config.mistakes import ConfigError
from trainers.config.options import TrainConfig
from trainers.config.parse import Request
from trainers.run.compatibility import STRUCTURE, changes_since_save
from trainers.run.folder import RunFolder
from trainers.strategy.strategy import Strategy, load_strategy, refusal, resolve

Fits = Callable[[Sequence[TrainConfig], Strategy], Sequence[bool | None]]
"""Whether the planner expects each config to fit into memory under a strategy; None where it does not know."""


def unknown_fit(configs: Sequence[TrainConfig], strategy: Strategy) -> Sequence[bool | None]:
    """The answer without a planner."""
    return [None] * len(configs)


@dataclass(frozen=True)
class Plan:
    """The request of a run.

    Args:
        run: its folder.
        config: its options.
        strategy: its strategy, resolved for its processes.
        has_gpu: whether it ran on GPUs.
        saved_step: step of its newest checkpoint; 0 without any.
        ended: whether it is done, so that a remedy applies to a new run and not to this one.
        fits: the planner.
        gpu_gib: memory of a GPU of the run; None if unknown.
    """

    run: RunFolder
    config: TrainConfig
    strategy: Strategy
    has_gpu: bool = False
    saved_step: int = 0
    ended: bool = False
    fits: Fits = field(default=unknown_fit, compare=False)
    gpu_gib: float | None = None

    @property
    def machines(self) -> int:
        """Number of machines."""
        return int(self.strategy.values.get("num_machines") or 1)

    def changed(self, options: dict[str, str], launch: dict[str, str]) -> tuple[TrainConfig, bool] | None:
        """The config after a change, and whether a resume needs `--force` for it.

        Returns:
            None if the change is no change, is refused, or does not fit the run's checkpoint.
        """
        try:
            config = Request(config=str(self.run.config), options=dict(options)).resolve()
            chosen = load_strategy(launch["strategy"]) if "strategy" in launch else self.strategy
            stages = (config.pp_size, config.pp_schedule)
            strategy = resolve(chosen, self.strategy.num_processes, config.mixed_precision, *stages)
            if refusal(strategy, config, self.has_gpu):
                return None
        except ConfigError:
            return None
        if config == self.config and not launch:
            return None
        return (config, False) if self.ended else self._resumable(config)

    def _resumable(self, config: TrainConfig) -> tuple[TrainConfig, bool] | None:
        refused = changes_since_save(self.run, config, "auto")
        if any(mistake.option in STRUCTURE for mistake in refused):
            return None
        # Only what the remedy itself changes is forced: a package that changed meanwhile is left to the user.
        by_others = changes_since_save(self.run, self.config, "auto")
        return config, bool(refused) and not by_others


def plan_of(run: RunFolder, state: dict[str, Any], fits: Fits = unknown_fit) -> Plan | None:
    """The request of a run; None if its files cannot be read."""
    gpus = gpu_ids(run)
    try:
        config = Request(config=str(run.config)).resolve()
        strategy = load_strategy(str(run.accelerate))
    except ConfigError:
        return None
    memories = [gpu.memory / 2**30 for gpu in find_gpus() if gpu.index in gpus] if gpus else []
    return Plan(
        run, config, strategy, bool(gpus), saved_step(run), state.get("state") == "done", fits,
        min(memories, default=None),
    )  # fmt: skip
