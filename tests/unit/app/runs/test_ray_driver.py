"""What is shown of a run on Ray, from what its driver has written."""

from __future__ import annotations

import shutil
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from app.runs.history import _state_fields
from app.runs.ray_driver import SILENCE, write_driver
from app.runs.runs import true_state
from trainers.run.folder import RunFolder, read_json, write_json

GONE = {"role": "driver", "rank": None, "pid": 4_000_000, "started": 1.0, "since_boot": 1.0}


def long_ago() -> str:
    return (datetime.now(UTC) - timedelta(seconds=3 * SILENCE)).isoformat()


def written(folder: Path, state: str, host: str | None = None, **driver: Any) -> RunFolder:
    """A run whose state was written on another machine, or by a process that has ended; its driver is this process."""
    run = RunFolder(folder / "run")
    run.create()
    run.write_state(state=state, scheduler={"kind": "ray", "job": "01000000"}, **({"host": host} if host else {}))
    write_driver(run, **{"phase": "training", "job": "01000000", "restarts": 0, **driver})
    return run


@pytest.mark.parametrize("host", [None, "node7"])
@pytest.mark.parametrize(
    ("state", "phase", "expected"),
    [
        ("queued", "waiting", "queued"), ("starting", "training", "starting"), ("running", "training", "running"),
        ("stopping", "training", "stopping"), ("failed", "training", "stopping"), ("stopped", "training", "stopping"),
        ("done", "training", "running"), ("failed", "ended", "failed"), ("done", "ended", "done"),
    ],
)  # fmt: skip
def test_while_the_driver_lives_nothing_has_ended_before_it_says_so(
    tmp_path: Path, host: str | None, state: str, phase: str, expected: str
) -> None:
    run = written(tmp_path, state, host, phase=phase)
    assert true_state(run)["state"] == expected
    assert _state_fields(run)["state"] == expected


@pytest.mark.parametrize(("state", "is_silent", "expected"), [
    ("queued", False, "failed"), ("running", False, "running"), ("running", True, "failed"), ("done", True, "done"),
    ("stopped", False, "stopped"),
])  # fmt: skip
def test_when_the_driver_is_gone_the_supervisors_have_some_minutes(
    tmp_path: Path, state: str, is_silent: bool, expected: str
) -> None:
    run = written(tmp_path, state, "node7", process=GONE, **({"time": long_ago()} if is_silent else {}))
    shown = true_state(run)
    assert shown["state"] == expected
    assert (expected != "failed") or "its Ray driver on" in shown["cause"]


def test_a_driver_elsewhere_that_is_silent_is_named(tmp_path: Path) -> None:
    """Its clock may differ, so that this is no proof."""
    run = written(tmp_path, "running", "node7", time=long_ago())
    write_json(run.ray, {**(read_json(run.ray) or {}), "host": "head"})
    shown = true_state(run)
    assert (shown["state"], shown["cause"]) == ("running", "its Ray driver on head has written nothing for 9 minutes")


def test_a_copied_folder_has_no_driver(tmp_path: Path) -> None:
    run = written(tmp_path, "stopped")
    shutil.copytree(run.path, tmp_path / "copy")
    assert true_state(run)["state"] == "stopping"
    assert true_state(RunFolder(tmp_path / "copy"))["state"] == "stopped"


@pytest.mark.parametrize("document", ["", "[]", "3", "{}", '{"run": 3}', '{"process": 3}', '{"host": [], "time": 3}'])
def test_a_damaged_file_of_a_driver_is_none(tmp_path: Path, document: str) -> None:
    run = written(tmp_path, "running", "node7")
    run.ray.write_text(document)
    assert true_state(run)["state"] == "running"
    write_json(run.ray, {"run": str(run.path), "host": "vm", "process": [3], "time": {}, "phase": []})
    assert true_state(run)["state"] == "running"
