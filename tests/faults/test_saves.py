"""A save overlaps training: what is written is the state of its step, and a kill meanwhile loses no published one."""

from __future__ import annotations

import inspect
import json
import os
import signal
from pathlib import Path

import pytest
from safetensors.torch import load_file

from app.launch.supervisor import supervise
from tests.detached import detached, ended, pid_of, saved, state_of, step_of, until
from tests.faults.conftest import Note, Undisturbed
from tests.faults.oracle import INTERVAL, OPTIONS, exact
from tests.parity.runs import mostly_long
from trainers.run.folder import RunFolder
from trainers.run.manifest import verify

STRATEGIES = ["ddp", "fsdp2", "zero3"]


def steps_before_publishing(run: RunFolder, step: int) -> list[int]:
    """The steps beyond `step` that were logged before its checkpoint was published."""
    found = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    published = next(at for at, row in enumerate(found) if row["step"] == step and "checkpoint_bytes" in row)
    return [row["step"] for row in found[:published] if row["step"] > step]


def same_tensors(one: Path, two: Path) -> bool:
    files = verify(one)["files"]
    for name in files:
        mine, theirs = load_file(one / name), load_file(two / name)
        if set(mine) != set(theirs) or not all(mine[key].equal(theirs[key]) for key in mine):
            return False
    return bool(files)


@pytest.mark.parametrize("strategy", mostly_long(STRATEGIES, ["fsdp2"]))
def test_training_goes_on_while_a_rank_writes(
    strategy: str, home: Path, undisturbed: Undisturbed, faulty: dict[str, str]
) -> None:
    whole = undisturbed(strategy)
    run = detached(home, "mine", 2, {**faulty, "FAULT": "slow_disk:1:2"}, strategy=strategy, **OPTIONS)
    exact(run, whole, replays=0)
    assert steps_before_publishing(run, INTERVAL), "training stood still"
    assert steps_before_publishing(whole, INTERVAL) == [], "control: a quick write is waited for"
    name = f"step-{INTERVAL:08d}"
    assert same_tensors(run.checkpoints / name, whole.checkpoints / name)
    later = f"step-{2 * INTERVAL:08d}"
    assert not same_tensors(run.checkpoints / name, whole.checkpoints / later), "control: other steps differ"


@pytest.mark.long
def test_a_kill_while_it_is_written(home: Path, undisturbed: Undisturbed, faulty: dict[str, str], noted: Note) -> None:
    whole, fault = undisturbed("ddp"), noted("a rank is killed while a slow save overlaps", "ddp")
    run = detached(home, "mine", 2, {**faulty, "FAULT": "slow_disk:1:2"}, strategy="ddp", **OPTIONS)
    half = run.checkpoints / f"step-{2 * INTERVAL:08d}.tmp-0"
    until(lambda: half.exists() and step_of(run) > 2 * INTERVAL)
    os.kill(pid_of(run, "rank", 0), signal.SIGKILL)
    fault.at()
    assert half.exists(), "control: it was being written"
    exact(run, whole, replays=2 * INTERVAL)
    fault.harmless(run)


@pytest.mark.long
def test_a_stop_waits_for_a_save_that_takes_longer_than_its_grace(home: Path, faulty: dict[str, str]) -> None:
    seconds = 70
    assert seconds > inspect.signature(supervise).parameters["grace"].default
    variables = {**faulty, "FAULT": f"slow_disk:1:{seconds}"}
    run = detached(home, "mine", 2, variables, strategy="ddp", **{**OPTIONS, "save_steps": 0, "max_steps": 4000})
    until(lambda: state_of(run) == "running" and step_of(run) >= 2)
    run.ask_stop()
    state = ended(run)
    assert (state["state"], saved(run)) == ("stopped", state["step"]), state


@pytest.mark.long
def test_no_half_written_folder_is_left_by_a_run_that_fails(home: Path, faulty: dict[str, str]) -> None:
    variables = {**faulty, "FAULT": "slow_disk:1:60"}
    run = detached(home, "mine", 2, variables, strategy="ddp", max_restarts=0, **OPTIONS)
    until(lambda: list(run.checkpoints.glob("*.tmp-*")))
    os.kill(pid_of(run, "rank", 1), signal.SIGKILL)
    assert ended(run)["state"] == "failed"
    assert list(run.checkpoints.iterdir()) == []
