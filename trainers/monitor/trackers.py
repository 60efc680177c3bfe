"""Experiment trackers (`report_to`): one tracked run for each run, through Accelerate's trackers.

A run never ends because of a tracker, nor waits for one longer than `LIMIT`: `metrics.jsonl` has every row anyway.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from accelerate.tracking import (
    CometMLTracker,
    GeneralTracker,
    MLflowTracker,
    SwanLabTracker,
    TensorBoardTracker,
    TrackioTracker,
    WandBTracker,
)

from trainers.config.fields import text_of
from trainers.config.options import TrainConfig
from trainers.run.folder import RunFolder, read_json, write_json
from trainers.run.log import without_secrets

PROJECT = "tunesmith"
"""The project in each tracker, and the folder of TensorBoard's files in the run folder."""
LIMIT = 60.0
"""Seconds that a tracker may take to start, to take a row, or to close; see `_limit`."""
_CLASSES: dict[str, type[GeneralTracker]] = {
    "tensorboard": TensorBoardTracker,
    "wandb": WandBTracker,
    "trackio": TrackioTracker,
    "mlflow": MLflowTracker,
    "swanlab": SwanLabTracker,
    "comet_ml": CometMLTracker,
}
_DEFAULTS = {
    "wandb": {"WANDB_CONSOLE": "off", "WANDB_DISABLE_GIT": "true", "WANDB_ERROR_REPORTING": "false"},
    "mlflow": {"MLFLOW_DISABLE_TELEMETRY": "true"},
    "swanlab": {"SWANLAB_TERMINAL_PROXY_TYPE": "none", "SWANLAB_PROBE_GIT": "false", "SWANLAB_INTERACTIVE": "false"},
    "comet_ml": {
        "COMET_AUTO_LOG_CODE": "false", "COMET_AUTO_LOG_GIT_METADATA": "false", "COMET_AUTO_LOG_GIT_PATCH": "false",
        "COMET_ERROR_TRACKING_ENABLE": "false",
    },
}  # fmt: skip
"""Environment variables that are set where the user has not: trackers get rows and options. Output (in which secrets
are not yet redacted), code, error reports and the address of the git remote (which may hold a token) stay here."""
_FOLDERS = {
    "wandb": ("wandb", ("WANDB_DIR",)),
    "swanlab": ("swanlog", ("SWANLAB_LOG_DIR", "SWANLAB_LOGDIR")),
    "comet_ml": ("comet", ("COMET_OFFLINE_DIRECTORY",)),
}
"""Of trackers with files of their own: where in the run folder, unless one of these variables says where."""


Steps = dict[str, int]
"""The last step by the name of a number."""


class _TooLong(BaseException):
    """A tracker does not answer. No `Exception`, as libraries catch those and try again."""


class Trackers:
    """The trackers of a run, on rank 0; the other ranks have none.

    A later attempt goes on in the tracked run of the earlier ones, whose id the run folder keeps; in a copy of the
    folder under another name, it begins a new one, as two runs would write into one. TensorBoard forgets
    the steps that are trained again; of the others, those that would have two values of a step keep the first.

    Args:
        config: the run's config.
        run: the run folder.
        resumed_at: steps of the checkpoint that this attempt resumed from; None if it began at step 0.
    """

    def __init__(self, config: TrainConfig, run: RunFolder, resumed_at: int | None):
        self._run, self._name = run, config.run_name or run.id
        self._first_step = 0 if resumed_at is None else resumed_at + 1  # at step 0, an evaluation may be logged
        self._limit = _limit(config)
        self._trackers: list[GeneralTracker] = []
        self._logged: dict[str, Steps] = {}
        self._ids = ids = _known_ids(run)
        known = frozenset(ids)
        self._given_up = _given_up(run) if known else {}
        logged = _logged_steps(run) if known else {}
        for name in config.report_to:
            tracker: Any = None
            try:
                with _within(self._limit):
                    tracker = self._start(name, ids.get(name))
                    if not (name in known and name in ("tensorboard", "mlflow")):  # their parameters cannot change
                        tracker.store_init_configuration(_settings(config))
                    ids[name] = _id_of(tracker)
            except (Exception, SystemExit, _TooLong) as error:
                print(f"warning: report_to={name} did not start ({self._summary(error)}); this attempt trains without "
                      "it, and metrics.jsonl has every row", flush=True)  # fmt: skip
                with suppress(Exception, SystemExit, _TooLong), _within(self._limit):
                    tracker.finish()
                if name in known:
                    self._given_up.setdefault(name, logged)  # it lacks what this attempt logs
                continue
            self._trackers.append(tracker)
            received = self._given_up.pop(name, logged)
            self._logged[name] = _stored(tracker, received) if name in known and _keeps_both(tracker) else {}
        if ids and config.report_to:
            self._write()

    def log(self, numbers: dict[str, float], step: int) -> None:
        """Passes the numbers of a step on, except to a tracker that has them from an earlier attempt."""

        def log(tracker: GeneralTracker) -> None:
            logged = self._logged[tracker.name]
            if new := {name: value for name, value in numbers.items() if step > logged.get(name, -1)}:
                tracker.log(new, step=step)
                logged.update(dict.fromkeys(new, step))

        self._each(log)

    def finish(self) -> None:
        """Closes the trackers; `Accelerator.end_training` would destroy the process group too."""
        self._each(lambda tracker: tracker.finish())

    def _start(self, name: str, known: str | None) -> GeneralTracker:
        """Starts a tracker, in the tracked run with a known id if there is one."""
        for variable, value in _DEFAULTS.get(name, {}).items():
            os.environ.setdefault(variable, value)
        options = self._options(name, known)
        tracker = _CLASSES[name](PROJECT, **options)
        tracker.start()
        return tracker

    def _options(self, name: str, known: str | None) -> dict[str, Any]:
        """The arguments of a tracker; as in Accelerate, those of its library."""
        folder = self._folder(name)
        match name:
            case "tensorboard":
                self._run.own_folder(PROJECT)
                return {"logging_dir": str(self._run.path), "purge_step": self._first_step if known else None}
            case "wandb":
                location = {"dir": str(self._run.path)} if folder else {}
                return {"name": self._name, **location, **({"id": known, "resume": "allow"} if known else {})}
            case "swanlab":
                location = {"log_dir": folder} if folder else {}
                return {"name": self._name, **location, **({"id": known, "resume": "allow"} if known else {})}
            case "trackio":  # a run is found again by its name alone
                name = known or f"{self._name}-{os.urandom(4).hex()}"
                return {"name": name, "resume": "allow" if known else "never"}
            case "mlflow":
                return {"run_id": known} if known else {"run_name": self._name}
            case _:
                from comet_ml import ExperimentConfig

                settings = ExperimentConfig(
                    name=self._name, offline_directory=folder, auto_output_logging=False, display_summary_level=0
                )
                return {"experiment_key": known, "experiment_config": settings}

    def _folder(self, name: str) -> str | None:
        """The folder in the run folder for the tracker's files; None if it has none, or the user says where."""
        folder, variables = _FOLDERS.get(name, ("", ()))
        if not folder or any(os.environ.get(variable) for variable in variables):
            return None
        self._run.own_folder(folder)
        return str(self._run.path / folder)

    def _each(self, call: Callable[[GeneralTracker], None]) -> None:
        """Calls each tracker, and gives up those that fail."""
        for tracker in list(self._trackers):
            try:
                with _within(self._limit):
                    call(tracker)
            except (Exception, SystemExit, _TooLong) as error:
                text = f"gets no more rows ({self._summary(error)}); metrics.jsonl has all of them"
                print(f"warning: {tracker.name} {text}", flush=True)
                self._trackers.remove(tracker)
                self._given_up[tracker.name] = self._logged[tracker.name]
                with suppress(OSError):
                    self._write()

    def _write(self) -> None:
        """Notes the ids for later attempts, and how far the trackers are that were given up."""
        given_up = {"given_up": self._given_up} if self._given_up else {}
        write_json(self._run.trackers, {"run": self._run.id, "ids": self._ids, **given_up})

    def _summary(self, error: BaseException) -> str:
        if isinstance(error, _TooLong):
            return f"no answer within {self._limit:g} s"
        first_line = without_secrets(str(error)).strip().partition("\n")[0][:200]
        return f"{type(error).__name__}: {first_line}"


def _limit(config: TrainConfig) -> float:
    """`LIMIT`, or less, so that the other ranks do not give up even if no tracker answers."""
    patience = [seconds for seconds in (config.hang_timeout, config.ddp_timeout) if seconds]
    return min([LIMIT, *(seconds / 2 / max(1, len(config.report_to)) for seconds in patience)])


def _known_ids(run: RunFolder) -> dict[str, str]:
    """What finds the tracked runs of earlier attempts, by tracker; in a copied folder, TensorBoard's files alone."""
    known = read_json(run.trackers) or {}
    ids, is_own = known.get("ids"), known.get("run") == run.id
    pairs = ids.items() if isinstance(ids, dict) else ()
    return {name: value for name, value in pairs if isinstance(value, str) and (is_own or name == "tensorboard")}


def _given_up(run: RunFolder) -> dict[str, Steps]:
    """Of each tracker that was given up and has not started since, the last step of each number that it received."""
    known = (read_json(run.trackers) or {}).get("given_up")
    pairs = known.items() if isinstance(known, dict) else ()
    return {name: {number: step for number, step in steps.items() if type(step) is int}
            for name, steps in pairs if isinstance(steps, dict)}  # fmt: skip


def _settings(config: TrainConfig) -> dict[str, int | float | str]:
    """The options as numbers and texts, as trackers refuse lists and mappings."""
    settings = config.model_dump(exclude_none=True)
    plain = {name: value if isinstance(value, int | float) else text_of(value) for name, value in settings.items()}
    return {name: without_secrets(value) if isinstance(value, str) else value for name, value in plain.items()}


def _keeps_both(tracker: Any) -> bool:
    """Whether a tracker would have two values of a step that is logged by two attempts.

    TensorBoard has one, and the servers of W&B and SwanLab drop a step that they have. Offline, a kill loses rows of
    W&B and SwanLab, and all of Comet's.
    """
    if tracker.name == "comet_ml":
        return "Offline" not in type(tracker.tracker).__name__
    return tracker.name in ("trackio", "mlflow")


def _stored(tracker: Any, received: Steps) -> Steps:
    """Of the steps that a tracker received, those that it has: a kill loses what Trackio has not written yet."""
    following = getattr(tracker.tracker, "_next_step", None) if tracker.name == "trackio" else None
    most = following - 1 if isinstance(following, int) else None
    return {name: step if most is None else min(step, most) for name, step in received.items()}


def _id_of(tracker: Any) -> str:
    """What finds the tracked run again."""
    match tracker.name:
        case "tensorboard":
            return PROJECT
        case "mlflow":
            return tracker.tracker.info.run_id
        case "trackio":
            return tracker.tracker.name
        case "comet_ml":
            return tracker.tracker.get_key()
        case _:
            return tracker.tracker.id


def _logged_steps(run: RunFolder) -> Steps:
    """The last step of each number in the rows of earlier attempts."""
    steps: Steps = {}
    with suppress(OSError), run.metrics.open("rb") as lines:
        for line in lines:
            with suppress(ValueError, TypeError, KeyError, RecursionError):  # the last line of a killed run may be cut
                row = json.loads(line)
                steps.update({name: max(int(row["step"]), steps.get(name, -1)) for name in row})
    return steps


@contextmanager
def _within(seconds: float) -> Iterator[None]:
    """Raises `_TooLong` in a block that takes longer, and again each second in case a library goes on. Main thread."""

    def interrupt(*_: Any) -> None:
        raise _TooLong

    handler = signal.signal(signal.SIGALRM, interrupt)
    timer = signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)
    try:
        yield
    finally:
        try:
            signal.setitimer(signal.ITIMER_REAL, 0)
        finally:  # also if the alarm came just now
            signal.setitimer(signal.ITIMER_REAL, *timer)
            signal.signal(signal.SIGALRM, handler)
