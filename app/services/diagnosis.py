"""Diagnoses with the planner's word on what fits, and remedies applied to a request."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from app import hardware
from app.command_line import Args
from app.diagnosis.advice import Diagnosis, diagnose, remedy_of
from app.launch.foreground import CheckBroke
from app.plan.command import count
from app.plan.estimate import plan_row
from app.plan.hardware import Hardware
from app.runs.runs import gpu_ids
from trainers.config.mistakes import ConfigError
from trainers.config.options import TrainConfig
from trainers.run import host_memory
from trainers.run.folder import RunFolder
from trainers.strategy.strategy import Strategy


def diagnosed(run: RunFolder) -> list[Diagnosis]:
    """What is wrong with a run; counts the model, which takes some seconds, if memory ran out."""
    return diagnose(run, fits=planner(run))


def planner(run: RunFolder) -> Callable[[TrainConfig, Strategy], bool | None]:
    """Whether a config is expected to fit on the run's devices, were they empty; None where it cannot be counted."""

    def fits(config: TrainConfig, strategy: Strategy) -> bool | None:
        ids, processes = gpu_ids(run), strategy.num_processes
        memories = [gpu.memory for gpu in hardware.find_gpus() if gpu.index in ids]
        host = float(host_memory.total())
        memory = float(min(memories)) if memories else host / processes
        planned = Hardware("gpu" if ids else "cpu", processes, memory, is_local=False, host=host)
        try:
            return plan_row(strategy, config, count(config, planned, [(strategy, config)]), planned).fits
        except (ConfigError, CheckBroke):
            return None

    return fits


def apply_remedy(diagnoses: Sequence[Diagnosis], args: Args) -> None:
    """Adds the options of the remedy that `--apply` names to a request; options that the user gave are kept.

    Raises:
        ConfigError: if there is no such remedy.
    """
    change = remedy_of(diagnoses, args.own["apply"])
    args.request.options = {**change.options, **args.request.options}
    args.launch = {**change.launch, **args.launch}
    args.switches |= {"force"} if change.force else set()
