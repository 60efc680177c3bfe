"""A stop ends an evaluation row by row before its next batch, on all ranks, and leaves no rows that pass for all."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import psutil
import pytest

from tests import forked
from tests.detached import TUNESMITH, detached, ended, gone, inside, pid_of, state_of, tunesmith, until
from tests.parity.runs import mostly_long
from trainers.run.folder import RunFolder

ROWS = 400
OPTIONS = {
    "eval_only": True, "eval_answer_tokens": 200, "dataset_name": "embedded", "eval_dataset_name": "embedded",
    "max_train_samples": 8, "per_device_eval_batch_size": 1, "strategy": "ddp",
}  # fmt: skip
"""One row at a time, with long answers: minutes of work, which a stop is to end early."""


@pytest.mark.parametrize("sender", mostly_long(["rank 1", "command"], ["rank 1"]))
def test_a_stop_ends_it_before_the_next_batch(sender: str, tmp_path: Path) -> None:
    run = detached(tmp_path, "rows", 2, **OPTIONS)
    until(lambda: state_of(run) == "running")
    if sender == "rank 1":
        os.kill(pid_of(run, "rank", 1), signal.SIGTERM)
    else:
        assert tunesmith("stop", str(run.path), home=tmp_path).returncode == 0
    state = ended(run)
    source = {"rank 1": "SIGTERM on rank 1", "command": "a stop request"}[sender]
    assert (state["state"], state["cause"]) == (
        "stopped", f"stopped by {source} before all rows were evaluated; no row was written",
    )  # fmt: skip
    assert not run.evaluation.exists()
    gone(run)
    resumed = tunesmith("resume", str(run.path), "--max_eval_samples", "6", "--eval_answer_tokens", "8", home=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    assert len(run.evaluation.read_text().splitlines()) == 6


@pytest.mark.long
def test_an_interrupt_of_the_command_keeps_the_models_before(tmp_path: Path) -> None:
    command = [*TUNESMITH, "eval", "embedded", "embedded", "--base", "none", "--dataset_name", "embedded", "--json"]
    rows = ["--answer_tokens", "200", "--per_device_eval_batch_size", "1"]
    pipe = subprocess.PIPE
    with forked.Popen([*command, *rows], cwd=tmp_path, env=inside(tmp_path), stdout=pipe, stderr=pipe, text=True) as it:
        until(lambda: list(tmp_path.glob("runs/eval-*/*/state.json")))
        run = RunFolder(next(tmp_path.glob("runs/eval-*/*/state.json")).parent)
        until(lambda: (run.read_state() or {}).get("state") == "running")
        it.send_signal(signal.SIGINT)
        out, _ = it.communicate(timeout=120)
    assert it.returncode == 130
    assert json.loads(out)["interrupted"] is True
    assert not run.evaluation.exists()
    assert (run.read_state() or {})["state"] == "stopped"


@pytest.mark.long
def test_a_kill_of_the_command_ends_its_ranks(tmp_path: Path) -> None:
    """Nobody reads their rows any more. A run of `train` that is started by hand outlives its command."""
    command = [*TUNESMITH, "eval", "embedded", "--base", "none", "--dataset_name", "embedded", "--num_processes", "2"]
    rows = ["--answer_tokens", "200", "--per_device_eval_batch_size", "1"]
    quiet = subprocess.DEVNULL
    with forked.Popen([*command, *rows], cwd=tmp_path, env=inside(tmp_path), stdout=quiet, stderr=quiet) as it:
        until(lambda: list(tmp_path.glob("runs/eval-*/*/state.json")))
        run = RunFolder(next(tmp_path.glob("runs/eval-*/*/state.json")).parent)
        until(lambda: (run.read_state() or {}).get("state") == "running")
        ranks = [psutil.Process(pid_of(run, "rank", number)) for number in range(2)]
        assert all(rank.is_running() for rank in ranks), "control"
        it.kill()
    until(lambda: not any(rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE for rank in ranks))
    listed = json.loads(tunesmith("runs", "list", "--json", home=tmp_path).stdout)
    assert [(entry["run_dir"], entry["state"]) for entry in listed] == [(str(run.path), "failed")]
    assert not run.evaluation.exists()
