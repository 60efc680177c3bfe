"""Diagnoses with the planner's word on what fits, and remedies applied to a request."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from app import hardware
from app.command_line import Args
from app.diagnosis.advice import Diagnosis, diagnose, remedy_of
from app.launch.foreground import CheckBroke
from app.launch.job import TrainJob, clone_job, resume_job
from app.plan.command import count
from app.plan.estimate import plan_row
from app.plan.hardware import Hardware
from app.runs.metrics import Curves
from app.runs.runs import gpu_ids, true_state
from app.runs.safe_read import stamp
from trainers.config.mistakes import ConfigError
from trainers.config.options import TrainConfig
from trainers.run import host_memory
from trainers.run.folder import RunFolder
from trainers.strategy.strategy import Strategy


def diagnosed(run: RunFolder) -> list[Diagnosis]:
    """What is wrong with a run; counts the model, which takes some seconds, if memory ran out."""
    return diagnose(run, fits=planner(run))


class Diagnoses:
    """The diagnoses that pages show, without the planner. One object serves a whole server.

    Those of a run are found again when its state changes, and while its metrics grow, every `SECONDS`.

    Args:
        curves: cache of metrics.
    """

    SECONDS = 10.0
    MOST = 256

    def __init__(self, curves: Curves):
        self._curves, self._lock = curves, threading.Lock()
        self._known = OrderedDict[Path, tuple[Any, float, list[Diagnosis]]]()

    def of(self, run: RunFolder) -> list[Diagnosis]:
        """What is wrong with a run."""
        state, metrics = stamp(run.state_file), (stamp(run.metrics), stamp(run.log), stamp(run.config))
        with self._lock:
            known = self._known.get(run.path)
        if known and known[0][0] == state and (known[0][1] == metrics or time.monotonic() - known[1] < self.SECONDS):
            return known[2]
        diagnoses = diagnose(run, self._curves)
        with self._lock:
            self._known[run.path] = ((state, metrics), time.monotonic(), diagnoses)
            while len(self._known) > self.MOST:
                self._known.popitem(last=False)
        return diagnoses


def remedied(run: RunFolder, diagnoses: Sequence[Diagnosis], flags: str) -> TrainJob:
    """The job that resumes a run with a remedy, or trains anew if the run is done.

    Args:
        run: the run.
        diagnoses: its diagnoses.
        flags: the remedy's options as text, as a page showed them.

    Raises:
        ConfigError: if there is no such remedy any more, or it cannot be applied.
    """
    changes = [change for diagnosis in diagnoses for change in diagnosis.remedies if change.flags == flags]
    if not changes:
        raise ConfigError("this remedy is no longer among those of the run; reload the page")
    args = Args(own={"apply": changes[0].number})
    apply_remedy(diagnoses, args)
    if true_state(run)["state"] != "done":
        return resume_job(run, args)
    args.switches.clear()
    return clone_job(run, args)


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
