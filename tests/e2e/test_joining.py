"""Several machines: the line that is printed for another one is run by a shell, joins, and goes on after a stop."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from app.command_line import Args
from app.launch import actions
from tests.detached import SMALL, inside, state_of, tunesmith, until
from tests.forked import Popen
from tests.launching import Finished, flags, free_port
from trainers.config.parse import Request
from trainers.run.folder import RunFolder

STEPS, STOP = 6, 3


def series(run: RunFolder) -> list[list[float]]:
    finished = Finished(run, 0, "")
    return [finished.series(name) for name in ("loss", "grad_norm", "learning_rate")]


def paste(home: Path, line: str) -> Popen:
    """Runs a line in a shell of machine 1, which finds `tunesmith` as after `pip install`, and has its own state."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = inside(home, XDG_STATE_HOME=str(home / "other"), PATH=path)
    with open(home / "machine-1.txt", "ab") as out:
        return Popen(["sh", "-c", line], cwd=home, env=env, stdout=out, stderr=out)


def members(run: RunFolder, home: Path) -> list[dict[str, Any]]:
    return json.loads(tunesmith("runs", "show", str(run.path), "--json", home=home).stdout)["members"]


@pytest.mark.long
def test_the_printed_line_joins_the_run_and_joins_it_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {**SMALL, "max_steps": STEPS, "logging_steps": 1, "save_steps": STEPS, "strategy": "ddp"}
    network = {"num_machines": 2, "machine_rank": 0, "main_process_ip": "127.0.0.1", "main_process_port": free_port()}
    run = RunFolder(tmp_path / "runs" / "mine")
    chosen = {**options, **network, "num_processes": 2, "output_dir": run.path, "stop_at_step": STOP}
    printed = tunesmith("train", "tiny-lora", *flags(chosen), "--detach", home=tmp_path)
    assert printed.returncode == 0, printed.stderr
    line = re.search(r"^machine 1  (.*)$", printed.stdout, re.MULTILINE)
    assert line is not None, printed.stdout
    assert line[1] == f"tunesmith resume {run.path} --machine_rank 1"
    assert [row["status"] for row in members(run, tmp_path)] == ["there", "awaited"]
    machine_1 = paste(tmp_path, line[1])
    assert machine_1.wait(300) == 130, (tmp_path / "machine-1.txt").read_text()
    assert until(lambda: state_of(run) == "stopped")
    assert members(run, tmp_path) == []

    for name, value in inside(tmp_path).items():
        monkeypatch.setenv(name, value)
    actions.resume(run, Args(request=Request(options={"stop_at_step": "none"})))  # as the page's button does
    machine_1 = paste(tmp_path, line[1])
    until(lambda: state_of(run) == "running")
    rows = members(run, tmp_path)
    assert [row["status"] for row in rows] in (["trains", "trains"], [])
    assert machine_1.wait(300) == 0, (tmp_path / "machine-1.txt").read_text()
    assert until(lambda: state_of(run) == "done")

    alone = RunFolder(tmp_path / "runs" / "alone")
    done = tunesmith(
        "train", "tiny-lora", *flags({**options, "num_processes": 2, "output_dir": alone.path}), home=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert len(series(alone)[0]) == STEPS
    assert series(run) == series(alone)
