"""Runs that are handed to SLURM, as far as that needs no cluster; tests/slurm has one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from app.command_line import RESUME, TRAIN, Args
from app.launch import actions, slurm, slurm_node
from app.launch.job import resume_job
from app.launch.slurm_node import Placement, after, limit
from app.runs.scheduled import submission
from app.schedulers.slurm import SlurmError, script
from app.schedulers.slurm_options import SlurmOptions
from tests.made_runs import made_run
from trainers.config.mistakes import ConfigError
from trainers.run.folder import RunFolder, write_json


@pytest.fixture(autouse=True)
def _config_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def args(verb: Any, *argv: str) -> Args:
    parsed = verb.read(argv)
    assert parsed is not None
    return parsed


def submitted(folder: Path, state: str = "stopped", world: int = 4, **options: Any) -> RunFolder:
    run = made_run(folder, "run", state, world=world)
    write_json(run.scheduler, {"kind": "slurm", "options": {"gpus_per_node": 0, **options}, "resume_from": None})
    return run


@pytest.mark.parametrize(
    ("stored", "flags", "expected"),
    [
        ({"nodes": 2}, [], (4, 2)),
        ({"nodes": 2}, ["--nodes", "1"], (4, 1)),
        ({"nodes": 1}, ["--nodes", "4"], (4, 4)),
        ({"nodes": 2}, ["--num_processes", "2"], (2, 2)),
        ({"nodes": 2, "gpus_per_node": 2}, [], (4, 2)),
        ({"nodes": 2, "gpus_per_node": 2}, ["--gpus_per_node", "1", "--nodes", "4"], (4, 4)),
        ({"nodes": 2, "gpus_per_node": 4}, ["--nodes", "1"], (4, 1)),
    ],
)
def test_a_resumed_run_keeps_its_processes_unless_told_otherwise(
    tmp_path: Path, stored: dict[str, int], flags: list[str], expected: tuple[int, int]
) -> None:
    run = submitted(tmp_path, **stored)
    job, options = slurm.slurm_job(args(RESUME, str(run.path), *flags), run)
    machines = job.devices.machines.count if job.devices.machines else 1
    assert (job.devices.num_processes, machines) == expected
    assert (job.strategy.num_processes, options.nodes) == expected


def test_processes_that_nodes_do_not_divide_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="num_processes=4 is not divisible by num_machines=3"):
        slurm.slurm_job(args(RESUME, "run", "--nodes", "3"), submitted(tmp_path, nodes=2))


@pytest.mark.parametrize(
    "name", ["gpus", "num_machines", "machine_rank", "main_process_ip", "main_process_port", "min_machines"]
)
def test_what_slurm_decides_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}=1 is decided by SLURM; leave --{name} out"):
        slurm.slurm_job(args(TRAIN, "tiny-lora", f"--{name}", "1"))


def test_no_way_resumes_a_submitted_run_here_unless_told_to(tmp_path: Path) -> None:
    """The form and the remedies of the pages make their job in the same place."""
    run = submitted(tmp_path)
    with pytest.raises(ConfigError, match=r"was submitted to SLURM; `tunesmith resume .*`, .*--on local"):
        resume_job(run, Args())
    assert resume_job(run, args(RESUME, str(run.path), "--on", "local")).run.path == run.path


@pytest.mark.parametrize("document", ["", "[]", "3", "{}", '{"kind": "slurm"}', '{"kind": "slurm", "options": [1]}',
                                      '{"kind": "pbs", "options": {}}'])  # fmt: skip
def test_a_damaged_submission_is_none(tmp_path: Path, document: str) -> None:
    run = made_run(tmp_path, "run", "stopped")
    run.scheduler.write_text(document)
    assert submission(run) is None
    assert resume_job(run, Args()).run.path == run.path


def test_code_is_not_taken_from_a_run_folder(tmp_path: Path) -> None:
    run = submitted(tmp_path, nodes=2, slurm_extra="--prolog=/tmp/x", container="/tmp/x", partition="a")
    job, options = slurm.slurm_job(args(RESUME, str(run.path)), run)
    assert (options.slurm_extra, options.container, options.partition) == ("", None, "a")
    assert [note.partition(" of the last")[0] for note in job.notes] == ["container", "slurm_extra"]


def test_a_page_says_why_a_run_is_not_submitted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(slurm, "preflight", lambda job, quiet, elsewhere: None)
    run = submitted(tmp_path)
    with pytest.raises(ConfigError, match="sbatch is not installed here; `--on local` resumes it on this machine"):
        actions.resume(run)
    assert (run.read_state() or {})["state"] == "stopped"
    assert submission(run)


# -- the time limit --------------------------------------------------------------------------------------------------


@pytest.fixture
def limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    """A run that its supervisor has queued, as the limit of job 12 stopped it."""
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    run = submitted(tmp_path)
    limit(run)
    run.write_state(
        state="queued", cause="stopped at step 8 by its time limit", scheduler={"kind": "slurm", "job": "12"}
    )
    return run


def refuse(*_: Any, **__: Any) -> str:
    raise SlurmError("Requested operation is presently disabled")


def test_where_a_job_may_not_be_queued_again_another_follows_it(
    limited: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    followed: list[str | None] = []
    monkeypatch.setattr(slurm_node, "requeue", refuse)
    monkeypatch.setattr(slurm_node, "submit", lambda run, after: followed.append(after) or "13")
    assert after(limited) == 0
    assert followed == ["12"]
    assert (limited.read_state() or {})["scheduler"] == {"kind": "slurm", "job": "13"}


def test_a_run_that_cannot_be_queued_at_all_has_stopped(limited: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm_node, "requeue", refuse)
    monkeypatch.setattr(slurm_node, "submit", refuse)
    assert after(limited) == 1
    state = limited.read_state() or {}
    assert state["state"] == "stopped"
    assert state["cause"].startswith("stopped at step 8 by its time limit: SLURM queued it neither again (Requested")


def test_the_limit_of_an_earlier_start_stops_nothing(limited: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the same job: SLURM started it again, as when a node was lost just then."""
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    monkeypatch.setattr(slurm_node, "requeue", refuse)
    assert after(limited) == 1
    stopped = {"state": "stopped"}
    again, same = (Placement("12", restarts, ["a"], 0) for restarts in (1, 0))
    assert slurm_node._after_limit(limited, again, stopped) is stopped
    assert slurm_node._after_limit(limited, same, stopped)["state"] == "failed"  # control; no checkpoint: no step


@pytest.mark.parametrize(
    ("time", "before", "fits"),
    [("2", 120, False), ("3", 120, True), ("1:59", 120, False), ("0:02:01", 120, True), ("0-0:02", 120, False),
     ("1-0", 65535, True), ("0", 120, True), ("18:12:15", 65535, False), ("18:12:16", 65535, True)],
)  # fmt: skip
def test_a_job_lasts_longer_than_the_time_before_its_end_at_which_it_saves(time: str, before: int, fits: bool) -> None:
    values = {"time": time, "signal_before": before}
    if fits:
        assert SlurmOptions.checked(values).time == time
        return
    with pytest.raises(ConfigError, match=rf"time={time} is over before the run would save, {before} seconds before"):
        SlurmOptions.checked(values)


# -- the script ------------------------------------------------------------------------------------------------------


def test_bash_runs_the_script_with_spaces_and_quotes_in_its_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under a stand-in for srun, and a Python that writes its arguments down."""
    folder = tmp_path / "it's a folder $HOME"
    folder.mkdir()
    tool = '#!/bin/sh\nfor word; do printf "%s|" "$word"; done >> "$LOG"\necho >> "$LOG"\n'
    (folder / "py thon").write_text(tool)
    (folder / "srun").write_text('#!/bin/sh\nshift\nkill -USR2 $PPID\nsleep 0.3\nexec "$@"\n')
    for name in ("py thon", "srun"):
        (folder / name).chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(folder / "py thon"))
    run = RunFolder(folder / "run")
    (tmp_path / "slurm.sh").write_text(script(run, SlurmOptions()))
    env = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "LOG": str(tmp_path / "log")}
    subprocess.run(["bash", str(tmp_path / "slurm.sh")], env=env, check=True, timeout=60)
    lines = (tmp_path / "log").read_text().splitlines()
    expected = [f"-P|-m|app.launch.slurm_node|{action}|{run.path}|" for action in ("limit", "node", "after")]
    assert lines == expected
