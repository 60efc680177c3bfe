"""A sweep on runs that are made up: what it starts, records, cuts and goes on with, whenever its process dies."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from app.sweep import runner
from app.sweep.record import SweepFolder, SweepRecord, SweepRun, Trial, true_state
from app.sweep.report import document_of
from app.sweep.runner import Runner, StopAsked, kept_at, rungs_of
from app.sweep.space import Axis, grid
from trainers.config.mistakes import ConfigError

STEPS = 18


class Killed(BaseException):
    """Stands for SIGKILL of the sweep's process."""


class MadeUpRuns:
    """Runs that train a step at each look; the loss falls faster the nearer the rate is to 1e-3."""

    def __init__(self, failing: str = "") -> None:
        self.failing, self.states = failing, dict[str, dict[str, Any]]()
        self.values, self.begun = dict[str, dict[str, str]](), list[str]()
        self.at_once = 0

    def start(self, record: SweepRecord, trial: Trial, run: SweepRun, stop_at: int, devices: dict[str, str]) -> None:
        if trial.values.get("learning_rate") == self.failing:
            raise ConfigError("refused")
        if run.id not in self.states:
            self.begun.append(run.id)
            self.states[run.id] = {"step": 0}
        assert self.states[run.id].get("state") != "running", "a live run is started again"
        assert self.states[run.id].get("state") != "done", "a run is started again after its end"
        self.states[run.id] |= {"state": "running", "goal": stop_at or STEPS, "cause": None}
        self.values[run.id] = {**trial.values, "seed": str(run.seed)}
        self.at_once = max(self.at_once, sum(state["state"] == "running" for state in self.states.values()))

    def state(self, run: SweepRun) -> dict[str, Any] | None:
        state = self.states.get(run.id)
        if state and state["state"] == "running":
            state["step"] += 1
            if state["step"] == state["goal"]:
                state["state"] = "done" if state["goal"] == STEPS else "stopped"
        return state

    def score(self, record: SweepRecord, run: SweepRun) -> float:
        values, step = self.values[run.id], self.states[run.id]["step"]
        distance = abs(math.log10(float(values.get("learning_rate", "1e-3"))) + 3)
        return distance + 1 / step + 0.001 * int(values["seed"])

    def stop(self, run: SweepRun) -> None:
        self.states[run.id] |= {"state": "stopped", "cause": "stopped by a stop request"}


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "POLL", 0.0)


RATES = ("1e-6", "1e-5", "1e-4", "1e-3", "1e-2", "1e-1", "1", "10")


def record_of(folder: SweepFolder, rates: tuple[str, ...] = RATES, **parts: Any) -> SweepRecord:
    axes = [Axis(option="learning_rate", values=rates)]
    values = {
        "id": folder.id, "preset": "tiny-lora", "config": None, "options": {"runs_dir": "runs"}, "launch": {},
        "axes": axes, "search": "grid", "trial_count": len(rates), "seeds": [42], "search_seed": 0, "parallel": 2,
        "devices": [{}], "rungs": [0], "halving": None, "measure": "last_eval_loss", "better": "low",
    } | parts  # fmt: skip
    record = SweepRecord(**values)
    for point in grid(axes) if record.search == "grid" else []:
        record.add_trial(point)
    folder.path.mkdir(parents=True, exist_ok=True)
    folder.write(record)
    return record


def halved(trials: int = 8) -> dict[str, Any]:
    return {"rungs": rungs_of(STEPS, trials, 3), "halving": 3}


@pytest.fixture
def folder(tmp_path: Path) -> SweepFolder:
    return SweepFolder(tmp_path / "sweep-x")


def go(folder: SweepFolder, runs: MadeUpRuns, say: Callable[[str], None] = lambda line: None) -> dict[str, Any]:
    Runner(folder, folder.read(), runs, say).go()
    return document_of(folder, folder.read())


def test_halving_finds_what_the_grid_finds_with_less_work(tmp_path: Path) -> None:
    whole, cut = SweepFolder(tmp_path / "sweep-a"), SweepFolder(tmp_path / "sweep-b")
    record_of(whole)
    record_of(cut, **halved())
    grid_runs, cut_runs = MadeUpRuns(), MadeUpRuns()
    first, second = go(whole, grid_runs), go(cut, cut_runs)
    assert first["leader"] == second["leader"] == 4
    assert (first["steps"], second["steps"]) == (8 * STEPS, 8 * 2 + 3 * 4 + 12)
    assert grid_runs.at_once == cut_runs.at_once == 2
    assert [trial["state"] for trial in second["trials"]].count("cut") == 7
    assert second["runs"][3]["metric"] == first["runs"][3]["metric"]


@pytest.mark.parametrize("parts", [{}, halved(), {"seeds": [1, 2]}], ids=["grid", "halving", "seeds"])
def test_whenever_it_is_killed_nothing_runs_twice(parts: dict[str, Any], tmp_path: Path) -> None:
    """Killed before and after every start and every record; then once more, later."""
    undisturbed = SweepFolder(tmp_path / "sweep-0")
    record_of(undisturbed, **parts)
    expected, kills = go(undisturbed, MadeUpRuns()), 0
    for moment in range(1, 300, 7):
        folder, runs, count = SweepFolder(tmp_path / f"sweep-{moment}"), MadeUpRuns(), 0
        record_of(folder, **parts)

        def fatal(work: Callable[..., Any], moment: int = moment) -> Callable[..., Any]:
            def wrapped(*args: Any) -> Any:
                nonlocal count
                count += 1
                if count == moment:
                    raise Killed
                result = work(*args)
                count += 1
                if count == moment:
                    raise Killed
                return result

            return wrapped

        doomed = Runner(folder, folder.read(), runs, lambda line: None)
        start = runs.start
        runs.start, doomed._save = fatal(start), fatal(doomed._save)  # type: ignore[method-assign]
        try:
            doomed.go()
        except Killed:
            kills += 1
        else:
            break
        runs.start = start  # type: ignore[method-assign]
        document = go(folder, runs)
        assert len(runs.begun) == len(set(runs.begun)) == len(expected["runs"])
        assert [run["metric"] for run in document["runs"]] == [run["metric"] for run in expected["runs"]]
        assert document["steps"] == expected["steps"]
    assert kills > 5


def test_a_start_that_is_not_recorded_would_be_seen(folder: SweepFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: recorded after it, a run whose start was followed by a kill is started again."""
    record_of(folder)
    runs, killed = MadeUpRuns(), Runner(folder, folder.read(), MadeUpRuns(), lambda line: None)
    killed.runs = runs
    saves = []

    def forgetful() -> None:
        if saves:
            raise Killed
        saves.append(True)
        folder.write(killed.record)

    monkeypatch.setattr(killed, "_save", forgetful)
    with pytest.raises(Killed):
        killed.go()
    first = folder.read().trials[0].runs[0]
    runs.start(folder.read(), folder.read().trials[0], first, 0, {})  # what the killed process had begun
    with pytest.raises(AssertionError, match="a live run is started again"):
        go(folder, runs)


def test_a_failed_run_is_a_failed_trial_and_the_others_go_on(folder: SweepFolder) -> None:
    record_of(folder, **halved())
    lines: list[str] = []
    document = go(folder, MadeUpRuns(failing="1e-3"), lines.append)
    failed = document["trials"][3]
    assert (failed["state"], failed["cause"]) == ("failed", "refused")
    assert document["leader"] == 3
    assert document["state"] == "done"
    assert any("trial 4 (learning_rate=1e-3) failed: refused" in line for line in lines)


def test_a_stop_saves_all_and_going_on_starts_none_anew(folder: SweepFolder) -> None:
    record_of(folder)
    runs = MadeUpRuns()
    stopped = Runner(folder, folder.read(), runs, lambda line: None, lambda record: folder.stop_request.touch())
    with pytest.raises(StopAsked):
        stopped.go()
    stopped.stop()
    assert true_state(folder.read()) == "stopped"
    begun = list(runs.begun)
    assert 0 < len(begun) < 8
    folder.stop_request.unlink()
    document = go(folder, runs)
    assert [run["state"] for run in document["runs"]] == ["done"] * 8
    assert runs.begun[: len(begun)] == begun
    assert len(set(runs.begun)) == len(runs.begun) == 8


def test_a_start_that_is_interrupted_is_no_failure(folder: SweepFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    record_of(folder)
    runs = MadeUpRuns()
    interrupted = Runner(folder, folder.read(), runs, lambda line: None)

    def interrupt(*args: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(runs, "start", interrupt)
        with pytest.raises(KeyboardInterrupt):
            interrupted.go()
    interrupted.stop()
    assert {run.state for trial in folder.read().trials for run in trial.runs} == {"waiting"}
    assert [run["state"] for run in go(folder, runs)["runs"]] == ["done"] * 8


def test_tpe_asks_for_a_trial_when_one_has_ended(folder: SweepFolder) -> None:
    axes = [Axis(option="learning_rate", low="1e-6", high="10", log=True)]
    record_of(folder, axes=axes, search="tpe", trial_count=12, parallel=2, seeds=[1, 2])
    runs = MadeUpRuns()
    document = go(folder, runs)
    assert len(document["trials"]) == 12
    assert runs.at_once == 2
    assert len(document["runs"]) == 24
    leader = document["trials"][document["leader"] - 1]
    assert 1e-5 < float(leader["options"]["learning_rate"]) < 1e-1


def test_the_best_is_named_only_beyond_the_spread(folder: SweepFolder) -> None:
    """Seeds move a score by 0.001 each: rates far apart are told apart, and equal ones are not."""
    record_of(folder, rates=("1e-3", "1e-2"), seeds=[1, 2, 3])
    document = go(folder, MadeUpRuns())
    assert (document["leader"], document["best"]) == (1, 1)
    assert "It is the best: every seed" in document["verdict"]
    close = SweepFolder(folder.path.with_name("sweep-close"))
    record_of(close, rates=("1e-3", "1.001e-3"), seeds=[1, 2, 3])
    document = go(close, MadeUpRuns())
    assert (document["leader"], document["best"]) == (1, None)
    assert "None is the best beyond the spread" in document["verdict"]
    single = SweepFolder(folder.path.with_name("sweep-single"))
    record_of(single, rates=("1e-3", "1e-2"))
    document = go(single, MadeUpRuns())
    assert document["best"] is None
    assert "one seed" in document["verdict"]


@pytest.mark.parametrize(("steps", "trials", "halving", "rungs"), [
    (18, 8, 3, [2, 6, 0]), (9, 8, 3, [1, 3, 0]), (100, 2, 2, [50, 0]), (64, 9, 2, [4, 8, 16, 32, 0]),
])  # fmt: skip
def test_rungs(steps: int, trials: int, halving: int, rungs: list[int]) -> None:
    assert rungs_of(steps, trials, halving) == rungs
    assert kept_at(trials, halving, len(rungs) - 2) == 1


@pytest.mark.parametrize(("steps", "trials"), [(8, 8), (100, 1)])
def test_halving_without_room_is_refused(steps: int, trials: int) -> None:
    with pytest.raises(ConfigError, match="halving"):
        rungs_of(steps, trials, 3)
