"""Runs the trials of `tunesmith bench`.

Every run takes the path of `tunesmith train`: pre-flight check, launcher, supervisor. It is stopped after its last
timed step, so that no checkpoint or export is written. Runs take turns, so that drift of the machine affects all
equally.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from app.bench.plan import LEAST_STEPS, LONG_ENOUGH, MOST_STEPS, WARM, Measured, Trial
from app.bench.report import describe_run
from app.console import clean, say
from app.launch.foreground import CheckBroke, launch, preflight, spinner, where
from app.launch.supervisor import STOP_NOTES
from app.runs.runs import metrics
from trainers.config.mistakes import ConfigError
from trainers.run.folder import RunFolder, unregister


class Runner:
    """Runs trials, and keeps the number of timed steps that the first one chose.

    Args:
        steps: number of timed steps; None to choose it by their duration.
        turns: number of runs of each trial.
        quiet: show only warnings.
    """

    def __init__(self, steps: int | None, turns: int, quiet: bool):
        self.steps = steps
        self.turns = turns
        self.quiet = quiet
        self.number = 0

    def check(self, trial: Trial) -> None:
        """Runs the pre-flight check of a trial."""
        if trial.config is None or trial.job is None:
            return
        try:
            preflight(replace(trial.job, config=trial.config), quiet=True)
        except ConfigError as error:
            trial.refuse("not possible", "; ".join(error.lines))
        except CheckBroke as error:
            trial.refuse("failed", error.cause)

    def take_turns(self, trials: Sequence[Trial], folder: Path, base: Trial | None = None) -> None:
        """Runs each trial once per turn, in reverse order every other turn; a failed trial is not run again.

        Args:
            trials: the trials.
            folder: folder for the runs, which are removed.
            base: the trial without which the others are worth nothing.
        """
        able = [trial for trial in trials if trial.able]
        number, count = 0, len(able) * self.turns
        for turn in range(self.turns):
            for trial in able if turn % 2 == 0 else reversed(able):
                number += 1
                if trial.able and not (base and base.outcome == "failed"):
                    self._run(trial, f"[{number}/{count}]", folder)

    def _run(self, trial: Trial, label: str, folder: Path) -> None:
        """Runs a trial once and removes its folder.

        Raises:
            KeyboardInterrupt: if the run was stopped.
        """
        assert trial.config is not None
        assert trial.job is not None
        self.number += 1
        run = RunFolder(folder / f"bench-{self.number:03d}")
        job = replace(trial.job, config=trial.config, run=run, resume_from=None)
        watch = Watch(run, self.steps)
        with spinner(f"{label} {clean(trial.name)} on {where(job)}", self.quiet):
            try:
                # The launcher and torch leave files in the temporary folder, so use one that is removed.
                state = launch(job, contextlib.nullcontext(watch), {**os.environ, "TMPDIR": str(folder)}, bound=True)
            finally:
                unregister(run)
        if watch.interrupted or (state["state"] == "stopped" and not watch.steps):
            raise KeyboardInterrupt
        if state["state"] == "failed" or not watch.steps:
            cause = clean(str(state.get("cause") or "the run ended before its last timed step"))
            trial.refuse("out of memory" if run.out_of_memory.exists() else "failed", cause)
        else:
            self.steps = watch.steps
            trial.runs.append(measured(run, watch.steps))
            trial.outcome = "measured"
        shutil.rmtree(run.path, ignore_errors=True)
        if not self.quiet:
            say(clean(f"{label} {trial.name}: {describe_run(trial)}"))


class Watch:
    """Watches a run and stops it after its last timed step, without saving.

    Args:
        run: the run.
        steps: number of timed steps; None to choose it by their duration.
    """

    def __init__(self, run: RunFolder, steps: int | None):
        self.run = run
        self.fixed = steps
        self.steps = 0
        self.interrupted = False

    def __call__(self, kind: str, text: str) -> None:
        if text in STOP_NOTES:
            say("stopping: nothing is saved")
            self.interrupted = True
            self.run.ask_stop(save=False)
        elif kind == "note":
            say(clean(text))
        elif not self.steps and (enough := enough_steps(_ends(self.run), self.fixed)):
            self.steps = enough
            self.run.ask_stop(save=False)


def _ends(run: RunFolder) -> dict[int, float]:
    """Seconds of training at the end of each logged step."""
    return {row["step"]: row["elapsed_s"] for row in metrics(run) if "elapsed_s" in row}


def enough_steps(ends: Mapping[int, float], fixed: int | None) -> int:
    """Number of timed steps to use; 0 while there are too few.

    Args:
        ends: seconds of training at the end of each step so far.
        fixed: required number; None for up to `MOST_STEPS`, or the steps of the first `LONG_ENOUGH` seconds.
    """
    last = max(ends, default=0)
    timed, most = last - WARM, fixed or MOST_STEPS
    if timed >= most:
        return most
    slow = timed >= LEAST_STEPS and ends[last] - ends[WARM] >= LONG_ENOUGH
    return timed if slow and not fixed else 0


def measured(run: RunFolder, steps: int) -> Measured:
    """The measurements of a run over its timed steps, all of which must be logged."""
    rows = {row["step"]: row for row in metrics(run) if "elapsed_s" in row and row["step"] <= WARM + steps}
    first, last = rows[WARM], rows[WARM + steps]
    seconds = last["elapsed_s"] - first["elapsed_s"]
    memory = max(row["memory_gib"] for row in rows.values())
    rate = (last["tokens"] - first["tokens"]) / seconds
    return Measured(rate, seconds / steps, memory, rows[1]["loss"], last["loss"])
