"""Hands a run to SLURM: writes its folder and batch script on this machine, and submits it."""

from __future__ import annotations

from typing import Any

from app.command_line import Args
from app.launch.cluster_job import cluster_job, refuse_decided
from app.launch.foreground import held, preflight, take_back, write_folder
from app.launch.job import TrainJob
from app.runs.scheduled import submission
from app.schedulers.slurm import SCRIPT, SlurmError, forget_jobs, script, submit
from app.schedulers.slurm_options import SlurmOptions, site_file
from trainers.config.mistakes import ConfigError, Mistakes
from trainers.run.folder import RunFolder, write_atomic, write_json

CODE = ("container", "slurm_extra")
"""Options that name code, so that they are taken from no folder."""


class NotTaken(ConfigError):
    """SLURM did not take a job."""


def slurm_job(
    args: Args, run: RunFolder | None = None, mistakes: Mistakes | None = None
) -> tuple[TrainJob, SlurmOptions]:
    """The job of a run that SLURM is to start.

    Args:
        args: the command line of `train` or `resume`.
        run: the run to resume; None for a new one.
        mistakes: mistakes found so far; more are added.

    Raises:
        ConfigError: with all mistakes at once; also if the run is done or still live.
    """
    mistakes = Mistakes() if mistakes is None else mistakes
    refuse_decided(args, "SLURM", mistakes)
    chosen = {name: value for name, value in args.own.items() if name in SlurmOptions.model_fields}
    before = (submission(run) or {}).get("options", {}) if run else {}
    # Without what names code, as the folder may come from elsewhere.
    stored = {name: value for name, value in before.items() if name not in CODE}
    options = SlurmOptions()
    with mistakes:
        options = SlurmOptions.read({**stored, **chosen})
    job = cluster_job(args, run, options.nodes, options.gpus_per_node, mistakes)
    job.notes += [f"{name} of the last submission is not repeated: give it again, or set it in {site_file()}"
                  for name in CODE if before.get(name) and not getattr(options, name)]  # fmt: skip
    return job, options


def start(job: TrainJob, options: SlurmOptions, quiet: bool = True) -> dict[str, Any]:
    """Checks a job, writes its folder and submits it.

    Args:
        job: the job, from `slurm_job`.
        options: options of SLURM's job.
        quiet: whether to hide the check's progress.

    Returns:
        The state, `queued` or later.

    Raises:
        ConfigError: if the pre-flight check refuses the job; a new run then leaves no folder.
        NotTaken: if SLURM does; likewise.
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
                raise NotTaken(f"SLURM did not take the job: {error}{remedy}") from None
            forget_jobs()
            # The writer of `queued` is whoever submits the job; on the nodes, machine 0's supervisor takes over.
            return job.run.write_state(
                state="queued", cause=None, ending=None, processes=[], scheduler={"kind": "slurm", "job": number}
            )
        finally:
            if new and not job.run.state_file.exists():
                take_back_submission(job.run)


def take_back_submission(run: RunFolder) -> None:
    """Removes the files of `start`, and only those, after it was interrupted before the run existed."""
    for path in (run.path / SCRIPT, run.scheduler):
        path.unlink(missing_ok=True)
    take_back(run)
