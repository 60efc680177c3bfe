"""What the files of a run on several machines say about machine 0, to a machine that does not see its processes."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from app.runs import machines as runs_machines
from app.runs.machines import SILENT_AFTER, lost_machine_0, remedy_line, resume_line
from app.runs.runs import true_state
from trainers.run.folder import RunFolder, write_json


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    """A live run of two machines, whose machine 0 is another host and has been silent for long."""
    run = RunFolder(tmp_path / "mine")
    run.create()
    run.write_state(state="running", host="node0", machines={"count": 2, "minimum": None})
    write(run.machine_file(0), 2 * SILENT_AFTER)
    return run


def write(path: Path, age: float) -> None:
    write_json(path, {})
    os.utime(path, (time.time() - age,) * 2)


def test_a_silent_machine_0_has_ended_its_run(run: RunFolder) -> None:
    state = true_state(run)
    assert state["state"] == "failed"
    assert state["cause"].startswith("machine 0 (node0) was lost: no sign of life for 1")
    assert [path.name for path in run.heartbeats.iterdir()] == ["machine-0.json"]


@pytest.mark.parametrize("name", ["machine-0.json", "rank-0.json"])
def test_a_sign_of_life_of_supervisor_or_rank_is_enough(name: str, run: RunFolder) -> None:
    write(run.heartbeats / name, SILENT_AFTER / 2)
    assert true_state(run)["state"] == "running"


def test_a_clock_that_is_ahead_is_no_reason(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder's own clock decides."""
    monkeypatch.setattr(runs_machines, "_now", lambda folder: time.time() - 2 * SILENT_AFTER + 1)
    assert true_state(run)["state"] == "running"


def test_other_runs_are_never_lost(run: RunFolder) -> None:
    state = run.read_state() or {}
    assert lost_machine_0(run, state)
    assert not lost_machine_0(run, {**state, "state": "stopped"})
    assert not lost_machine_0(run, {**state, "machines": None})
    run.machine_file(0).unlink()
    assert not lost_machine_0(run, state)


def test_a_run_on_several_machines_is_resumed_on_each_and_its_remedy_applied_on_machine_0(run: RunFolder) -> None:
    state, here = {**(run.read_state() or {}), "state": "failed"}, str(run.path)
    assert resume_line(run, state) == f"tunesmith resume {here} --machine_rank K, on each machine"
    assert remedy_line(run, state, 2) == (
        f"`tunesmith resume {here} --apply 2 --machine_rank 0` on machine 0, then `tunesmith resume {here} "
        "--machine_rank K` on each other machine"
    )
    assert remedy_line(run, {**state, "state": "done"}, 1) == (
        f"`tunesmith runs clone {here} --apply 1 --output_dir DIR --machine_rank 0` on machine 0, then `tunesmith "
        "resume DIR --machine_rank K` on each other machine"
    )


def test_a_single_machine_or_a_scheduler_needs_no_machine_rank(run: RunFolder) -> None:
    state = {**(run.read_state() or {}), "state": "failed"}
    single = {**state, "machines": None}
    assert resume_line(run, single) == f"tunesmith resume {run.path}"
    assert remedy_line(run, single, 1) == f"tunesmith resume {run.path} --apply 1"
    assert remedy_line(run, {**single, "state": "done"}, 1) == f"tunesmith runs clone {run.path} --apply 1"
    write_json(run.scheduler, {"kind": "slurm", "options": {}})
    assert remedy_line(run, state, 1) == f"tunesmith resume {run.path} --apply 1"
