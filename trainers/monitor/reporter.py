"""Reports the progress of a run to its state file, the log, a progress bar and trackers."""

from __future__ import annotations

from typing import Any, TextIO

from tqdm import tqdm

from trainers.config.options import TrainConfig
from trainers.monitor.trackers import Trackers
from trainers.run.ending import Ending
from trainers.run.errors import TrainingError
from trainers.run.folder import Process, RunFolder

_MEASURES = ("reward", "loss", "eval_reward", "eval_loss")
"""What a line of the log says of a step."""


class Reporter:
    """Reports progress to state file, progress bar and trackers. Only rank 0 reports.

    Args:
        run: the run folder.
        config: the run's config.
        resumed_at: steps of the checkpoint that this attempt resumed from; None if it began at step 0.
        main_rank: whether this is rank 0.
        console: the original standard error, before it was redirected to the log; the bar needs a terminal.
        processes: launcher and ranks, for the state file, which keeps its entry of the supervisor.
    """

    def __init__(
        self,
        run: RunFolder,
        config: TrainConfig,
        resumed_at: int | None,
        main_rank: bool,
        console: TextIO,
        processes: list[Process],
    ):
        self.run, self.main_rank = run, main_rank
        self.trackers = Trackers(config, run, resumed_at) if main_rank else None
        supervisor = [process for process in run.processes() if process.role == "supervisor"]
        self.processes = [process.as_json() for process in [*supervisor, *processes]]
        self.bar = tqdm(file=console, unit="step", disable=not (main_rank and console.isatty()))

    def state(self, **changes: Any) -> None:
        """Writes changes to the state file and updates the progress bar.

        Raises:
            TrainingError: if the run folder was removed or replaced.
        """
        if not self.main_rank:
            return
        if changes.get("state") == "running" and self.run.stop_asked() is not None:
            changes["state"] = "stopping"
        try:
            self.run.write_state(processes=self.processes, **changes)
        except OSError as error:
            if how := self.run.lost():
                raise TrainingError(f"the run folder {self.run.path} was {how} while it trained") from None
            print(f"warning: the state file could not be written: {error.strerror}", flush=True)
        if changes.get("total_steps"):
            self.bar.reset(total=changes["total_steps"])
        if "step" in changes:
            self.bar.update(changes["step"] - self.bar.n)

    def row(self, row: dict[str, Any]) -> None:
        """Prints a metrics row and passes it to progress bar and trackers."""
        numbers = {key: value for key, value in row.items() if isinstance(value, int | float) and key != "step"}
        postfix = {key: f"{row[key]:.4g}" for key in _MEASURES if row.get(key) is not None}
        if "tokens_per_second" in row:
            postfix["tokens_per_second"] = f"{row['tokens_per_second']:.0f}"
        self.bar.set_postfix(postfix)
        print(f"step {row['step']} " + " ".join(f"{key} {value}" for key, value in postfix.items()), flush=True)
        if self.trackers:
            self.trackers.log(numbers, row["step"])

    def close(self, ending: Ending, by_supervisor: bool) -> None:
        """Closes progress bar and trackers, then records how the run ended."""
        self.bar.close()
        if self.trackers:
            self.trackers.finish()
        if self.main_rank:
            self.run.end(ending, by_supervisor)
