"""The verbs that start, show and change runs. Each returns an exit status, and raises ConfigError on invalid input."""

from __future__ import annotations

import math
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from app.command_line import CLONE, RESUME, TRAIN, Args
from app.commands.scheduled import scheduler_of, submit_verb
from app.console import clean, counted, number, report, report_json, say, show_table
from app.launch import actions, background
from app.launch.foreground import (
    EXIT_CODES,
    how_it_ended,
    preflight,
    print_summary,
    result,
    say_choices,
    say_diagnoses,
    spinner,
    train,
    where,
)
from app.launch.job import TrainJob, refuse_unresumable, resume_job, train_job
from app.runs.machines import join_lines, machines_line, members, resume_line
from app.runs.profiles import SHARES, profiles
from app.runs.runs import (
    end_by_force,
    find_run,
    last_checkpoint,
    last_values,
    list_runs,
    log_lines,
    stop_run,
    summary,
    sweep_of,
    true_state,
)
from app.runs.state import queue
from app.services.diagnosis import apply_remedy, diagnosed
from app.services.memory_check import known_verdict, memory_verdict
from app.services.proofs import entries, proof_line
from trainers.config.byte_text import byte_text
from trainers.config.mistakes import ConfigError
from trainers.config.parse import Request
from trainers.config.presets import find_preset, preset_names
from trainers.run.folder import END_STATES, write_atomic
from trainers.run.lineage import in_words, stages_before


def train_verb(argv: Sequence[str]) -> int:
    """`tunesmith train`."""
    args = TRAIN.read(argv)
    if args is None:
        return 0
    if scheduler := scheduler_of(args):
        return submit_verb(scheduler, args)
    job = train_job(args)
    if "check" in args.switches:
        return _check(job, args)
    return _start(job, args)


def _check(job: TrainJob, args: Args) -> int:
    """Runs only the pre-flight check, and warns if the run is not expected to fit into memory."""
    say_choices(job)
    preflight(job, quiet="quiet" in args.switches)
    if line := _warn_of_memory(job, "quiet" in args.switches):
        job.warnings.append(line)
    document = {
        "strategy": job.strategy.name,
        "world_size": job.devices.num_processes,
        "ok": True,
        "notes": job.notes,
        "warnings": job.warnings,
    }
    if "json" in args.switches:
        report_json(document)
    else:
        count = counted(job.devices.num_processes, "process", "processes")
        report(f"check passed: {job.strategy.name} with {count}")
    return 0


def _start(job: TrainJob, args: Args) -> int:
    """Starts the run in the foreground or background, after `confirm_memory`.

    Raises:
        ConfigError: if the user declines.
    """
    confirm_memory(job, "quiet" in args.switches, "json" in args.switches)
    return _detach(job, args) if "detach" in args.switches else _train(job, args)


def confirm_memory(job: TrainJob, quiet: bool, as_json: bool) -> None:
    """Warns if the run is not expected to fit into memory, and on a terminal asks whether to start it anyway.

    Raises:
        ConfigError: if the user declines.
    """
    asks = _warn_of_memory(job, quiet) and sys.stdin.isatty() and not as_json
    if asks and not _confirmed("start it anyway?", as_json):
        raise ConfigError("not started: it needs more memory than is free")


def _warn_of_memory(job: TrainJob, quiet: bool) -> str:
    """Prints a warning if the run is not expected to fit into memory; returns it without its prefix, or empty."""
    with spinner("checking memory", quiet or known_verdict(job) is not None):
        line = memory_verdict(job).line
    if line:
        say("warning: " + clean(line))
    return line


def _detach(job: TrainJob, args: Args) -> int:
    """Starts the run in the background; returns 0 once its supervisor has taken over."""
    say_choices(job)
    state = background.start(job, quiet="quiet" in args.switches)
    if "json" in args.switches:
        report_json(result(job, state))
    if state["state"] == "failed":
        print_summary(job.run, state, diagnosed(job.run))
        return 1
    if "json" not in args.switches:
        report(f"{job.run.id} is {state['state']}: {job.strategy.name} on {where(job)}")
        report(f"watch it   tunesmith runs logs --follow {shlex.quote(str(job.run.path))}")
        report(f"stop it    tunesmith stop {shlex.quote(str(job.run.path))}")
        for machine, line in enumerate(join_lines(job.run, state), 1):
            report(f"machine {machine}  {line}")
    return 0


def _train(job: TrainJob, args: Args) -> int:
    state = train(job, quiet="quiet" in args.switches)
    as_json = "json" in args.switches
    diagnoses = [] if job.run.lost() or job.devices.machine_rank else diagnosed(job.run)
    if as_json:
        report_json(result(job, state, diagnoses))
    if not as_json or state["state"] != "done":
        print_summary(job.run, state, diagnoses)
    return EXIT_CODES[state["state"]]


def resume_verb(argv: Sequence[str]) -> int:
    """`tunesmith resume`."""
    args = RESUME.read(argv)
    if args is None:
        return 0
    if len(args.names) != 1 or "check" in args.switches:
        raise ConfigError("resume takes one run; write `tunesmith resume RUN`, and `tunesmith runs list` lists them")
    runs_dir = args.request.options.pop("runs_dir", "runs")
    run = find_run(args.names[0], Path(runs_dir))
    if "apply" in args.own:
        refuse_unresumable(run)
        apply_remedy(diagnosed(run), args)
    if scheduler := scheduler_of(args, run):
        return submit_verb(scheduler, args, run)
    return _start(resume_job(run, args), args)


def clone_verb(argv: Sequence[str]) -> int:
    """`tunesmith runs clone`."""
    args = CLONE.read(argv)
    if args is None:
        return 0
    if len(args.names) != 1:
        raise ConfigError("clone takes one run; write `tunesmith runs clone RUN --learning_rate 1e-4`")
    runs_dir = args.request.options.get("runs_dir", "runs")
    run = find_run(args.names[0], Path(runs_dir))
    if "apply" in args.own:
        switches = set(args.switches)
        apply_remedy(diagnosed(run), args)
        args.switches = switches  # a clone starts at step 0, so nothing needs force
    job = actions.clone(run, args)
    return _check(job, args) if "check" in args.switches else _start(job, args)


def stop_verb(name: str, timeout: str, save: bool, force: bool, runs_dir: Path, as_json: bool) -> int:
    """`tunesmith stop`: returns 0 if the run has ended, 1 if it has not within the timeout."""
    seconds = parse_seconds(timeout)
    run = find_run(name, runs_dir)
    if not as_json and true_state(run)["state"] not in END_STATES:
        saving = "saving a checkpoint first" if save else "without saving"
        say(f"stopping {run.id}: {saving}")
    stopped = stop_run(run, seconds, save=save)
    if not stopped.in_time and force:
        stopped = end_by_force(run)
    state = stopped.state
    if as_json:
        report_json({**summary(run), "already_ended": stopped.already, "in_time": stopped.in_time})
    elif not stopped.in_time:
        say(f"{run.id} is still {state['state']} after {seconds:g} s; it stops at its next step")
    else:
        report(f"{run.id} {'had already ended' if stopped.already else 'has ended'}, {how_it_ended(state)}")
    return 0 if stopped.in_time else 1


def parse_seconds(timeout: str) -> float:
    """The seconds in the value of `--timeout`.

    Raises:
        ConfigError: if it is no such number.
    """
    try:
        seconds = float(timeout)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise ConfigError(f"timeout={timeout!r} is not a number of seconds; write e.g. --timeout 300")
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
    # Every verb needs the id, so it is never dropped.
    expendable = ["cause", "preset", "strategy", "started", "devices", "step"]
    show_table(headers, [_row(row) for row in rows], expendable)
    return 0


def _row(row: dict[str, Any]) -> list[Any]:
    steps = f"{row['step']}/{row['total_steps']}" if row["total_steps"] else row["step"]
    ids = ",".join(map(str, row["gpus"]))
    devices = f"GPU {ids}" if ids else counted(row["world_size"], "process", "processes") if row["world_size"] else "?"
    started, cause = str(row["started_at"] or "")[:19].replace("T", " "), str(row["cause"] or "")
    short_cause = cause if len(cause) <= 60 else cause[:57] + "..."
    return [row["id"], row["state"], steps, row["preset"], row["strategy"], devices, started, short_cause]


def show_verb(name: str, plan: bool, runs_dir: Path, as_json: bool) -> int:
    """`tunesmith runs show`."""
    from app.runs.metrics import Curves  # they import numpy, which takes a while
    from app.services.planned_memory import memory_of

    run = find_run(name, runs_dir)
    document = {**summary(run), "last_checkpoint": last_checkpoint(run), "metrics": last_values(run)}
    state, diagnoses = run.read_state() or {}, diagnosed(run)
    document["machines"], export_dir = machines_line(state) or None, state.get("export_dir")
    joined = members(run, true_state(run))
    memory, proofs = memory_of(run, Curves(), plan), entries(run)
    sweep, stages = sweep_of(run), stages_before(run)
    if as_json:
        diagnosis = [entry.as_json() for entry in diagnoses]
        parts = {"diagnosis": diagnosis, "profiles": profiles(run), "memory": memory, "proofs": proofs, "sweep": sweep}
        parts["members"] = joined
        parts["from_run"] = [asdict(stage) for stage in stages]
        report_json({**document, "export_dir": export_dir, **parts})
        return 0
    values = document.pop("metrics")
    member = f"trial {sweep['trial']} of {sweep['sweep']}" if sweep else None
    facts = {**document, "sweep": member, "starts from": in_words(stages) or None, "model": export_dir}
    facts |= {"gpus": ",".join(map(str, document["gpus"])) or "none"}
    facts |= {key: number(value, 6) for key, value in values.items() if isinstance(value, float)}
    show_table(["id", facts.pop("id")], [[key, value] for key, value in facts.items() if value is not None])
    names = ("machine", "status", "host", "address", "devices", "versions", "problem", "line")
    show_table(names, [[clean(str(row[name])) for name in names] for row in joined]) if joined else None
    for profile in profiles(run):
        shares = ", ".join(f"{share:.0%} {SHARES[name]}" for name, share in profile["shares"].items())
        report(f"profile of rank {profile['rank']}, {profile['steps']} steps from {profile['first_step']}: {shares}")
    if plan:
        _report_memory(memory)
    for proof in proofs:
        report(f"proof {proof['number']}{', with a known fault' if proof['control'] else ''}: {proof_line(proof)}")
    say_diagnoses(run, document, diagnoses)
    if document["state"] in ("stopped", "failed"):
        say(f"continue with: {resume_line(run, state)}")
    return 0


def _report_memory(memory: Mapping[str, Any]) -> None:
    if memory["error"]:
        say(f"no plan: {clean(memory['error'])}")
    names = ("measured_gib", "planned_gib")
    rows = [[row["rank"], *(number(row[name], 2) for name in names), number(row["ratio"], 2)] for row in memory["rows"]]
    show_table(["rank", "measured, GiB", "planned, GiB", "planned / measured"], rows)
    report(memory["note"])


def logs_verb(name: str, follow: bool, runs_dir: Path) -> int:
    """`tunesmith runs logs`: returns 0, or with `follow` the status of `train` for how the run has ended."""
    run = find_run(name, runs_dir)
    for line in log_lines(run, follow):
        sys.stdout.write(clean(line) + "\n")
        if follow:
            sys.stdout.flush()
    sys.stdout.flush()
    return EXIT_CODES[true_state(run)["state"]] if follow else 0


def rename_verb(name: str, new_id: str, runs_dir: Path, as_json: bool) -> int:
    """`tunesmith runs rename`."""
    run = actions.rename(find_run(name, runs_dir), new_id)
    return _report_result(as_json, {"id": run.id, "run_dir": str(run.path)}, f"now {run.id}")


def delete_verb(name: str, yes: bool, runs_dir: Path, as_json: bool) -> int:
    """`tunesmith runs delete`: asks on a terminal, with the size; requires `--yes` elsewhere."""
    run = find_run(name, runs_dir)
    if not yes and not _confirmed(f"delete {run.id}, {byte_text(actions.size(run))}, permanently?", as_json):
        raise ConfigError(f"run {run.id} was not deleted; pass --yes to delete it with its checkpoints and exports")
    freed = actions.delete(run)
    leftover = f"; other files in {run.path} remain" if run.path.exists() else ""
    return _report_result(as_json, {"id": run.id, "bytes": freed}, f"deleted {run.id}, {byte_text(freed)}{leftover}")


def _confirmed(question: str, as_json: bool) -> bool:
    if as_json or not sys.stdin.isatty():
        return False
    say(f"{question} [y/N]")
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def queue_verb(runs_dir: Path, as_json: bool) -> int:
    """`tunesmith runs queue`."""
    rows = queue(runs_dir)
    if as_json:
        report_json(rows)
    elif not rows:
        report("no run is queued; `tunesmith train --detach` queues one while its devices are in use")
    else:
        table = [[row["place"], row["id"], row["devices"], ", ".join(row["held_by"])] for row in rows]
        show_table(["place", "id", "needs", "in use by"], table, ["in use by"])
    return 0


def move_verb(
    name: str, places: str | None, to: str | None, before: str | None, after: str | None, runs_dir: Path, as_json: bool
) -> int:
    """`tunesmith runs move`."""
    if sum(target is not None for target in (places, to, before, after)) != 1:
        raise ConfigError(
            "move takes one target; write e.g. `tunesmith runs move RUN -1` for one place forward, `--to 1` for the "
            "front, or `--before OTHER`"
        )
    run = find_run(name, runs_dir)
    position = actions.move(
        run,
        0 if places is None else _whole_number("places", places, "-1 to move one place forward"),
        to=None if to is None else _whole_number("to", to, "--to 1 for the front", least=1),
        before=None if before is None else find_run(before, runs_dir),
        after=None if after is None else find_run(after, runs_dir),
    )
    return _report_result(as_json, {"id": run.id, "place": position}, f"{run.id} is number {position} in the queue")


def _whole_number(option: str, text: str, example: str, least: int | None = None) -> int:
    try:
        value = int(text)
    except ValueError:
        raise ConfigError(f"{option}={text!r} is not a whole number; write e.g. {example}") from None
    if least is not None and value < least:
        raise ConfigError(f"{option}={value} is below {least}; write e.g. {example}")
    return value


def compare_verb(
    names: Sequence[str], by: str | None, csv: Path | None, differences: bool, runs_dir: Path, as_json: bool
) -> int:
    """`tunesmith runs compare`."""
    from app.runs.compare import MEASURES, as_csv, compare, measure_texts  # they import numpy, which takes a while
    from app.runs.metrics import Curves

    runs = list({run.path: run for run in (find_run(name, runs_dir) for name in names)}.values())
    if csv is not None and csv.suffix.lower() != ".csv":
        raise ConfigError(f"csv={str(csv)!r} does not end in .csv; write e.g. --csv runs.csv")
    comparison = compare(runs, Curves(), by)
    if csv is not None:
        try:
            write_atomic(csv, as_csv(comparison))
        except OSError as error:
            raise ConfigError(f"csv={str(csv)!r} cannot be written: {error.strerror}; name another file") from None
    if as_json:
        report_json(comparison)
        return 0
    headers = ["", *(run.id for run in runs)]
    rows = [["state", *(run["state"] for run in comparison["runs"])]]
    for row in comparison["measures"]:
        pairs = zip(measure_texts(row["values"], MEASURES[row["name"]]), row["steps"], strict=True)
        rows.append([row["label"], *(text + (f" at step {step}" if step else "") for text, step in pairs)])
    settings = [row for row in comparison["settings"] if row["differs"] or not differences]
    rows += [[row["name"], *("-" if value in (None, "") else value for value in row["values"])] for row in settings]
    show_table(headers, rows)
    for group in comparison["groups"]:
        if spread := group["values"].get(comparison["by"]):
            measure = MEASURES[comparison["by"]]
            mean, low, high = measure_texts([spread[key] for key in ("mean", "min", "max")], measure)
            label = f"{spread['runs']} seeds ({group['label']}), {comparison['by']}"
            report(f"{label}: mean {mean}, standard deviation {spread['std']:,.3g}, from {low} to {high}")
    report(comparison["verdict"])
    return 0


def _report_result(as_json: bool, document: dict[str, Any], line: str) -> int:
    if as_json:
        report_json(document)
    else:
        report(line)
    return 0


def export_verb(name: str, wanted: actions.ExportRequest, runs_dir: Path, as_json: bool) -> int:
    """`tunesmith export`."""
    run = find_run(name, runs_dir)
    try:
        exported: actions.Exported | None = actions.export(run, wanted)
    except actions.ExportFailed as error:
        say(f"the export failed: {clean(str(error))}")
        exported = None
    if as_json:
        full = Request(config=str(run.config)).resolve().method == "full"
        kind = "full" if full else "merged" if wanted.merged else "adapter"
        document = {
            "run_dir": str(run.path),
            "kind": kind,
            "export_dir": str(exported.folder) if exported else None,
            "dtype": exported.dtype if exported else None,
            "loss_difference": exported.loss_difference if exported else None,
            "gguf": exported.gguf if exported else [],
        }
        report_json(document)
    elif exported:
        for line in (exported.check, *(file["text"] for file in exported.gguf)):
            say(line)
        report(str(exported.folder))
    return 0 if exported else 1


def presets_verb(as_json: bool) -> int:
    """`tunesmith presets`."""
    return catalog([{"name": name, "summary": find_preset(name).summary} for name in preset_names()], as_json)


def catalog(rows: list[dict[str, str]], as_json: bool) -> int:
    """Shows names and summaries; returns exit status 0."""
    if as_json:
        report_json(rows)
    else:
        show_table(["name", "summary"], [[row["name"], row["summary"]] for row in rows])
    return 0
