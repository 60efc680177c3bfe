"""`tunesmith bench`: trains for a few steps, with the user's settings and with single changes to them.

With `--scaling`, with the same settings on several numbers of processes instead.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from app.bench.plan import BENCH, Plan, Trial, make_plan, together
from app.bench.report import document_of, helpful, show
from app.bench.runner import Runner
from app.bench.scaling import Scaling, scaling_plan, show_scaling
from app.console import clean, report_json, say
from app.launch.foreground import interruptible, preflight, spinner


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
    quiet = "quiet" in args.switches
    scales = "scaling" in args.own
    bench: Bench | Scaling = Scaling(scaling_plan(args), quiet) if scales else Bench(make_plan(args), quiet)
    interrupted = in_temporary_folder(bench.measure)
    document = {**bench.document(), "interrupted": interrupted, "command": ["tunesmith", "bench", *argv]}
    if "json" in args.switches:
        report_json(document)
    else:
        (show_scaling if scales else show)(document)
    return 130 if interrupted else 0 if bench.measured else 1


def in_temporary_folder(measure: Callable[[Path], None]) -> bool:
    """Calls `measure` with a folder that is removed afterwards; returns whether it was interrupted."""
    with interruptible():
        try:
            with tempfile.TemporaryDirectory(prefix="tunesmith-bench-") as folder:
                measure(Path(folder))
        except KeyboardInterrupt:
            return True
    return False


class Bench:
    """Runs a plan; the measurements are in its trials.

    Args:
        plan: what to measure.
        quiet: show only warnings.
    """

    def __init__(self, plan: Plan, quiet: bool):
        self.plan = plan
        self.runner = Runner(plan.steps, plan.turns, quiet)
        self.combined: Trial | None = None

    @property
    def measured(self) -> bool:
        """Whether the user's settings were measured."""
        return self.plan.base.outcome == "measured"

    def document(self) -> dict[str, Any]:
        """The report as plain values."""
        return document_of(self.plan, self.combined, self.runner.steps)

    def measure(self, folder: Path) -> None:
        """Measures everything.

        Args:
            folder: folder for the runs.

        Raises:
            ConfigError: if the pre-flight check refuses the user's settings.
            CheckBroke: if that check crashed.
        """
        plan, runner = self.plan, self.runner
        for warning in plan.job.warnings:
            say("warning: " + clean(warning))
        preflight(plan.job, runner.quiet)
        with spinner("checking possible changes", runner.quiet):
            for trial in plan.variants:
                runner.check(trial)
        runner.take_turns([plan.base, *plan.variants], folder, plan.base)
        better = helpful(plan.base, plan.variants)
        if len(better) > 1:
            self.combined = together(plan, better)
            runner.check(self.combined)
            if self.combined.able:
                runner.take_turns([plan.base, self.combined], folder, plan.base)
