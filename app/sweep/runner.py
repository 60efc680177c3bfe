"""Runs a sweep: starts runs as devices come free, records what comes out, and leaves the worse half behind at rungs."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

from app.console import counted
from app.launch.foreground import CheckBroke
from app.launch.slurm import NotTaken
from app.sweep.record import SweepFolder, SweepRecord, SweepRun, Trial, ranked
from app.sweep.search import Result, propose
from trainers.config.mistakes import ConfigError
from trainers.run.folder import END_STATES, Process

POLL, CLUSTER_POLL = 0.5, 5.0
"""Seconds between two looks at the runs; more on a cluster, whose scheduler is asked each time."""


class Runs(Protocol):
    """The runs of a sweep; a test stands in for them."""

    def start(self, record: SweepRecord, trial: Trial, run: SweepRun, stop_at: int, devices: dict[str, str]) -> None:
        """Starts or resumes a run in the background.

        Args:
            record: what was asked.
            trial: the trial that it belongs to.
            run: the run.
            stop_at: step at which it is to stop; 0: at its end.
            devices: launch options of its devices.

        Raises:
            ConfigError: if it is refused.
            NotTaken: if SLURM does not take its job.
            CheckBroke: if its pre-flight check crashes.
        """

    def state(self, run: SweepRun) -> dict[str, Any] | None:
        """`state`, `step` and `cause` of a run; None if it was never started, or its folder is gone."""

    def score(self, record: SweepRecord, run: SweepRun) -> float | None:
        """What decides; None if the run has not measured it."""

    def stop(self, run: SweepRun) -> None:
        """Asks a run to save and stop; asked again, nothing more.

        Raises:
            ConfigError: if its scheduler does not cancel it.
        """


class StopAsked(Exception):
    """`tunesmith sweep stop` was called."""


class Runner:
    """Runs a sweep to its end.

    Args:
        folder: the sweep's folder, held by this process.
        record: what was asked, and what came out so far.
        runs: its runs.
        say: called with a line for each event.
        show: called after each look at the runs.
    """

    def __init__(
        self, folder: SweepFolder, record: SweepRecord, runs: Runs, say: Callable[[str], None],
        show: Callable[[SweepRecord], None] = lambda record: None,
    ):  # fmt: skip
        self.folder, self.record, self.runs = folder, record, runs
        self.say, self.show = say, show
        self.devices: dict[str, int] = {}
        self.at_once = record.parallel
        self.poll = POLL if record.on == "local" else CLUSTER_POLL

    def go(self) -> None:
        """Starts or continues the sweep, and returns at its end.

        Raises:
            StopAsked: if it is to stop.
        """
        record = self.record
        record.state, record.process = "running", Process.of("sweep").as_json()
        self._adopt()
        self._save()
        while True:
            self._collect()
            while self._promote():
                pass
            while self._active() < self.at_once and (task := self._next()):
                if self.folder.stop_request.exists():
                    raise StopAsked
                self._start(*task)
            self.show(record)
            if not self._active():
                break
            if self.folder.stop_request.exists():
                raise StopAsked
            time.sleep(self.poll)
        record.state = "done"
        self._save()

    def stop(self, deadline: float = math.inf) -> None:
        """Asks all runs to save and stop, and waits until they have.

        Args:
            deadline: when to stop waiting, by `time.monotonic`; the sweep then counts as interrupted.
        """
        for _, run in self._running():
            if self.runs.state(run) is None:
                run.state = "waiting"  # its start was cut off
        while self._active():
            for _, run in self._running():
                self._ask_stop(run)  # each time: a job that was just being started has missed it
            self._collect()
            self.show(self.record)
            if time.monotonic() > deadline:
                break
            time.sleep(self.poll)
        else:
            self.record.state = "stopped"
        self._save()

    def _ask_stop(self, run: SweepRun) -> None:
        try:
            self.runs.stop(run)
        except ConfigError as error:
            self.say(str(error))

    def _save(self) -> None:
        self.folder.write(self.record)

    def _running(self) -> Iterator[tuple[Trial, SweepRun]]:
        for trial in self.record.trials:
            for run in trial.runs:
                if run.state == "running":
                    yield trial, run

    def _active(self) -> int:
        return sum(1 for _ in self._running())

    def _adopt(self) -> None:
        """Brings a record that its last process left behind in line with the runs: what was cut off goes on."""
        for trial in self.record.trials:
            for run in trial.runs:
                if run.state not in ("running", "stopped"):
                    continue
                state = self.runs.state(run)
                if state is None:
                    run.state = "waiting"
                elif state["state"] == "failed" or (state["state"] == "stopped" and not self._at_rung(run, state)):
                    run.state, run.cause = "paused", None
                else:
                    run.state = "running"  # alive, or at an end that is still to be recorded

    def _at_rung(self, run: SweepRun, state: dict[str, Any]) -> bool:
        goal = self.record.rungs[min(len(run.scores), len(self.record.rungs) - 1)]
        return bool(goal) and len(run.scores) < len(self.record.rungs) - 1 and _step(state) >= goal

    def _collect(self) -> None:
        """Records what has become of the running runs."""
        changed = False
        self.folder.follow_renames(self.record)
        for trial, run in self._running():
            state = self.runs.state(run) or {"state": "failed", "cause": "its folder is gone", "step": run.step}
            run.step = max(run.step, _step(state))
            if state["state"] not in END_STATES:
                changed = changed or run.cause != state.get("cause")
                run.cause = state.get("cause")
                continue
            changed = True
            at_rung = state["state"] == "stopped" and self._at_rung(run, state)
            run.cause = state.get("cause")
            if state["state"] == "done" or at_rung:
                self._score(trial, run, at_rung)
            else:
                run.state = "failed" if state["state"] == "failed" else "stopped"
                self.say(f"{self._name(trial, run)} {run.state}: {run.cause}")
        if changed:
            self._save()

    def _score(self, trial: Trial, run: SweepRun, at_rung: bool) -> None:
        record, score = self.record, self.runs.score(self.record, run)
        if score is None or not math.isfinite(score):
            run.state, run.cause = "failed", f"it has no value for {record.measure}"
            self.say(f"{self._name(trial, run)} failed: {run.cause}")
            return
        # A run that ended before its rung, as its evaluations stopped improving, stands as it is at the later ones.
        run.scores += [score] * (1 if at_rung else len(record.rungs) - len(run.scores))
        run.state, run.cause = "paused" if at_rung else "done", None
        reached = f"at step {run.step}" if at_rung else f"done, {run.step} steps"
        self.say(f"{self._name(trial, run)} {reached}: {record.measure} {score:.5g}")

    def _name(self, trial: Trial, run: SweepRun) -> str:
        values = ", ".join(f"{name}={value}" for name, value in trial.values.items())
        seed = f" seed {run.seed}" if self.record.seeds[1:] else ""
        return f"trial {trial.number}{seed} ({values})"

    def _contenders(self) -> list[Trial]:
        return [trial for trial in self.record.trials if trial.state not in ("failed", "stopped", "cut")]

    def _promote(self) -> bool:
        """At the end of a rung leaves all but the best behind; returns whether a rung has ended."""
        record, contenders = self.record, self._contenders()
        if record.halving is None or not contenders or any(run.state == "running" for _, run in self._running()):
            return False
        rung = min(trial.last_rung for trial in contenders)
        keep = kept_at(record.trial_count, record.halving, rung)
        if not 0 <= rung < len(record.rungs) - 1 or len(contenders) <= keep:
            return False
        for trial in ranked(contenders, record.better, rung)[keep:]:
            trial.cut_at = rung
        numbers = ", ".join(str(trial.number) for trial in self._contenders())
        self.say(f"step {record.rungs[rung]}: {len(self._contenders())} of {len(contenders)} go on: {numbers}")
        self._save()
        return True

    def _next(self) -> tuple[Trial, SweepRun] | None:
        """The run to start next; for TPE, of a new trial if none waits."""
        contenders = self._contenders()
        rung = min((len(run.scores) for trial in contenders for run in trial.runs), default=0)
        for trial in contenders:
            for run in trial.runs:
                if run.state in ("waiting", "paused") and len(run.scores) == rung:
                    return trial, run
        record = self.record
        if record.search != "tpe" or len(record.trials) >= record.trial_count:
            return None
        results = [Result(trial.values, trial.mean(0), trial.state in ("failed", "stopped")) for trial in record.trials]
        number = len(record.trials)
        values = propose(
            record.axes, "tpe", record.search_seed, number, results, record.better, record.trial_count
        )  # fmt: skip
        if values is None:
            record.trial_count = number  # every point is known
            return None
        trial = record.add_trial(values)
        return trial, trial.runs[0]

    def _start(self, trial: Trial, run: SweepRun) -> None:
        record, rung = self.record, len(run.scores)
        stop_at = record.rungs[rung] if rung < len(record.rungs) - 1 else 0
        used = Counter(self.devices[other.id] for _, other in self._running() if other.id in self.devices)
        index = min(range(len(record.devices)), key=lambda number: used[number])
        self.devices[run.id] = index
        begun = run.state == "paused" and self.runs.state(run) is not None
        again, before = "its folder is gone, so it " if run.state == "paused" and not begun else "", run.state
        verb = "goes on:" if begun else f"{again}starts as"
        run.state = "running"
        self._save()  # before the start: whoever goes on after a kill looks for this run
        self.say(f"{self._name(trial, run)} {verb} {run.id}")
        try:
            self.runs.start(record, trial, run, stop_at, record.devices[index])
        except (ConfigError, CheckBroke) as error:
            others = self._active() - 1
            if isinstance(error, NotTaken) and others:  # as a site limits the jobs of each user
                run.state, self.at_once = before, others
                self.say(f"{self._name(trial, run)} waits, from now on {others} at once: {error}")
                self._save()
                return
            run.state, run.cause = "failed", "; ".join(str(error).splitlines())
            self.say(f"{self._name(trial, run)} failed: {run.cause}")
            self._save()


def _step(state: Mapping[str, Any]) -> int:
    """The step in a run's state; 0 if it is no number, as the file may be damaged."""
    step = state.get("step")
    return step if isinstance(step, int) else 0


def kept_at(trials: int, halving: int, rung: int) -> int:
    """Number of trials that go on after a rung."""
    for _ in range(rung + 1):
        trials = math.ceil(trials / halving)
    return trials


def rungs_of(max_steps: int, trials: int, halving: int) -> list[int]:
    """Steps at the end of each rung, of which the last, the run's own end, is 0: one rung for each cut down to one.

    Raises:
        ConfigError: if there are too few steps for so many rungs.
    """
    cuts = 0
    while trials > 1:
        trials, cuts = math.ceil(trials / halving), cuts + 1
    steps = [max_steps // halving ** (cuts - rung) for rung in range(cuts)]
    if not cuts or steps[0] < 1:
        times = counted(cuts, "time", "times")
        problem = f"would cut {times}, first at step max_steps / {halving**cuts}" if cuts else "has one trial only"
        raise ConfigError.about("halving", halving, problem, "raise --max_steps, or use a larger --halving")
    return [*steps, 0]
