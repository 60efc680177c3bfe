"""The runs of a sweep: ordinary runs, each started in the background as `tunesmith train --detach` does."""

from __future__ import annotations

from typing import Any

from app.command_line import Args
from app.launch import actions, background
from app.launch.foreground import take_back
from app.launch.job import TrainJob, train_job
from app.runs.runs import true_state
from app.sweep.record import SweepFolder, SweepRecord, SweepRun, Trial
from trainers.config.parse import Request
from trainers.run.folder import RunFolder, write_json


class LocalRuns:
    """The runs of a sweep in the queue of this machine.

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
            actions.resume(folder, Args(launch=dict(devices), request=Request(options={"stop_at_step": until})))
        else:
            background.start(job_of_run(record, trial, run, folder, until, devices))
        write_json(folder.sweep, {"sweep": self.folder.id, "trial": trial.number})

    def state(self, run: SweepRun) -> dict[str, Any] | None:
        """State, step and cause; see `runner.Runs`."""
        folder = self.folder.run(run)
        if not folder.exists():
            return None
        if not folder.state_file.exists():  # its start was cut off before it was a run
            take_back(folder)
            return None
        return true_state(folder)

    def score(self, record: SweepRecord, run: SweepRun) -> float | None:
        """What decides; see `runner.Runs`."""
        from app.runs.compare import measured  # it imports numpy, which takes a while

        return measured(self.folder.run(run), record.measure)

    def stop(self, run: SweepRun) -> None:
        """Asks a run to save and stop."""
        actions.stop(self.folder.run(run))


def job_of_run(
    record: SweepRecord, trial: Trial, run: SweepRun, folder: RunFolder, stop_at: str, devices: dict[str, str]
) -> TrainJob:
    """The job of a run that has not begun.

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
    return train_job(Args(launch={**record.launch, **devices}, request=request))
