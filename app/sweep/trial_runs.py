"""The runs of a sweep: ordinary runs, started as `tunesmith train --detach` or `train --on slurm` does."""

from __future__ import annotations

from typing import Any

from app.command_line import Args
from app.launch import actions, background, slurm
from app.launch.job import TrainJob, train_job
from app.runs.runs import true_state
from app.runs.scheduled import may_come_back
from app.schedulers.slurm_options import SlurmOptions
from app.sweep.record import SweepFolder, SweepRecord, SweepRun, Trial
from trainers.config.parse import Request
from trainers.run.folder import END_STATES, RunFolder, write_json


class TrialRuns:
    """The runs of a sweep in the queue of this machine, or in that of SLURM.

    Args:
        folder: the sweep's folder.
    """

    def __init__(self, folder: SweepFolder):
        self.folder = folder

    def start(self, record: SweepRecord, trial: Trial, run: SweepRun, stop_at: int, devices: dict[str, str]) -> None:
        """Starts a run, or resumes it from its newest checkpoint; see `runner.Runs`."""
        folder = self.folder.run(run)
        until = str(stop_at) if stop_at else "none"
        if folder.state_file.exists():
            request = Request(options={"stop_at_step": until})
            actions.resume(folder, Args(launch=dict(devices), request=request, own=cluster_of(record)))
        else:
            job, options = job_of_run(record, trial, run, folder, until, devices)
            if options:
                slurm.start(job, options)
            else:
                background.start(job)
        write_json(folder.sweep, {"sweep": self.folder.id, "trial": trial.number, "seed": run.seed})

    def state(self, run: SweepRun) -> dict[str, Any] | None:
        """State, step and cause; see `runner.Runs`."""
        folder = self.folder.run(run)
        if not folder.exists():
            return None
        if not folder.state_file.exists():  # its start was cut off before it was a run
            slurm.take_back_submission(folder)
            return None
        state = true_state(folder)
        if state["state"] in END_STATES and may_come_back(state):
            return {**state, "state": "stopping"}
        return state

    def score(self, record: SweepRecord, run: SweepRun) -> float | None:
        """What decides; see `runner.Runs`."""
        from app.runs.compare import measured  # it imports numpy, which takes a while

        return measured(self.folder.run(run), record.measure)

    def stop(self, run: SweepRun) -> None:
        """Asks a run to save and stop, and cancels one that waits in SLURM; see `runner.Runs`."""
        actions.stop(self.folder.run(run))


def cluster_of(record: SweepRecord) -> dict[str, Any]:
    """The options of each job; without what names code, as the record may come from elsewhere."""
    return {name: value for name, value in record.cluster.items() if name not in slurm.CODE}


def job_of_run(
    record: SweepRecord, trial: Trial, run: SweepRun, folder: RunFolder, stop_at: str, devices: dict[str, str]
) -> tuple[TrainJob, SlurmOptions | None]:
    """The job of a run that has not begun, and the options of SLURM's job if that is to start it.

    Args:
        record: what was asked.
        trial: the trial that it belongs to.
        run: the run.
        folder: its folder.
        stop_at: step at which it is to stop, or `none`.
        devices: launch options of its devices.

    Raises:
        ConfigError: with all mistakes at once.
    """
    own = {"seed": str(run.seed), "output_dir": str(folder.path), "stop_at_step": stop_at}
    options = {**record.options, **trial.values, **own}
    request = Request(record.preset, record.config, False, options)
    args = Args(launch={**record.launch, **devices}, request=request, own=cluster_of(record))
    return slurm.slurm_job(args) if record.on == "slurm" else (train_job(args), None)
