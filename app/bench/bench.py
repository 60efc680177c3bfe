"""`tunesmith bench`: the user's model and data for a few steps, with the settings as they are and with one changed.

Every run goes the way of `tunesmith train`: pre-flight check, launcher, supervisor. It is stopped after its last timed
step, so that no checkpoint and no export is written. They take turns, so that a drift of the machine hits all alike.
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

from app.bench.plan import LEAST_STEPS, LONG_ENOUGH, MOST_STEPS, WARM, Measured, Plan, Trial, make_plan, together
from app.bench.report import document_of, helpful, show, told_run
from app.console import clean, report_json, say
from app.launch.foreground import CheckBroke, interruptible, launch, preflight, spinner, where
from app.launch.job import sort_words
from app.launch.supervisor import STOP_NOTES
from app.runs.runs import metrics
from trainers.config.options import ConfigError
from trainers.run.folder import RunFolder, unregister


def bench_verb(words: Sequence[str]) -> int:
    """`tunesmith bench`.

    Returns:
        The exit status: 0 when the user's settings were measured, 1 when they could not be, 130 interrupted.

    Raises:
        ConfigError: for a request that is wrong, or that the pre-flight check refuses.
        CheckBroke: when that check crashed.
    """
    sorted_words = sort_words(words)
    if "help" in sorted_words.switches:
        from app.bench.help import show_bench_help

        show_bench_help()
        return 0
    bench = Bench(make_plan(sorted_words), "quiet" in sorted_words.switches)
    bench.run()
    document = bench.document(words)
    if "json" in sorted_words.switches:
        report_json(document)
    else:
        show(document)
    return 130 if bench.interrupted else 0 if bench.plan.base.outcome == "measured" else 1


class Bench:
    """Runs a plan; what was measured is in its trials.

    Args:
        plan: what to do.
        quiet: show warnings alone.
    """

    def __init__(self, plan: Plan, quiet: bool):
        self.plan, self.quiet = plan, quiet
        self.combined: Trial | None = None
        self.interrupted = False
        self.steps = plan.steps
        self.number = 0

    def run(self) -> None:
        """Measures everything, or until interrupted.

        Raises:
            ConfigError: when the pre-flight check refuses the user's settings.
            CheckBroke: when that check crashed.
        """
        for warning in self.plan.job.warnings:
            say("warning: " + clean(warning))
        with interruptible():
            try:
                with tempfile.TemporaryDirectory(prefix="tunesmith-bench-") as folder:
                    self._measure_all(Path(folder))
            except KeyboardInterrupt:
                self.interrupted = True

    def document(self, words: Sequence[str]) -> dict[str, Any]:
        """The report as plain values.

        Args:
            words: the command line.
        """
        found = document_of(self.plan, self.combined, self.steps)
        return {**found, "interrupted": self.interrupted, "command": ["tunesmith", "bench", *words]}

    def _measure_all(self, folder: Path) -> None:
        plan = self.plan
        preflight(plan.job, self.quiet)
        with spinner("checking what could be changed", self.quiet):
            for one in plan.variants:
                self._check(one)
        self._take_turns([plan.base, *plan.variants], folder)
        better = helpful(plan.base, plan.variants)
        if len(better) > 1:
            self.combined = together(plan, better)
            self._check(self.combined)
            if self.combined.able:
                self._take_turns([plan.base, self.combined], folder)

    def _check(self, one: Trial) -> None:
        """The pre-flight check of a change."""
        if one.config is None:
            return
        try:
            preflight(replace(self.plan.job, config=one.config), quiet=True)
        except ConfigError as error:
            one.refuse("not possible", "; ".join(error.mistakes))
        except CheckBroke as error:
            one.refuse("failed", error.cause)

    def _take_turns(self, trials: Sequence[Trial], folder: Path) -> None:
        """Each trial once in a turn, every other turn backwards; one that fell is not run again."""
        able = [one for one in trials if one.able]
        number, count = 0, len(able) * self.plan.turns
        for turn in range(self.plan.turns):
            for one in able if turn % 2 == 0 else reversed(able):
                number += 1
                if one.able and self.plan.base.outcome != "failed":
                    self._run(one, f"[{number}/{count}]", folder)

    def _run(self, one: Trial, label: str, folder: Path) -> None:
        """One run, of which nothing is left.

        Raises:
            KeyboardInterrupt: when it was stopped.
        """
        assert one.config is not None
        self.number += 1
        run = RunFolder(folder / f"bench-{self.number:03d}")
        job = replace(self.plan.job, config=one.config, run=run, resume_from=None)
        watch = Watch(run, self.steps)
        with spinner(f"{label} {clean(one.name)} on {where(job)}", self.quiet):
            try:
                # The launcher and torch leave files in the folder for temporary ones; ours is removed.
                state = launch(job, contextlib.nullcontext(watch), {**os.environ, "TMPDIR": str(folder)})
            finally:
                unregister(run)
        if watch.interrupted or (state["state"] == "stopped" and not watch.steps):
            raise KeyboardInterrupt
        if state["state"] == "failed" or not watch.steps:
            cause = clean(str(state.get("cause") or "it ended before its last timed step"))
            one.refuse("out of memory" if run.out_of_memory.exists() else "failed", cause)
        else:
            self.steps = watch.steps
            one.runs.append(measured(run, watch.steps))
            one.outcome = "measured"
        shutil.rmtree(run.path, ignore_errors=True)
        if not self.quiet:
            say(clean(f"{label} {one.name}: {told_run(one)}"))


class Watch:
    """Listens to a run, and stops it after its last timed step, without saving.

    Args:
        run: the run.
        steps: on the clock; None to let their duration decide.
    """

    def __init__(self, run: RunFolder, steps: int | None):
        self.run, self.fixed = run, steps
        self.steps, self.interrupted = 0, False

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
    """Timed steps to count; 0 as long as there are too few.

    Args:
        ends: seconds of training at the end of each step so far.
        fixed: how many to count; None for up to `MOST_STEPS`, or those of the first `LONG_ENOUGH` seconds.
    """
    last = max(ends, default=0)
    timed, most = last - WARM, fixed or MOST_STEPS
    if timed >= most:
        return most
    slow = timed >= LEAST_STEPS and ends[last] - ends[WARM] >= LONG_ENOUGH
    return timed if slow and not fixed else 0


def measured(run: RunFolder, steps: int) -> Measured:
    """The numbers of a run over its timed steps, all of which it must have logged."""
    rows = {row["step"]: row for row in metrics(run) if "elapsed_s" in row and row["step"] <= WARM + steps}
    first, last = rows[WARM], rows[WARM + steps]
    seconds = last["elapsed_s"] - first["elapsed_s"]
    memory = max(row["memory_gib"] for row in rows.values())
    rate = (last["tokens"] - first["tokens"]) / seconds
    return Measured(rate, seconds / steps, memory, rows[1]["loss"], last["loss"])
