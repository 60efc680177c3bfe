"""`--on slurm` of `tunesmith train` and `resume`: hands the run to SLURM, or prints its batch script."""

from __future__ import annotations

import shlex

from app.command_line import Args
from app.console import report, report_json
from app.launch import slurm
from app.launch.foreground import result, say_choices
from app.runs.scheduled import submission
from app.schedulers.slurm import script
from app.schedulers.slurm_options import SlurmOptions
from trainers.config.mistakes import ConfigError, Mistake
from trainers.run.folder import RunFolder

_PLACES = ("local", "slurm")


def on_slurm(args: Args, run: RunFolder | None = None) -> bool:
    """Whether SLURM is to start the run: as `--on` says, otherwise as the run was started before.

    Raises:
        ConfigError: for an unknown place, or options of SLURM for a run that it does not start.
    """
    before = "slurm" if run is not None and submission(run) else "local"
    target = str(args.own.get("on", before))
    if target not in _PLACES:
        raise ConfigError.about("on", target, "is no place to train", f"use {' or '.join(_PLACES)}")
    if target == "slurm":
        return True
    unused = [name for name in (*SlurmOptions.model_fields, "dry_run") if name in args.own]
    if unused:
        raise ConfigError(Mistake(f"--{name}", None, "is for jobs of SLURM", "add --on slurm") for name in unused)
    return False


def submit_verb(args: Args, run: RunFolder | None = None) -> int:
    """Submits a new run, or one to resume; with `--dry_run` prints its script. Returns the exit status."""
    if "check" in args.switches:
        raise ConfigError("--check with --on slurm: use --dry_run, which also prints the batch script")
    job, options = slurm.slurm_job(args, run)
    as_json, quiet = "json" in args.switches, "quiet" in args.switches
    say_choices(job)
    if "dry_run" in args.own:
        text = script(job.run, options)
        if as_json:
            facts = {"run_dir": str(job.run.path), "strategy": job.strategy.name, "warnings": job.warnings}
            report_json({**facts, "world_size": job.devices.num_processes, "script": text})
        else:
            report(text.rstrip("\n"))
        return 0
    state = slurm.start(job, options, quiet)
    if as_json:
        report_json({**result(job, state), "scheduler": state["scheduler"]})
    else:
        nodes = f"{options.nodes} node{'s' * (options.nodes > 1)}"
        report(f"{job.run.id} is queued in SLURM as job {state['scheduler']['job']}: {job.strategy.name} on {nodes}")
        report(f"watch it   tunesmith runs logs --follow {shlex.quote(str(job.run.path))}")
        report(f"stop it    tunesmith stop {shlex.quote(str(job.run.path))}")
    return 0
