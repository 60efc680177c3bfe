"""`tunesmith bench`: trains for a few steps, with the user's settings and with single changes to them.

Every run takes the path of `tunesmith train`: pre-flight check, launcher, supervisor. It is stopped after its last
timed step, so that no checkpoint or export is written. Runs take turns, so that drift of the machine affects all
equally.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from app.bench.plan import BENCH, LEAST_STEPS, LONG_ENOUGH, MOST_STEPS, WARM, Measured, Plan, Trial, make_plan, together
from app.bench.report import describe_run, document_of, helpful, show
from app.console import clean, report_json, say
from app.launch.foreground import CheckBroke, interruptible, launch, preflight, spinner, where
from app.launch.supervisor import STOP_NOTES
from app.runs.runs import metrics
from trainers.config.mistakes import ConfigError
from trainers.run.folder import RunFolder, unregister


def bench_verb(argv: Sequence[str]) -> int:
    """`tunesmith bench`.

    Returns:
        The exit status: 0 if the user's settings were measured, 1 if they could not be, 130 if interrupted.

    Raises:
        ConfigError: if the request is wrong, or the pre-flight check refuses it.
        CheckBroke: if that check crashed.
    """
    args = BENCH.read(argv)
    if args is None:
        return 0
    bench = Bench(make_plan(args), "quiet" in args.switches)
    bench.run()
    document = bench.document(argv)
    if "json" in args.switches:
        report_json(document)
    else:
        show(document)
    return 130 if bench.interrupted else 0 if bench.plan.base.outcome == "measured" else 1


class Bench:
    """Runs a plan; the measurements are in its trials.

    Args:
        plan: what to measure.
        quiet: show only warnings.
    """

    def __init__(self, plan: Plan, quiet: bool):
        self.plan = plan
        self.quiet = quiet
        self.combined: Trial | None = None
        self.interrupted = False
        self.steps = plan.steps
        self.number = 0

    def run(self) -> None:
        """Measures everything, until interrupted.

        Raises:
            ConfigError: if the pre-flight check refuses the user's settings.
            CheckBroke: if that check crashed.
        """
        for warning in self.plan.job.warnings:
            say("warning: " + clean(warning))
        with interruptible():
            try:
                with tempfile.TemporaryDirectory(prefix="tunesmith-bench-") as folder:
                    self._measure_all(Path(folder))
            except KeyboardInterrupt:
                self.interrupted = True

    def document(self, argv: Sequence[str]) -> dict[str, Any]:
        """The report as plain values.

        Args:
            argv: the command line.
        """
        document = document_of(self.plan, self.combined, self.steps)
        return {**document, "interrupted": self.interrupted, "command": ["tunesmith", "bench", *argv]}

    def _measure_all(self, folder: Path) -> None:
        plan = self.plan
        preflight(plan.job, self.quiet)
        with spinner("checking possible changes", self.quiet):
            for trial in plan.variants:
                self._check(trial)
        self._take_turns([plan.base, *plan.variants], folder)
        better = helpful(plan.base, plan.variants)
        if len(better) > 1:
            self.combined = together(plan, better)
            self._check(self.combined)
            if self.combined.able:
                self._take_turns([plan.base, self.combined], folder)

    def _check(self, trial: Trial) -> None:
        """Runs the pre-flight check of a trial."""
        if trial.config is None:
            return
        try:
            preflight(replace(self.plan.job, config=trial.config), quiet=True)
        except ConfigError as error:
            trial.refuse("not possible", "; ".join(error.lines))
        except CheckBroke as error:
            trial.refuse("failed", error.cause)

    def _take_turns(self, trials: Sequence[Trial], folder: Path) -> None:
        """Runs each trial once per turn, in reverse order every other turn; a failed trial is not run again."""
        able = [trial for trial in trials if trial.able]
        number, count = 0, len(able) * self.plan.turns
        for turn in range(self.plan.turns):
            for trial in able if turn % 2 == 0 else reversed(able):
                number += 1
                if trial.able and self.plan.base.outcome != "failed":
                    self._run(trial, f"[{number}/{count}]", folder)

    def _run(self, trial: Trial, label: str, folder: Path) -> None:
        """Runs a trial once and removes its folder.

        Raises:
            KeyboardInterrupt: if the run was stopped.
        """
        assert trial.config is not None
        self.number += 1
        run = RunFolder(folder / f"bench-{self.number:03d}")
        job = replace(self.plan.job, config=trial.config, run=run, resume_from=None)
        watch = Watch(run, self.steps)
        with spinner(f"{label} {clean(trial.name)} on {where(job)}", self.quiet):
            try:
                # The launcher and torch leave files in the temporary folder, so use one that is removed.
                state = launch(job, contextlib.nullcontext(watch), {**os.environ, "TMPDIR": str(folder)})
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
