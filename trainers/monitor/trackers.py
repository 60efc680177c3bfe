"""Experiment trackers (`report_to`): TensorBoard, Weights & Biases, Trackio, MLflow, through Accelerate.

A run never ends because a tracker fails while it trains: `metrics.jsonl` has every row anyway.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from accelerate import Accelerator

from trainers.config.fields import text_of
from trainers.config.options import TrainConfig
from trainers.run.errors import TrainingError
from trainers.run.folder import RunFolder

PROJECT = "tunesmith"
"""The project in each tracker, and the folder of TensorBoard's files in the run folder."""


class Trackers:
    """The trackers of a run, on rank 0; the other ranks have none.

    Args:
        attempt: 0 at the first start, where a tracker that fails ends the run; a later attempt trains without it.

    Raises:
        TrainingError: at the first start, if a tracker cannot be started.
    """

    def __init__(self, accelerator: Accelerator, config: TrainConfig, run: RunFolder, attempt: int):
        self._accelerator = accelerator
        if not config.report_to:
            return
        if "tensorboard" in config.report_to:
            run.own_folder(PROJECT)
        name = config.run_name or run.id
        wandb = {"name": name}
        if "wandb" in config.report_to and "WANDB_DIR" not in os.environ:
            run.own_folder("wandb")
            wandb["dir"] = str(run.path)
        plain = int | float | str  # lists and mappings would be refused
        settings = {name: value if isinstance(value, plain) else text_of(value)
                    for name, value in config.model_dump(exclude_none=True).items()}  # fmt: skip
        init = {"wandb": wandb, "trackio": {"name": name}, "mlflow": {"run_name": name}}
        try:
            accelerator.init_trackers(PROJECT, config=settings, init_kwargs=init)
        except Exception as error:
            names = ",".join(config.report_to)
            if attempt == 0:
                problem = f"a tracker did not start ({_summary(error)})"
                raise TrainingError(f"report_to={names}: {problem}; check its settings, or leave it out") from error
            print(f"warning: report_to={names}: no tracker follows this attempt ({_summary(error)})", flush=True)
            self.finish()
            accelerator.trackers = []

    def log(self, numbers: dict[str, float], step: int) -> None:
        """Passes the numbers of a step on."""
        self._each(lambda tracker: tracker.log(numbers, step=step))

    def finish(self) -> None:
        """Closes the trackers; `Accelerator.end_training` would destroy the process group too."""
        self._each(lambda tracker: tracker.finish())

    def _each(self, call: Callable[[Any], None]) -> None:
        """Calls each tracker, and gives up those that fail."""
        for tracker in list(self._accelerator.trackers):
            try:
                call(tracker)
            except Exception as error:
                print(
                    f"warning: {tracker.name} gets no more rows ({_summary(error)}); metrics.jsonl has all of them",
                    flush=True,
                )
                self._accelerator.trackers.remove(tracker)


def _summary(error: Exception) -> str:
    first_line = str(error).strip().partition("\n")[0][:200]
    return f"{type(error).__name__}: {first_line}"
