"""The verbs of the command line but `demo`: each returns an exit status and raises ConfigError for a wrong request."""

from __future__ import annotations

import math
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from app.console import clean, counted, number, report, report_json, say, show_table
from app.launch import actions, background
from app.launch.foreground import (
    EXIT_CODES,
    how_it_ended,
    preflight,
    print_summary,
    result,
    say_choices,
    spinner,
    train,
    where,
)
from app.launch.job import Job, Words, resume_job, sort_words, train_job
from app.runs.runs import (
    end_by_force,
    find_run,
    last_checkpoint,
    last_values,
    list_runs,
    log_lines,
    stop_run,
    summary,
)
from app.services.memory_check import known_verdict, memory_verdict
from trainers.config.options import ConfigError
from trainers.config.parse import Request, preset_names, preset_summary
from trainers.strategy.strategy import load_strategy, strategy_names


def train_verb(words: Sequence[str]) -> int:
    """`tunesmith train`."""
    sorted_words = sort_words(words)
    if "help" in sorted_words.switches:
        from app.option_help import show_train_help

        show_train_help()
        return 0
    job = train_job(sorted_words)
    if "check" in sorted_words.switches:
        return _check(job, sorted_words)
    return _start(job, sorted_words)


def _check(job: Job, words: Words) -> int:
    """The pre-flight check alone."""
    for line in job.notes:
        say(clean(line))
    preflight(job, quiet="quiet" in words.switches)
    document = {
        "strategy": job.strategy.name,
        "world_size": job.devices.num_processes,
        "ok": True,
        "notes": job.notes,
        "warnings": job.warnings,
    }
    if "json" in words.switches:
        report_json(document)
    else:
        count = counted(job.devices.num_processes, "process", "processes")
        report(f"nothing is wrong: {job.strategy.name} with {count}")
    return 0


def _start(job: Job, words: Words) -> int:
    """Starts the run, in the background or here; one that will hardly fit only after a question, on a terminal.

    Raises:
        ConfigError: when the user does not want it.
    """
    refuse_unwanted(job, "quiet" in words.switches, "json" in words.switches)
    return _detach(job, words) if "detach" in words.switches else _train(job, words)


def refuse_unwanted(job: Job, quiet: bool, as_json: bool) -> None:
    """Warns of a run that will hardly fit, and asks on a terminal.

    Raises:
        ConfigError: when the user does not want it.
    """
    with spinner("looking at the memory", quiet or known_verdict(job) is not None):
        verdict = memory_verdict(job)
    if verdict.line:
        say("warning: " + clean(verdict.line))
        if sys.stdin.isatty() and not as_json and not _confirmed("start it all the same?", as_json):
            raise ConfigError("not started: it needs more memory than is free")


def _detach(job: Job, words: Words) -> int:
    """Starts the run in the background: 0 when its supervisor has taken it over."""
    say_choices(job)
    state = background.start(job, quiet="quiet" in words.switches)
    if "json" in words.switches:
        report_json(result(job, state))
    if state["state"] == "failed":
        print_summary(job.run, state)
        return 1
    if "json" not in words.switches:
        report(f"{job.run.id} is {state['state']}: {job.strategy.name} on {where(job)}")
        report(f"watch it   tunesmith runs logs --follow {shlex.quote(str(job.run.path))}")
        report(f"stop it    tunesmith stop {shlex.quote(str(job.run.path))}")
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
        from app.option_help import show_resume_help

        show_resume_help()
        return 0
    if len(sorted_words.names) != 1 or "check" in sorted_words.switches:
        raise ConfigError("resume takes one run; write `tunesmith resume RUN`, and `tunesmith runs list` names them")
    runs_dir = _take(sorted_words.options, "runs_dir") or "runs"
    return _start(resume_job(find_run(sorted_words.names[0], Path(runs_dir)), sorted_words), sorted_words)


def clone_verb(words: Sequence[str]) -> int:
    """`tunesmith runs clone`."""
    sorted_words = sort_words(words)
    if "help" in sorted_words.switches:
        from app.option_help import show_clone_help

        show_clone_help()
        return 0
    if len(sorted_words.names) != 1:
        raise ConfigError("clone takes one run; write `tunesmith runs clone RUN --learning_rate 1e-4`")
    runs_dir = _take(list(sorted_words.options), "runs_dir") or "runs"
    job = actions.clone(find_run(sorted_words.names[0], Path(runs_dir)), sorted_words)
    return _check(job, sorted_words) if "check" in sorted_words.switches else _start(job, sorted_words)


def _take(options: list[str], name: str) -> str | None:
    """Removes `--name VALUE` or `--name=VALUE` from the options, and returns the value."""
    for index, word in enumerate(options):
        if word.startswith(f"--{name}="):
            return options.pop(index).partition("=")[2]
        if word == f"--{name}" and index + 1 < len(options):
            del options[index]
            return options.pop(index)
    return None


def stop_verb(name: str, timeout: str, save: bool, force: bool, runs_dir: Path, as_json: bool) -> int:
    """`tunesmith stop`: 0 when the run has ended, 1 when it has not in time."""
    seconds = _seconds(timeout)
    run = find_run(name, runs_dir)
    if not as_json:
        how = "its ranks save a checkpoint first" if save else "nothing is saved"
        say(f"stopping {run.id}: {how}")
    stopped = stop_run(run, seconds, save=save)
    if not stopped.in_time and force:
        stopped = end_by_force(run)
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


def rename_verb(name: str, new_id: str, runs_dir: Path, as_json: bool) -> int:
    """`tunesmith runs rename`."""
    run = actions.rename(find_run(name, runs_dir), new_id)
    return _done(as_json, {"id": run.id, "run_dir": str(run.path)}, f"now {run.id}")


def delete_verb(name: str, yes: bool, runs_dir: Path, as_json: bool) -> int:
    """`tunesmith runs delete`: asks on a terminal, with the size; elsewhere `--yes` is needed."""
    run = find_run(name, runs_dir)
    if not yes and not _confirmed(f"delete {run.id}, {actions.size(run) / 2**20:,.1f} MiB, for ever?", as_json):
        raise ConfigError(f"run {run.id} is not deleted; pass --yes to delete it with its checkpoints and exports")
    freed = actions.delete(run)
    kept = f"; other files in {run.path} are left" if run.path.exists() else ""
    return _done(as_json, {"id": run.id, "bytes": freed}, f"deleted {run.id}, {freed / 2**20:,.1f} MiB{kept}")


def _confirmed(question: str, as_json: bool) -> bool:
    if as_json or not sys.stdin.isatty():
        return False
    say(f"{question} [y/N]")
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def move_verb(name: str, places: str, runs_dir: Path, as_json: bool) -> int:
    """`tunesmith runs move`."""
    try:
        number = int(places)
    except ValueError:
        raise ConfigError(f"places={places!r} is no whole number; write e.g. -1 for one place to the front") from None
    run = find_run(name, runs_dir)
    place = actions.move(run, number)
    return _done(as_json, {"id": run.id, "place": place}, f"{run.id} is number {place} in the queue")


def _done(as_json: bool, document: dict[str, Any], line: str) -> int:
    if as_json:
        report_json(document)
    else:
        report(line)
    return 0


def export_verb(
    name: str,
    checkpoint: str | None,
    merged: bool,
    output: Path | None,
    dtype: str | None,
    runs_dir: Path,
    as_json: bool,
) -> int:
    """`tunesmith export`."""
    run = find_run(name, runs_dir)
    try:
        exported: actions.Exported | None = actions.export(run, checkpoint, merged, output, dtype)
    except actions.ExportFailed as error:
        say(f"the export failed: {clean(str(error))}")
        exported = None
    if as_json:
        full = Request(config=str(run.config)).resolve().method == "full"
        kind = "full" if full else "merged" if merged else "adapter"
        document = {
            "run_dir": str(run.path),
            "kind": kind,
            "export_dir": str(exported.folder) if exported else None,
            "dtype": exported.dtype if exported else None,
            "loss_difference": exported.loss_difference if exported else None,
        }
        report_json(document)
    elif exported:
        say(exported.check)
        report(str(exported.folder))
    return 0 if exported else 1


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
