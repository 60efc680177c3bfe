"""The folder of a sweep, and its record: what was asked, the trials, and what came out.

The record is replaced atomically by the one process that runs the sweep. A run is entered as running before it is
started, so that a sweep that goes on after a kill finds it and starts nothing twice.
"""

from __future__ import annotations

import fcntl
import os
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TextIO

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError, model_validator

from app.console import shortened
from app.runs.runs import processes_in, sweep_of
from app.sweep.space import Axis
from trainers.config.mistakes import ConfigError, nearest
from trainers.run.folder import RunFolder, now, read_json, write_json

PREFIX = "sweep-"


class SweepRun(BaseModel):
    """A run of a trial.

    Args:
        id: name of the run folder, beside that of the sweep.
        seed: its seed.
        state: `waiting`, `running`, `paused` at a rung of halving, `stopped` by the user, `done` or `failed`.
        scores: what was measured at the end of each rung so far.
        step: steps that it has trained.
        cause: why it waits, failed or stopped.
    """

    model_config = ConfigDict(extra="forbid")

    id: str
    seed: int
    state: Literal["waiting", "running", "paused", "stopped", "done", "failed"] = "waiting"
    scores: list[FiniteFloat] = Field(default_factory=list)
    step: int = 0
    cause: str | None = None


class Trial(BaseModel):
    """A point of a sweep, trained once for each seed.

    Args:
        number: counted from 1.
        values: the value of each option that the sweep varies.
        runs: a run for each seed.
        cut_at: the rung of halving after which it was left behind, from 0; None for a survivor.
    """

    model_config = ConfigDict(extra="forbid")

    number: int
    values: dict[str, str]
    runs: list[SweepRun] = Field(min_length=1)
    cut_at: int | None = None

    @property
    def state(self) -> str:
        """The state of its runs in one word."""
        states = {run.state for run in self.runs}
        for state in ("failed", "stopped"):
            if state in states:
                return state
        if self.cut_at is not None:
            return "cut"
        return next((state for state in ("running", "paused", "waiting") if state in states), "done")

    def scores(self, rung: int) -> list[float] | None:
        """What was measured at the end of a rung, for each seed; None unless all of them got there."""
        known = [run.scores[rung] for run in self.runs if len(run.scores) > rung]
        return known if len(known) == len(self.runs) and self.state not in ("failed", "stopped") else None

    def mean(self, rung: int) -> float | None:
        """Mean over the seeds at the end of a rung."""
        scores = self.scores(rung)
        return statistics.fmean(scores) if scores else None

    @property
    def last_rung(self) -> int:
        """The last rung that every seed has reached, from 0; -1 before the first."""
        return min(len(run.scores) for run in self.runs) - 1


class SweepRecord(BaseModel):
    """What was asked of a sweep, and what came out.

    Args:
        format: version of this file.
        id: name of the sweep's folder.
        state: `running`, `stopped` or `done`.
        process: the process that runs it.
        started_at: when it was started.
        updated_at: when this was written.
        preset: the preset.
        config: absolute path of the config file.
        options: options that all runs share, as on the command line.
        launch: launch options that all runs share.
        on: where the runs train: `local`, this machine, or `slurm`.
        cluster: options of each run's job on a cluster.
        axes: what varies.
        search: `grid`, `random` or `tpe`.
        trial_count: number of trials.
        search_seed: seed of the search.
        parallel: runs at once.
        devices: launch options of each set of devices that a run may use.
        rungs: steps at the end of each rung of halving; a single 0 for runs that are never cut.
        halving: the share to keep at each rung is one in this many; None without.
        measure: what decides.
        better: whether `low` or `high` is better.
        trials: the trials so far.
    """

    model_config = ConfigDict(extra="forbid")

    format: Literal[1] = 1
    id: str
    state: Literal["running", "stopped", "done"] = "running"
    process: dict[str, Any] = Field(default_factory=dict)
    started_at: str = Field(default_factory=now)
    updated_at: str = Field(default_factory=now)
    preset: str | None
    config: str | None
    options: dict[str, str]
    launch: dict[str, str]
    on: Literal["local", "slurm"] = "local"
    cluster: dict[str, Any] = Field(default_factory=dict)
    axes: list[Axis]
    search: Literal["grid", "random", "tpe"]
    trial_count: int
    seeds: list[int] = Field(min_length=1)
    search_seed: int
    parallel: int = Field(ge=1)
    devices: list[dict[str, str]] = Field(min_length=1)
    rungs: list[int] = Field(min_length=1)
    halving: Annotated[int, Field(ge=2)] | None
    measure: str
    better: Literal["low", "high"]
    trials: list[Trial] = Field(default_factory=list)

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        """Refuses a record whose trials lack a value, or whose names a page or a terminal cannot show."""
        names = {axis.option for axis in self.axes}
        if any(set(trial.values) != names for trial in self.trials):
            raise ValueError("a trial has other options than the sweep varies")
        if not all(map(str.isprintable, [self.id, self.measure, *names])):
            raise ValueError("a name is not printable")
        return self

    def add_trial(self, values: dict[str, str]) -> Trial:
        """Appends a trial, whose runs wait to be started."""
        number = len(self.trials) + 1
        width = len(str(self.trial_count))
        name = f"{self.id.removeprefix(PREFIX)}-{number:0{width}}"
        runs = [SweepRun(id=f"{name}-seed{seed}" if self.seeds[1:] else name, seed=seed) for seed in self.seeds]
        trial = Trial(number=number, values=values, runs=runs)
        self.trials.append(trial)
        return trial

    @property
    def steps(self) -> int:
        """Steps that all runs have trained."""
        return sum(run.step for trial in self.trials for run in trial.runs)


class SweepFolder:
    """Paths of a sweep.

    Args:
        path: its folder; need not exist yet.
    """

    def __init__(self, path: Path):
        self.path = path.absolute()
        self.file = self.path / "sweep.json"
        self.stop_request = self.path / "stop"
        self.lock = self.path / ".lock"
        self.log = self.path / "log.txt"

    @property
    def id(self) -> str:
        return self.path.name

    def run(self, run: SweepRun) -> RunFolder:
        """The folder of one of its runs, which is beside its own."""
        return RunFolder(self.path.parent / run.id)

    def read(self) -> SweepRecord:
        """Reads the record.

        Raises:
            ConfigError: if there is none, or it is damaged.
        """
        content = read_json(self.file)
        try:
            record = SweepRecord.model_validate(content)
        except ValidationError:
            problem = "holds no sweep" if content is None else "holds a damaged sweep.json"
            raise ConfigError(f"{self.path} {problem}; `tunesmith sweep list` lists the sweeps") from None
        names = [run.id for trial in record.trials for run in trial.runs]
        if any(os.sep in name or name in ("", ".", "..") or not name.isprintable() for name in names):
            raise ConfigError(f"{self.path} holds a damaged sweep.json: a run's name is no name of a folder")
        self.follow_renames(record)
        return record

    def follow_renames(self, record: SweepRecord) -> None:
        """Sets the ids of runs that were renamed, which are found by what their folders say of their sweep."""
        gone = {(trial.number, run.seed): run for trial in record.trials for run in trial.runs if self.is_gone(run)}
        for path in sorted(self.path.parent.glob("*/sweep.json")) if gone else ():
            is_sound = path.parent.name.isprintable() and not path.parent.is_symlink()
            member = sweep_of(RunFolder(path.parent)) if is_sound else None
            if member and member["sweep"] == self.id and (run := gone.pop((member["trial"], member["seed"]), None)):
                run.id = path.parent.name

    def is_gone(self, run: SweepRun) -> bool:
        """Whether a run that has begun has no folder any more."""
        return run.state != "waiting" and not os.path.isdir(self.run(run).path)  # False for any name

    def write(self, record: SweepRecord) -> None:
        """Replaces the record; only the process that holds the sweep may."""
        record.updated_at = now()
        write_json(self.file, record.model_dump(mode="json"))

    def ask_stop(self) -> None:
        """Asks the process that runs the sweep to stop."""
        write_json(self.stop_request, {"time": now()})

    def hold(self) -> TextIO:
        """Marks the sweep as run by this process for as long as the returned file is open.

        Raises:
            ConfigError: if another process runs it, or a file of the sweep is a link.
        """
        if link := next((path for path in (self.lock, self.log) if path.is_symlink()), None):
            raise ConfigError(f"{link} is a link, through which another file would be written; remove it")
        file = open(self.lock, "a", encoding="utf-8")  # noqa: SIM115 - held open on purpose
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.close()
            raise ConfigError(f"sweep {self.id} is running; `tunesmith sweep stop {self.id}` stops it") from None
        return file


def true_state(record: SweepRecord) -> str:
    """The state; `interrupted` if the process that ran the sweep is gone."""
    if record.state != "running":
        return record.state
    alive = any(process.alive() for process in processes_in({"processes": [record.process]}))
    return "running" if alive else "interrupted"


def list_sweeps(runs_dir: Path) -> list[tuple[SweepFolder, SweepRecord]]:
    """All readable sweeps in a folder of run folders, newest first."""
    sweeps = []
    for path in sorted(runs_dir.glob(f"{PREFIX}*/sweep.json")):
        folder = SweepFolder(path.parent)
        try:
            sweeps.append((folder, folder.read()))
        except ConfigError:
            continue
    return sorted(sweeps, key=lambda pair: pair[1].started_at, reverse=True)


def find_sweep(name: str, runs_dir: Path) -> SweepFolder:
    """Finds a sweep by its id in `runs_dir`, or by the path of its folder.

    Raises:
        ConfigError: if there is none.
    """
    path = Path(os.path.expanduser(name))
    folder = SweepFolder(path if os.sep in name else runs_dir / name)
    try:
        known = bool(name.strip()) and name.isprintable() and ".." not in path.parts and folder.file.is_file()
    except OSError:
        known = False  # e.g. a name longer than the file system allows
    if not known:
        ids = [folder.id for folder, _ in list_sweeps(runs_dir)]
        hint = nearest(name, ids, "`tunesmith sweep list` lists the sweeps")
        raise ConfigError(f"there is no sweep {shortened(name)!r} in {runs_dir}; {hint}")
    return folder


def ranked(trials: Sequence[Trial], better: str, rung: int | None = None) -> list[Trial]:
    """Trials that have a score, best first: by their mean at a rung; by default at the last one that each has reached.

    One that has reached a later rung is before those that have not.
    """
    sign, places = 1 if better == "low" else -1, []
    for trial in trials:
        at = trial.last_rung if rung is None else rung
        if at >= 0 and (mean := trial.mean(at)) is not None:
            places.append((-at, sign * mean, trial.number, trial))
    return [trial for *_, trial in sorted(places, key=lambda entry: entry[:3])]
