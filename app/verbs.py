"""The verbs of the command line but `demo`: each returns an exit status and raises ConfigError for a wrong request."""

from __future__ import annotations

import math
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from app.console import clean, counted, number, report, report_json, say, show_table
from app.launcher import ROOT, module_argv, module_environment
from app.request import Job, Words, resume_job, sort_words, train_job, writable_parent
from app.runs import (
    find_run,
    last_checkpoint,
    last_values,
    list_runs,
    log_lines,
    stop_run,
    summary,
)
from app.training import EXIT_CODES, how_it_ended, preflight, print_summary, result, run_program, train
from trainers.config import ConfigError
from trainers.options import Request, preset_names, preset_summary
from trainers.strategies import load_strategy, strategy_names


def train_verb(words: Sequence[str]) -> int:
    """`tunesmith train`."""
    sorted_words = sort_words(words)
    if "help" in sorted_words.switches:
        from app.train_help import show_train_help

        show_train_help()
        return 0
    job = train_job(sorted_words)
    if "check" in sorted_words.switches:
        return _check(job, sorted_words)
    return _train(job, sorted_words)


def _check(job: Job, words: Words) -> int:
    """The pre-flight check alone."""
    preflight(job, quiet="quiet" in words.switches)
    document = {"strategy": job.strategy.name, "world_size": job.devices.num_processes, "ok": True}
    if "json" in words.switches:
        report_json(document)
    else:
        count = counted(job.devices.num_processes, "process", "processes")
        report(f"nothing is wrong: {job.strategy.name} with {count}")
    return 0


def _train(job: Job, words: Words) -> int:
    state = train(job, quiet="quiet" in words.switches)
    as_json = "json" in words.switches
    if as_json:
        report_json(result(job, state))
    if not as_json or state["state"] != "done":
        print_summary(job.run, state)
    return EXIT_CODES[state["state"]]


def resume_verb(words: Sequence[str]) -> int:
    """`tunesmith resume`."""
    sorted_words = sort_words(words)
    if "help" in sorted_words.switches:
        from app.train_help import show_resume_help

        show_resume_help()
        return 0
    if len(sorted_words.names) != 1 or "check" in sorted_words.switches:
        raise ConfigError("resume takes one run; write `tunesmith resume RUN`, and `tunesmith runs list` names them")
    runs_dir = _take(sorted_words.options, "runs_dir") or "runs"
    return _train(resume_job(find_run(sorted_words.names[0], Path(runs_dir)), sorted_words), sorted_words)


def _take(options: list[str], name: str) -> str | None:
    """Removes `--name VALUE` or `--name=VALUE` from the options, and returns the value."""
    for index, word in enumerate(options):
        if word.startswith(f"--{name}="):
            return options.pop(index).partition("=")[2]
        if word == f"--{name}" and index + 1 < len(options):
            del options[index]
            return options.pop(index)
    return None


def stop_verb(name: str, timeout: str, runs_dir: Path, as_json: bool) -> int:
    """`tunesmith stop`: 0 when the run has ended, 1 when it has not in time."""
    seconds = _seconds(timeout)
    run = find_run(name, runs_dir)
    if not as_json:
        say(f"stopping {run.id}: its ranks save a checkpoint first")
    stopped = stop_run(run, seconds)
    state = stopped.state
    if as_json:
        report_json({**summary(run), "already_ended": stopped.already, "in_time": stopped.in_time})
    elif not stopped.in_time:
        say(f"{run.id} is still {state['state']} after {seconds:g} s; it stops at its next step")
    else:
        report(f"{run.id} {'had ended already' if stopped.already else 'has ended'}, {how_it_ended(state)}")
    return 0 if stopped.in_time else 1


def _seconds(timeout: str) -> float:
    try:
        seconds = float(timeout)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise ConfigError(f"timeout={timeout!r} is no number of seconds; write e.g. --timeout 300")
    return seconds


def list_verb(runs_dir: Path, as_json: bool) -> int:
    """`tunesmith runs list`."""
    rows = [summary(run) for run in list_runs(runs_dir)]
    if as_json:
        report_json(rows)
        return 0
    if not rows:
        report(f"no runs in {runs_dir}; start one with `tunesmith demo`")
        return 0
    headers = ["id", "state", "step", "preset", "strategy", "devices", "started", "cause"]
    # The id is what every verb needs, so it goes last of all: never.
    expendable = ["cause", "preset", "strategy", "started", "devices", "step"]
    show_table(headers, [_row(row) for row in rows], expendable)
    return 0


def _row(row: dict[str, Any]) -> list[Any]:
    steps = f"{row['step']}/{row['total_steps']}" if row["total_steps"] else row["step"]
    ids = ",".join(map(str, row["gpus"]))
    devices = f"GPU {ids}" if ids else counted(row["world_size"], "process", "processes") if row["world_size"] else "?"
    started, cause = str(row["started_at"] or "")[:19].replace("T", " "), str(row["cause"] or "")
    short = cause if len(cause) <= 60 else cause[:57] + "..."
    return [row["id"], row["state"], steps, row["preset"], row["strategy"], devices, started, short]


def show_verb(name: str, runs_dir: Path, as_json: bool) -> int:
    """`tunesmith runs show`."""
    run = find_run(name, runs_dir)
    document = {**summary(run), "last_checkpoint": last_checkpoint(run), "metrics": last_values(run)}
    export_dir = (run.read_state() or {}).get("export_dir")
    if as_json:
        report_json({**document, "export_dir": export_dir})
        return 0
    values = document.pop("metrics")
    shown = {**document, "model": export_dir, "gpus": ",".join(map(str, document["gpus"])) or "none"}
    shown |= {key: number(value, 6) for key, value in values.items() if isinstance(value, float)}
    show_table(["id", shown.pop("id")], [[key, value] for key, value in shown.items() if value is not None])
    if document["state"] in ("stopped", "failed"):
        say(f"go on with: tunesmith resume {shlex.quote(str(run.path))}")
    return 0


def logs_verb(name: str, follow: bool, runs_dir: Path) -> int:
    """`tunesmith runs logs`."""
    for line in log_lines(find_run(name, runs_dir), follow):
        sys.stdout.write(clean(line) + "\n")
        if follow:
            sys.stdout.flush()
    sys.stdout.flush()
    return 0


def export_verb(
    name: str, checkpoint: str | None, merged: bool, output: Path | None, runs_dir: Path, as_json: bool
) -> int:
    """`tunesmith export`."""
    run = find_run(name, runs_dir)
    method = Request(config=str(run.config)).resolve().method
    if merged and method == "full":
        raise ConfigError(f"--merged: run {run.id} has method=full, there is no adapter to merge; leave --merged out")
    kind = "full" if method == "full" else "merged" if merged else "adapter"
    target = (output.expanduser() if output else run.path / f"export-{kind}").absolute()
    if output:
        _refuse_target(target)
    argv = module_argv("trainers.export", ["--run", str(run.path), "--output", str(target), "--kind", kind])
    status, _, errors = run_program(
        [*argv, *(["--checkpoint", checkpoint] if checkpoint else [])], module_environment(), cwd=ROOT
    )
    lines = [clean(line) for line in errors.splitlines() if line.strip()]
    if status == 2:
        raise ConfigError(lines)
    if status != 0:
        say(f"the export failed: {lines[-1] if lines else f'exit status {status}'}")
    if as_json:
        report_json({"run_dir": str(run.path), "kind": kind, "export_dir": str(target) if status == 0 else None})
    elif status == 0:
        report(str(target))
    return 1 if status else 0


def _refuse_target(target: Path) -> None:
    """Raises ConfigError for a folder that an export would spoil, or that cannot be made."""
    try:
        used = target.exists() and (not target.is_dir() or any(target.iterdir()))
    except OSError:
        used = False  # the next check says why
    if used:
        raise ConfigError(f"output={target} holds other files, which an export would replace; name a new folder")
    writable_parent(target, "output", "name a folder that can be made")


def presets_verb(as_json: bool) -> int:
    """`tunesmith presets`."""
    return _catalog([{"name": name, "summary": preset_summary(name)} for name in preset_names()], as_json)


def strategies_verb(as_json: bool) -> int:
    """`tunesmith strategies`."""
    return _catalog([{"name": name, "summary": load_strategy(name).summary} for name in strategy_names()], as_json)


def _catalog(rows: list[dict[str, str]], as_json: bool) -> int:
    if as_json:
        report_json(rows)
    else:
        show_table(["name", "summary"], [[row["name"], row["summary"]] for row in rows])
    return 0
