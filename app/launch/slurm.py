"""Hands a run to SLURM: writes its folder and batch script on this machine, and submits it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from app.command_line import Args
from app.hardware import Gpu
from app.launch.foreground import held, preflight, take_back, write_folder
from app.launch.job import TrainJob, job_of, named_preset, refuse_unresumable, run_attempt
from app.runs.runs import world_size
from app.runs.scheduled import submission
from app.schedulers.slurm import SCRIPT, SlurmError, forget_jobs, script, submit
from app.schedulers.slurm_options import SlurmOptions, site_file
from trainers.config.mistakes import ConfigError, Mistake, Mistakes
from trainers.run.folder import RunFolder, write_atomic, write_json

HEAD, PORT = "head-node", 29500
"""Stand in an Accelerate file for machine 0's address until the job has started."""
_CODE = ("container", "slurm_extra")
_DECIDED = ("gpus", "num_machines", "machine_rank", "main_process_ip", "main_process_port", "min_machines")


def slurm_job(args: Args, run: RunFolder | None = None) -> tuple[TrainJob, SlurmOptions]:
    """The job of a run that SLURM is to start.

    Args:
        args: the command line of `train` or `resume`.
        run: the run to resume; None for a new one.

    Raises:
        ConfigError: with all mistakes at once; also if the run is done or still live.
    """
    mistakes = Mistakes()
    for name in [name for name in _DECIDED if name in args.launch]:
        mistakes.append(Mistake(name, args.launch[name], "is decided by SLURM", f"leave --{name} out"))
    if "detach" in args.switches:
        mistakes.append(Mistake("--detach", None, "is not needed with --on slurm", "leave it out"))
    chosen = {name: value for name, value in args.own.items() if name in SlurmOptions.model_fields}
    before = (submission(run) or {}).get("options", {}) if run else {}
    # Without what names code, as the folder may come from elsewhere.
    stored = {name: value for name, value in before.items() if name not in _CODE}
    options = SlurmOptions()
    with mistakes:
        options = SlurmOptions.read({**stored, **chosen})
    gpus = [Gpu(index, f"slurm-{index}", "GPU of a SLURM node", 0) for index in range(options.gpus_per_node)]
    if run is not None:
        refuse_unresumable(run)
        attempt = run_attempt(run)
        values = {"strategy": str(run.accelerate), **args.launch}
        if not options.gpus_per_node and (processes := world_size(run)):
            values.setdefault("num_processes", str(processes))
        args.request.config, args.request.preset = str(run.config), None
        args.request.options["force_resume"] = "force" in args.switches
        job = job_of(args.request, _launch_values(values, options, mistakes), mistakes, run, gpus)
        job.attempt = attempt
        job.notes += [f"{name} of the last submission is not repeated: give it again, or set it in {site_file()}"
                      for name in _CODE if before.get(name) and not getattr(options, name)]  # fmt: skip
        return job, options
    args.request.preset = named_preset(args.names, args.request.preset, mistakes)
    return job_of(args.request, _launch_values(args.launch, options, mistakes), mistakes, None, gpus), options


def _launch_values(chosen: Mapping[str, str], options: SlurmOptions, mistakes: Mistakes) -> dict[str, str]:
    """The launch options, with the machines and processes that the job will have."""
    values = {name: value for name, value in chosen.items() if name not in _DECIDED}
    if options.gpus_per_node:
        if count := values.pop("num_processes", None):
            problem = "is decided by --nodes and --gpus_per_node: one process runs on each GPU"
            mistakes.append(Mistake("num_processes", count, problem, "leave --num_processes out"))
        values["gpus"] = ",".join(map(str, range(options.gpus_per_node)))
    else:
        values.setdefault("num_processes", str(options.nodes))
    values["num_machines"] = str(options.nodes)  # also for one, as the file of a resumed run may have had more
    if options.nodes > 1:
        values |= {"machine_rank": "0", "main_process_ip": HEAD}
        values["main_process_port"] = str(PORT)
    return values


def start(job: TrainJob, options: SlurmOptions, quiet: bool = True) -> dict[str, Any]:
    """Checks a job, writes its folder and submits it.

    Args:
        job: the job, from `slurm_job`.
        options: options of SLURM's job.
        quiet: whether to hide the check's progress.

    Returns:
        The state, `queued` or later.

    Raises:
        ConfigError: if the pre-flight check or SLURM refuses the job; a new run then leaves no folder.
        CheckBroke: if the check crashes.
    """
    text = script(job.run, options)
    preflight(job, quiet, elsewhere=True)
    new = job.attempt is None
    with held(job):
        try:
            write_folder(job)
            write_atomic(job.run.path / SCRIPT, text)
            submitted = {
                "kind": "slurm",
                "options": options.model_dump(exclude_none=True),
                "resume_from": job.resume_from,
            }
            write_json(job.run.scheduler, submitted)
            try:
                number = submit(job.run)
            except SlurmError as error:
                remedy = "" if new else "; `--on local` resumes it on this machine"
                raise ConfigError(f"SLURM did not take the job: {error}{remedy}") from None
            forget_jobs()
            # The writer of `queued` is whoever submits the job; on the nodes, machine 0's supervisor takes over.
            return job.run.write_state(
                state="queued", cause=None, ending=None, processes=[], scheduler={"kind": "slurm", "job": number}
            )
        finally:
            if new and not job.run.state_file.exists():
                (job.run.path / SCRIPT).unlink(missing_ok=True)
                job.run.scheduler.unlink(missing_ok=True)
                take_back(job.run)
