"""Signals and control files: all ranks agree on a step, save, and go on or leave in order."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.detached import detached, ended, pid_of, state_of, step_of, tunesmith, until
from tests.faults.oracle import INTERVAL, OPTIONS, STEPS, clean, exact, replayed, told
from trainers.run_folder import RunFolder

Undisturbed = Callable[[str], RunFolder]


def extra(run: RunFolder) -> set[int]:
    """Steps of checkpoints that neither the interval nor the end of the run asked for."""
    steps = {int(path.name[5:13]) for path in run.checkpoints.glob("step-" + "[0-9]" * 8)}
    return {step for step in steps if step % INTERVAL and step != STEPS}


@pytest.mark.parametrize("who", ["rank 1", "supervisor", "control file"])
def test_a_request_to_save_is_obeyed_and_it_goes_on(who: str, home: Path, undisturbed: Undisturbed) -> None:
    whole = undisturbed("ddp")
    run = detached(home, "mine", 2, strategy="ddp", **OPTIONS)
    until(lambda: state_of(run) == "running" and step_of(run) >= 1)
    os.kill(pid_of(run, "launcher"), signal.SIGUSR1)  # it must not die of it
    while not extra(run) and step_of(run) < STEPS - 1:  # again, where a save fell on a step of the interval
        reached = step_of(run)
        if who == "control file":
            run.ask_save()
        else:
            os.kill(pid_of(run, "rank", 1) if who == "rank 1" else pid_of(run, who), signal.SIGUSR1)
        until(lambda reached=reached: extra(run) or step_of(run) > reached)  # type: ignore[misc]
    exact(run, whole, replays=0)
    assert extra(run), "no save was made that the interval did not ask for"
    assert not run.save_request.exists()
    assert (run.read_state() or {})["attempt"] == 0


@pytest.mark.parametrize("who", ["rank 1", "rank 1, twice", "launcher", "supervisor"])
def test_a_signal_to_any_process_stops_all_at_one_step(who: str, home: Path, undisturbed: Undisturbed) -> None:
    whole = undisturbed("ddp")
    run = detached(home, "mine", 2, strategy="ddp", **OPTIONS)
    until(lambda: state_of(run) == "running" and step_of(run) >= INTERVAL + 1)
    pid = pid_of(run, "rank", 1) if who.startswith("rank") else pid_of(run, who)
    for _ in range(1 + who.endswith("twice")):
        os.kill(pid, signal.SIGTERM)
    state = ended(run)
    assert (state["state"], replayed(run)) == ("stopped", 0)
    assert "resume goes on from there" in told(run)
    assert (run.checkpoints / f"step-{state['step']:08d}").is_dir()
    clean(run)
    assert tunesmith("resume", "mine", "--detach", home=home).returncode == 0
    exact(run, whole, replays=0)
