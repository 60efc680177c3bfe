"""Signals and control files: all ranks agree on a step, save, and go on or leave in order."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests import forked
from tests.detached import (
    TUNESMITH,
    detached,
    ended,
    inside,
    pid_of,
    saved,
    state_of,
    step_of,
    train_words,
    tunesmith,
    until,
)
from tests.faults.conftest import Note, Undisturbed
from tests.faults.oracle import INTERVAL, OPTIONS, STEPS, clean, exact, note, replayed, told
from tests.forked import Popen
from tests.launching import ROOT, SCRIPT, flags
from tests.parity.runs import mostly_long
from trainers.run.folder import RunFolder


def extra(run: RunFolder) -> set[int]:
    """Steps of checkpoints that neither the interval nor the end of the run asked for."""
    steps = {int(path.name[5:13]) for path in run.checkpoints.glob("step-" + "[0-9]" * 8)}
    return {step for step in steps if step % INTERVAL and step != STEPS}


@pytest.mark.parametrize("who", mostly_long(["rank 1", "supervisor", "control file"], ["rank 1", "control file"]))
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


@pytest.mark.parametrize("who", mostly_long(["rank 1", "rank 1, twice", "launcher", "supervisor"], ["rank 1, twice"]))
def test_a_signal_to_any_process_stops_all_at_one_step(
    who: str, home: Path, undisturbed: Undisturbed, noted: Note
) -> None:
    whole, fault = undisturbed("ddp"), noted(f"SIGTERM to {who}", "ddp")
    run = detached(home, "mine", 2, strategy="ddp", **OPTIONS)
    until(lambda: state_of(run) == "running" and step_of(run) >= INTERVAL + 1)
    pid = pid_of(run, "rank", 1) if who.startswith("rank") else pid_of(run, who)
    for _ in range(1 + who.endswith("twice")):
        os.kill(pid, signal.SIGTERM)
    fault.at()
    state = ended(run)
    assert (state["state"], replayed(run)) == ("stopped", 0)
    assert "resume goes on from there" in told(run)
    assert (run.checkpoints / f"step-{state['step']:08d}").is_dir()
    clean(run)
    assert tunesmith("resume", "mine", "--detach", home=home).returncode == 0
    exact(run, whole, replays=0)
    fault.harmless(run)


PHASES = ["writing", "written", "publishing", "pruning"]


@pytest.mark.parametrize("phase", mostly_long(PHASES, ["written"]))
def test_a_signal_in_the_middle_of_a_save_lets_it_end(
    phase: str, home: Path, undisturbed: Undisturbed, faulty: dict[str, str], noted: Note
) -> None:
    whole, at, fault = undisturbed("ddp"), 2 * INTERVAL, noted(f"SIGTERM in a save ({phase})", "ddp")
    variables = {**faulty, "FAULT": f"term:{phase}:0:{at}", "FAULT_NOTE": str(note(home))}
    run = detached(home, "mine", 2, variables, strategy="ddp", **OPTIONS)
    state = ended(run)
    fault.at(note(home).stat().st_mtime)
    assert (state["state"], replayed(run)) == ("stopped", 0), state
    assert state["step"] == saved(run) <= at + 2
    there = note(home).read_text().split("\n")
    assert (f"step-{at:08d}" in there) == (phase == "pruning"), "control: it was not whole yet"
    assert "resume goes on from there" in told(run)
    clean(run)
    assert tunesmith("resume", "mine", "--detach", home=home).returncode == 0
    exact(run, whole, replays=0)
    fault.harmless(run)


def by_hand(run: RunFolder) -> list[str]:
    strategy = ["--config_file", str(ROOT / "accelerate_configs" / "ddp.yaml"), "--main_process_port", "0"]
    options = {"preset": "tiny-lora", **OPTIONS, "output_dir": run.path, "resume_from_checkpoint": "auto"}
    if not run.exists():
        del options["resume_from_checkpoint"]
    return [TUNESMITH[0], "-m", "accelerate.commands.launch", *strategy, str(SCRIPT), *flags(options)]


def by_tunesmith(run: RunFolder) -> list[str]:
    if run.exists():
        return [*TUNESMITH, "resume", "mine"]
    return [*TUNESMITH, *(word for word in train_words(run, 2, strategy="ddp", **OPTIONS) if word != "--detach")]


@pytest.mark.long
@pytest.mark.parametrize(("starts", "times"), [(by_hand, 1), (by_hand, 2), (by_tunesmith, 2)])
def test_ctrl_c_in_a_terminal(starts, times: int, home: Path, undisturbed: Undisturbed, noted: Note) -> None:
    """It goes to every process of the foreground group, and some people press it twice."""
    whole, fault = undisturbed("ddp"), noted(f"Ctrl-C, {starts.__name__}", "ddp")
    run = RunFolder(home / "runs" / "mine")
    first = Popen(
        starts(run), cwd=home, env=inside(home), start_new_session=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    until(lambda: (run.read_state() or {}).get("state") == "running" and step_of(run) >= INTERVAL + 1)
    for _ in range(times):
        os.killpg(first.pid, signal.SIGINT)
    fault.at()
    first.wait(60)
    state = ended(run)
    assert (state["state"], replayed(run)) == ("stopped", 0), state
    assert (run.checkpoints / f"step-{state['step']:08d}").is_dir()
    assert "resume goes on from there" in told(run)
    clean(run)
    again = forked.run(starts(run), cwd=home, env=inside(home), capture_output=True, text=True, timeout=120)
    assert again.returncode == 0, again.stdout + again.stderr
    exact(run, whole, replays=0)
    fault.harmless(run)
