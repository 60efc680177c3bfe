"""`--on` of `tunesmith train` and `resume`: hands the run to SLURM, or prints what a scheduler needs to start it."""

from __future__ import annotations

import shlex

from app.command_line import Args
from app.console import report, report_json
from app.launch import slurm
from app.launch.foreground import result, say_choices
from app.launch.kubernetes import kubernetes_manifest
from app.runs.scheduled import submission
from app.schedulers.kubernetes import KubernetesOptions
from app.schedulers.slurm import script
from app.schedulers.slurm_options import SlurmOptions
from trainers.config.mistakes import ConfigError, Mistake
from trainers.run.folder import RunFolder

_OPTIONS: dict[str, tuple[str, ...]] = {
    "local": (),
    "slurm": (*SlurmOptions.model_fields, "dry_run"),
    "kubernetes": (*KubernetesOptions.model_fields, "dry_run"),
}
"""The places to train, and their own options."""


def target_of(args: Args, run: RunFolder | None = None) -> str:
    """Where to train: as `--on` says, otherwise as the run was started before.

    Raises:
        ConfigError: for an unknown place, or options of another one.
    """
    before = "slurm" if run is not None and submission(run) else "local"
    target = str(args.own.get("on", before))
    if target not in _OPTIONS:
        raise ConfigError.about("on", target, "is no place to train", f"use {', '.join(_OPTIONS)}")
    if target == "kubernetes" and run is not None:
        remedy = "apply the run's manifest again, which goes on from its newest checkpoint"
        raise ConfigError.about("on", target, "is not for `resume`", remedy)
    mistakes = []
    for name in [name for name in args.own if name not in _OPTIONS[target]]:
        if places := [other for other, names in _OPTIONS.items() if name in names]:
            mistakes.append(Mistake(f"--{name}", None, f"is not for --on {target}", f"add --on {' or '.join(places)}"))
    if mistakes:
        raise ConfigError(mistakes)
    return target


def manifest_verb(args: Args) -> int:
    """Prints the manifest of a new run for Kubernetes. Returns the exit status."""
    if "check" in args.switches:
        raise ConfigError("--check with --on kubernetes: use --dry_run, which prints the manifest")
    job, text = kubernetes_manifest(args)
    say_choices(job)
    if "json" in args.switches:
        facts = {"strategy": job.strategy.name, "world_size": job.devices.num_processes, "warnings": job.warnings}
        report_json({**facts, "manifest": text})
    else:
        report(text.rstrip("\n"))
    return 0


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
