"""`--on` of `tunesmith train` and `resume`: hands the run to a scheduler, or prints what it would get."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from app.command_line import SCHEDULER_OPTIONS, Args
from app.console import counted, report, report_json
from app.launch.foreground import result, say_choices
from app.runs.scheduled import submission
from trainers.config.mistakes import ConfigError, Mistake
from trainers.run.folder import RunFolder

if TYPE_CHECKING:
    from app.launch.schedulers import Scheduler


def scheduler_of(args: Args, run: RunFolder | None = None) -> Scheduler | None:
    """The scheduler that is to start the run, as `--on` says, otherwise as the run was started before.

    Returns:
        The scheduler; None for this machine.

    Raises:
        ConfigError: for an unknown place, or options of a scheduler that does not start the run.
    """
    submitted = submission(run) if run is not None else None
    if submitted is None and not SCHEDULER_OPTIONS.keys() & args.own.keys():
        return None
    from app.launch.schedulers import SCHEDULERS  # most runs need none of them

    target = str(args.own.get("on", submitted["kind"] if submitted else "local"))
    if target != "local" and target not in SCHEDULERS:
        names = ", ".join(("local", *SCHEDULERS))
        raise ConfigError.about("on", target, "is no place to train", f"use one of {names}")
    scheduler = SCHEDULERS.get(target)
    permitted = {*scheduler.options.model_fields, "dry_run"} if scheduler else set()
    mistakes = []
    for name in [name for name in args.own if name not in permitted]:
        kinds = [kind for kind, other in SCHEDULERS.items() if name in (*other.options.model_fields, "dry_run")]
        if kinds:
            titles = ", ".join(SCHEDULERS[kind].title for kind in kinds)
            mistakes.append(Mistake(f"--{name}", None, f"is for jobs of {titles}", f"add --on {'|'.join(kinds)}"))
    if mistakes:
        raise ConfigError(mistakes)
    return scheduler


def submit_verb(scheduler: Scheduler, args: Args, run: RunFolder | None = None) -> int:
    """Submits a new run, or one to resume; with `--dry_run` prints what would be. Returns the exit status."""
    if "check" in args.switches:
        remedy = "use --dry_run, which also prints what would be submitted"
        raise ConfigError(f"--check with --on {scheduler.title.lower()}: {remedy}")
    job, options = scheduler.job(args, run)
    as_json, quiet = "json" in args.switches, "quiet" in args.switches
    say_choices(job)
    if "dry_run" in args.own:
        text = scheduler.preview(job, options)
        if as_json:
            facts = {"run_dir": str(job.run.path), "strategy": job.strategy.name, "warnings": job.warnings}
            report_json({**facts, "world_size": job.devices.num_processes, "script": text})
        else:
            report(text.rstrip("\n"))
        return 0
    state = scheduler.start(job, options, quiet)
    if as_json:
        report_json({**result(job, state), "scheduler": state["scheduler"]})
    else:
        nodes = counted(options.nodes, "node", "nodes")
        number = state["scheduler"]["job"]
        report(f"{job.run.id} is queued in {scheduler.title} as job {number}: {job.strategy.name} on {nodes}")
        report(f"watch it   tunesmith runs logs --follow {shlex.quote(str(job.run.path))}")
        report(f"stop it    tunesmith stop {shlex.quote(str(job.run.path))}")
    return 0
