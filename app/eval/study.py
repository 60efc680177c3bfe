"""Runs a plan of `tunesmith eval`: one run for each model, one after the other."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

from app.console import clean, say
from app.eval.plan import Candidate, Plan
from app.eval.rows import Row, read_rows
from app.eval.tasks import Tasks
from app.launch.actions import ExportFailed, ExportRequest, export
from app.launch.foreground import CheckBroke, interruptible, launch, preflight, where
from app.launch.job import TrainJob
from app.launch.progress import progress_display
from trainers.config.mistakes import ConfigError
from trainers.run.folder import register_outside, unregister


class Study:
    """Evaluates each model of a plan.

    Args:
        plan: the plan.
        quiet: show only warnings.

    Attributes:
        rows: of each model that was evaluated, in the order of the plan.
        samples: of each sample for forgetting by its name, the rows of each model.
        tasks: results of tasks of lm-evaluation-harness by model.
        failed: why a model was not evaluated, by label.
        interrupted: whether it was.
    """

    def __init__(self, plan: Plan, quiet: bool):
        self.plan, self.quiet = plan, quiet
        self.rows: dict[str, list[Row]] = {}
        self.samples: dict[str, dict[str, list[Row]]] = {sample.name: {} for sample in plan.samples}
        self.tasks: dict[str, dict[str, Any]] = {}
        self.failed: dict[str, str] = {}
        self.interrupted = False
        self._warned: set[str] = set()

    def run(self) -> None:
        """Evaluates all models; on an interrupt, those that were evaluated so far are kept.

        Raises:
            ConfigError: if the pre-flight check refuses a model.
            CheckBroke: if that check crashes.
        """
        with interruptible():
            try:
                loadable = [candidate for candidate in self.plan.candidates if candidate.checkpoint is None]
                for number, candidate in enumerate(loadable):  # mistakes are told before the first one runs
                    preflight(candidate.job(), quiet=self.quiet or number > 0)  # rows that are left out, once
                if self.plan.tasks is not None:
                    self.plan.tasks.check()
                for sample in self.plan.samples if loadable else ():
                    preflight(loadable[0].job(sample=sample.name), quiet=True)
                for number, candidate in enumerate(self.plan.candidates, 1):
                    self._evaluate(candidate, f"[{number}/{len(self.plan.candidates)}] {candidate.label}")
            except KeyboardInterrupt:
                self.interrupted = True

    def _evaluate(self, candidate: Candidate, label: str) -> None:
        exported: Path | None = None
        try:
            if candidate.checkpoint is not None:
                run, weights = candidate.checkpoint
                exported = self.plan.folder / "exports" / weights
                if not self.quiet:
                    say(clean(f"{label}: exporting {weights} of run {run.id}"))
                self.plan.folder.mkdir(parents=True, exist_ok=True)
                export(run, ExportRequest(weights, output=exported))
            job = candidate.job(exported)
            if (rows := self._launch(job, candidate.label, label)) is not None:
                self.rows[candidate.label] = rows
                if self.plan.tasks is not None:
                    self._run_tasks(self.plan.tasks, job, candidate.label, label)
                for sample in self.plan.samples:
                    job = candidate.job(exported, sample.name)
                    rows = self._launch(job, f"{candidate.label}, {sample.name}", f"{label}, {sample.name}")
                    if rows is not None:
                        self.samples[sample.name][candidate.label] = rows
        except (ConfigError, ExportFailed) as error:
            self.failed[candidate.label] = str(error)
            say(clean(f"{label}: {error}"))
        finally:
            if exported is not None:
                shutil.rmtree(exported, ignore_errors=True)

    def _run_tasks(self, tasks: Tasks, job: TrainJob, name: str, label: str) -> None:
        if not self.quiet:
            say(clean(f"{label}: tasks of lm-evaluation-harness"))
        try:
            self.tasks[name] = tasks.run(job)
        except (ConfigError, CheckBroke) as error:
            self.failed[f"{name}, tasks"] = str(error)
            say(clean(f"{label}: {error}"))

    def _launch(self, job: TrainJob, name: str, label: str) -> list[Row] | None:
        """The rows of a run; None if it failed."""
        for line in [line for line in job.warnings if line not in self._warned]:
            say(clean(f"warning: {line}"))
        self._warned.update(job.warnings)
        if not self.quiet:
            say(clean(f"{label} on {where(job)}"))
        display = progress_display(job.run, self.quiet or not sys.stderr.isatty(), job.warnings)
        try:
            register_outside(job.run, job.run.path)  # so that it can be seen and stopped while it runs
            state = launch(job, display, bound=True)
        finally:
            unregister(job.run)
        if state["state"] == "stopped":
            raise KeyboardInterrupt
        if state["state"] != "done":
            self.failed[name] = str(state.get("cause") or state["state"])
            say(clean(f"{label}: {self.failed[name]}; log: {job.run.log}"))
            return None
        return read_rows(job.run.evaluation)
