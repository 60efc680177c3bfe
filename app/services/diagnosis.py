"""Diagnoses with the planner's word on what fits, and remedies applied to a request."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app import hardware
from app.command_line import Args
from app.diagnosis.advice import Diagnosis, diagnose, remedy_of
from app.diagnosis.plan import Fits
from app.launch.foreground import CheckBroke
from app.launch.job import TrainJob, clone_job, resume_job
from app.launch.machines import as_machine_0
from app.plan.command import count
from app.plan.estimate import plan_row
from app.plan.hardware import Hardware
from app.runs.runs import gpu_ids, true_state
from app.runs.safe_read import stamp
from trainers.config.mistakes import ConfigError
from trainers.config.options import TrainConfig
from trainers.run import host_memory
from trainers.run.folder import RunFolder
from trainers.strategy.strategy import Strategy

if TYPE_CHECKING:
    from app.runs.metrics import Curves


def diagnosed(run: RunFolder) -> list[Diagnosis]:
    """What is wrong with a run; counts the model, which takes some seconds, if memory ran out."""
    return diagnose(run, fits=planner(run))


class Diagnoses:
    """The diagnoses that pages show, without the planner. One object serves a whole server.

    Those of a run are found again when its state changes, and while it trains, every `SECONDS`.

    Args:
        curves: cache of metrics.
    """

    SECONDS = 10.0
    MOST = 256

    def __init__(self, curves: Curves):
        self._curves, self._lock = curves, threading.Lock()
        self._known = OrderedDict[Path, tuple[Any, float, list[Diagnosis]]]()

    def of(self, run: RunFolder, state: Any) -> list[Diagnosis]:
        """What is wrong with a run.

        Args:
            run: the run.
            state: what changes when the diagnosis may.
        """
        files = [stamp(path) for path in (run.metrics, run.log, run.config)]
        with self._lock:
            known = self._known.get(run.path)
        if known and known[0][0] == state and (known[0][1] == files or time.monotonic() - known[1] < self.SECONDS):
            return known[2]
        self._curves.latest(run)
        unread = self._curves.has_more(run)  # asked before, as another request may read the remainder meanwhile
        diagnoses = diagnose(run, self._curves)
        if unread:  # found without the metrics, or with newer ones than `files`
            return diagnoses
        with self._lock:
            self._known[run.path] = ((state, files), time.monotonic(), diagnoses)
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
    if not flags or not changes:
        raise ConfigError("this remedy is no longer among those of the run; reload the page")
    args = Args(own={"apply": changes[0].number})
    apply_remedy(diagnoses, args)
    if true_state(run)["state"] != "done":
        args.launch = {**as_machine_0(run), **args.launch}
        return resume_job(run, args)
    args.switches.clear()
    return clone_job(run, args)


def planner(run: RunFolder) -> Fits:
    """Whether configs are expected to fit on the run's devices, were they empty; None where it cannot be counted."""

    def fits(configs: Sequence[TrainConfig], strategy: Strategy) -> Sequence[bool | None]:
        planned = hardware_of(run, strategy)
        try:
            counted = count(configs[0], planned, [(strategy, config) for config in configs])
        except (ConfigError, CheckBroke):
            return [None] * len(configs)
        return [plan_row(strategy, config, counted, planned).fits for config in configs]

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


def hardware_of(run: RunFolder, strategy: Strategy) -> Hardware:
    """The devices of a run, were they empty."""
    ids, processes = gpu_ids(run), strategy.num_processes
    memories = [gpu.memory for gpu in hardware.find_gpus() if gpu.index in ids]
    host, machines = float(host_memory.total()), int(strategy.values.get("num_machines") or 1)
    memory = float(min(memories)) if memories else host * machines / processes
    return Hardware("gpu" if ids else "cpu", processes, memory, is_local=False, host=host, machines=machines)
