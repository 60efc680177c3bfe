"""`tunesmith sweep` and its verbs: start, list, show, stop and resume sweeps."""

from __future__ import annotations

import contextlib
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from app.accelerate_launch import ROOT, module_argv, module_environment
from app.console import clean, counted, report, report_json, say, show_table
from app.launch.foreground import interruptible, preflight, say_choices
from app.sweep.plan import SWEEP, Plan, decisive_measure, make_plan
from app.sweep.record import SweepFolder, SweepRecord, find_sweep, list_sweeps, true_state
from app.sweep.report import document_of, settings, show, table_of
from app.sweep.runner import Runner, StopAsked
from app.sweep.trial_runs import TrialRuns
from trainers.config.mistakes import ConfigError


def sweep_verb(argv: Sequence[str]) -> int:
    """`tunesmith sweep PRESET`: returns 0 if a run was measured, 1 if none was, 130 if stopped."""
    args = SWEEP.read(argv)
    if args is None:
        return 0
    as_json, quiet = "json" in args.switches, "quiet" in args.switches
    plan = make_plan(args)
    say_choices(plan.job)
    preflight(plan.job, quiet=True, elsewhere=plan.record.on != "local")
    if not quiet:
        say(_announced(plan.record))
    if "check" in args.switches:
        return _checked(plan, as_json)
    try:
        plan.folder.path.mkdir(parents=True)
    except OSError as error:
        raise ConfigError(f"{plan.folder.path} cannot be created: {error.strerror}; choose another runs_dir") from None
    if "detach" in args.switches:
        plan.folder.write(plan.record)
        return _detach(plan.folder, as_json)
    return _run(plan.folder, plan.record, as_json, quiet)


def _detach(folder: SweepFolder, as_json: bool) -> int:
    """Goes on with a sweep in a process of its own, which outlives this terminal; returns once it has begun."""
    argv = module_argv("app.cli", ["sweep", "resume", str(folder.path)])
    with open(folder.log, "ab") as log:
        child = subprocess.Popen(
            argv, env=module_environment(), cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            start_new_session=True,
        )  # fmt: skip
    while folder.read().process.get("pid") != child.pid and child.poll() is None:
        time.sleep(0.05)
    record = folder.read()
    if as_json:
        report_json(document_of(folder, record))
    else:
        report(f"{folder.id} is {true_state(record)}; its log is {folder.log}")
        report(f"watch it   tunesmith sweep show {shlex.quote(str(folder.path))}")
        report(f"stop it    tunesmith sweep stop {shlex.quote(str(folder.path))}")
    return 0 if child.poll() is None else 1


def _announced(record: SweepRecord) -> str:
    runs = record.trial_count * len(record.seeds)
    seeds = f" with {len(record.seeds)} seeds each" if record.seeds[1:] else ""
    points = counted(record.trial_count, "point", "points")
    cuts = f"; the worse are cut at steps {', '.join(map(str, record.rungs[:-1]))}" if record.halving else ""
    at_once = f"{record.parallel} at once{' in SLURM' if record.on == 'slurm' else ''}"
    return f"{counted(runs, 'run', 'runs')}: {points}{seeds}, {at_once}, by {record.measure}{cuts}"


def _checked(plan: Plan, as_json: bool) -> int:
    """Shows the trials without starting any."""
    record = plan.record
    if as_json:
        trials = [{"number": trial.number, "options": trial.values} for trial in record.trials]
        runs = record.trial_count * len(record.seeds)
        report_json({"ok": True, "runs": runs, "measure": record.measure, "rungs": record.rungs, "trials": trials,
                     "warnings": plan.job.warnings})  # fmt: skip
        return 0
    for trial in record.trials:
        report(f"trial {trial.number}: {settings(trial)}")
    report(f"check passed: {_announced(record)}")
    return 0


def resume_sweep(name: str, runs_dir: Path, as_json: bool, quiet: bool, detach: bool) -> int:
    """`tunesmith sweep resume`: goes on where its last process ended; nothing runs twice."""
    folder = find_sweep(name, runs_dir)
    record = folder.read()
    if record.state == "done":
        raise ConfigError(f"sweep {folder.id} is done; `tunesmith sweep show {shlex.quote(name)}` shows it")
    try:
        decisive_measure(record.measure)
    except ConfigError as error:
        raise ConfigError(f"{folder.file}: {error}") from None
    if detach:
        folder.hold().close()  # refuse a sweep that is running before anything is started
        return _detach(folder, as_json)
    return _run(folder, record, as_json, quiet)


def _run(folder: SweepFolder, record: SweepRecord, as_json: bool, quiet: bool) -> int:
    """Runs a sweep to its end, or until it is stopped."""
    with folder.hold(), interruptible(), _display(quiet) as (line, table):
        record = folder.read() if folder.file.exists() else record  # it may have gone on until the lock was ours
        folder.stop_request.unlink(missing_ok=True)
        runner = Runner(folder, record, TrialRuns(folder), line, table)
        try:
            runner.go()
        except (KeyboardInterrupt, StopAsked):
            say("stopping: every running run saves a checkpoint first")
            runner.stop()
    if as_json:
        report_json(document_of(folder, record))
    else:
        show(folder, record)
    measured = any(run.scores for trial in record.trials for run in trial.runs)
    return 130 if record.state == "stopped" else 0 if measured else 1


@contextlib.contextmanager
def _display(quiet: bool) -> Iterator[tuple[Callable[[str], None], Callable[[SweepRecord], None]]]:
    """What is shown meanwhile: a line for each event, and on a terminal the table of trials."""
    if quiet:
        yield lambda text: None, lambda record: None
        return
    if not sys.stderr.isatty():
        yield lambda text: say(clean(text)), lambda record: None
        return
    from rich.console import Console
    from rich.live import Live
    from rich.table import Table
    from rich.text import Text

    console = Console(stderr=True)
    with Live(console=console, auto_refresh=False, transient=True) as live:

        def draw(record: SweepRecord) -> None:
            headers, rows = table_of(record)
            table = Table(*headers[:-1], box=None)
            for row in rows[: max(3, console.height - 4)]:
                table.add_row(*(Text(clean(cell)) for cell in row[:-1]))
            live.update(table, refresh=True)

        yield lambda text: console.print(Text(clean(text))), draw


def list_sweeps_verb(runs_dir: Path, as_json: bool) -> int:
    """`tunesmith sweep list`."""
    rows: list[dict[str, Any]] = []
    for folder, record in list_sweeps(runs_dir):
        varied = [axis.option for axis in record.axes]
        rows.append({"sweep": folder.id, "state": true_state(record), "trials": len(record.trials),
                     "options": varied, "started_at": record.started_at, "sweep_dir": str(folder.path)})  # fmt: skip
    if as_json:
        report_json(rows)
    elif not rows:
        report(f"no sweeps in {runs_dir}; start one with `tunesmith sweep tiny-lora --learning_rate 1e-3,3e-3`")
    else:
        table = [[row["sweep"], row["state"], row["trials"], ", ".join(row["options"])] for row in rows]
        show_table(["sweep", "state", "trials", "options"], table, ["options"])
    return 0


def show_sweep(name: str, runs_dir: Path, as_json: bool) -> int:
    """`tunesmith sweep show`."""
    folder = find_sweep(name, runs_dir)
    record = folder.read()
    if as_json:
        report_json(document_of(folder, record))
    else:
        show(folder, record)
    return 0


def stop_sweep(name: str, runs_dir: Path, timeout: float, as_json: bool) -> int:
    """`tunesmith sweep stop`: stops all runs of a sweep; returns 0 once they have ended, 1 if they have not in time."""
    folder = find_sweep(name, runs_dir)
    deadline = time.monotonic() + timeout
    if true_state(folder.read()) == "running":
        folder.ask_stop()
    while true_state(folder.read()) == "running" and time.monotonic() < deadline:
        time.sleep(0.2)
    record = folder.read()
    if true_state(record) == "interrupted":  # its process is gone, and its runs are not
        with folder.hold(), interruptible():
            Runner(folder, record, TrialRuns(folder), say).stop(deadline)
    if as_json:
        report_json(document_of(folder, record))
    else:
        report(f"{folder.id} is {true_state(record)}")
    return 0 if true_state(record) in ("stopped", "done") else 1
