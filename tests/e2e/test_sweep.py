"""Sweeps of real runs of the embedded model: a planted best, halving, kills, stops, and a run that fails."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from app.sweep.record import SweepFolder, true_state
from tests.detached import TUNESMITH, inside, processes, state_of, step_of, tunesmith, until
from tests.forked import Popen
from tests.launching import Finished, flags
from trainers.run.folder import RunFolder

pytestmark = pytest.mark.usefixtures("two_cores")
SMALL: dict[str, Any] = {
    "num_processes": 1, "max_train_samples": 60, "max_eval_samples": 40, "max_length": 128, "global_batch_size": 4,
    "per_device_train_batch_size": 4, "save_steps": 0,
}  # fmt: skip
PLANTED = "3e-3"
RATES = f"1e-6,1e-5,3e-5,1e-4,2e-4,3e-4,{PLANTED},1"


def sweep_words(**options: Any) -> list[str]:
    return ["sweep", "tiny-lora", "--json", *flags({**SMALL, **options})]


def swept(home: Path, **options: Any) -> dict[str, Any]:
    done = tunesmith(*sweep_words(**options), home=home)
    assert done.returncode == 0, done.stderr
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def losses(run_dir: str) -> list[tuple[int, float]]:
    return [(row["step"], row["loss"]) for row in Finished(RunFolder(run_dir), 0, "").rows()]


def leader(document: dict[str, Any]) -> dict[str, Any]:
    """The run of the trial that leads, which must be the planted one; each trial has one run."""
    run: dict[str, Any] = document["runs"][document["leader"] - 1]
    assert run["options"] == {"learning_rate": PLANTED}
    assert document["state"] == "done"
    return run


def test_halving_finds_the_planted_best_and_trains_it_as_if_never_stopped(home: Path) -> None:
    cut = swept(home, learning_rate=f"1e-5,1e-4,{PLANTED},1", max_steps=8, halving=2)
    uncut = swept(home, learning_rate=PLANTED, max_steps=8, seeds=1)
    assert (cut["rungs"], cut["steps"]) == ([2, 4, 0], 4 * 2 + 2 * 2 + 4)
    survivor = leader(cut)
    assert (RunFolder(survivor["run_dir"]).read_state() or {})["attempt"] == 2
    assert survivor["metric"] == uncut["runs"][0]["metric"]
    assert losses(survivor["run_dir"]) == losses(uncut["runs"][0]["run_dir"])
    assert len(losses(survivor["run_dir"])) == 8
    own = json.loads((Path(survivor["run_dir"]) / "sweep.json").read_text())
    assert own == {"sweep": cut["sweep"], "trial": cut["leader"], "seed": 42}


@pytest.mark.long
def test_halving_finds_what_a_grid_of_eight_finds_with_less_work(home: Path) -> None:
    grid = swept(home, learning_rate=RATES, max_steps=9)
    cut = swept(home, learning_rate=RATES, max_steps=9, halving=3)
    assert leader(cut)["metric"] == leader(grid)["metric"]
    assert (grid["steps"], cut["steps"]) == (8 * 9, 8 * 1 + 3 * 2 + 6)


def test_a_killed_and_then_interrupted_sweep_goes_on_and_runs_nothing_twice(home: Path) -> None:
    """One of its runs cannot start, as its data is missing; that one fails alone."""
    data = {"dataset_name": "embedded|missing.jsonl", "eval_dataset_name": "none", "eval_share": 0.1}
    words = sweep_words(**data, learning_rate="1e-3,3e-3", max_steps=40, parallel=1)
    begun = tunesmith(*words, "--detach", home=home)
    assert (begun.returncode, json.loads(begun.stdout)["state"]) == (0, "running"), begun.stderr
    runs = lambda: sorted(path.parent for path in (home / "runs").glob("2*/state.json"))  # noqa: E731
    until(lambda: runs() and state_of(RunFolder(runs()[0])) == "running" and step_of(RunFolder(runs()[0])) >= 2)
    folder = SweepFolder(next((home / "runs").glob("sweep-*")))
    os.kill(folder.read().process["pid"], signal.SIGKILL)
    until(lambda: true_state(folder.read()) == "interrupted", 60)

    name = folder.id
    again = Popen([*TUNESMITH, "sweep", "resume", name, "--json"], cwd=home, env=inside(home))
    until(lambda: len(runs()) == 2 and step_of(RunFolder(runs()[1])) >= 2)
    refused = tunesmith("sweep", "resume", name, home=home)
    assert (refused.returncode, "is running" in refused.stderr) == (2, True)
    os.kill(again.pid, signal.SIGINT)
    assert again.wait() == 130
    stopped = json.loads(tunesmith("sweep", "show", name, "--json", home=home).stdout)
    assert (stopped["state"], [run["state"] for run in stopped["runs"][:2]]) == ("stopped", ["done", "stopped"])
    assert processes(home / "runs") == []

    done = tunesmith("sweep", "resume", name, "--json", home=home)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert [run["state"] for run in document["runs"]] == ["done", "done", "failed", "failed"]
    assert "missing.jsonl" in document["runs"][2]["cause"]
    for run in document["runs"][:2]:
        assert [step for step, _ in losses(run["run_dir"])] == list(range(1, 41))
    assert [(RunFolder(path).read_state() or {})["attempt"] for path in runs()] == [0, 1]
    refused = tunesmith("sweep", "resume", name, home=home)
    assert (refused.returncode, "is done" in refused.stderr) == (2, True)
