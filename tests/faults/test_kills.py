"""Processes that are killed, at random and in the middle of a save: the run restarts, or resumes, as if never."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import psutil
import pytest

from tests.detached import detached, ended, gone, pid_of, saved, state_of, step_of, tunesmith, until
from tests.faults.conftest import Note, Undisturbed
from tests.faults.oracle import INTERVAL, OPTIONS, clean, exact, note, told
from tests.parity.runs import mostly_long
from tests.parity.test_data_stream import mix
from trainers.run.manifest import read_manifest

STRATEGIES = ["ddp", "fsdp2", "zero3"]
PHASES = {"writing": 1, "written": 1, "publishing": 0, "pruning": 0}


@pytest.mark.parametrize(("strategy", "seed"), mostly_long([(one, 1) for one in STRATEGIES], [], [("fsdp2", 1)]))
def test_ranks_are_killed_at_random_steps(
    strategy: str, seed: int, home: Path, undisturbed: Undisturbed, noted: Note
) -> None:
    whole, chance, fault = undisturbed(strategy), random.Random(seed), noted("a rank is killed", strategy)
    run = detached(home, "mine", 2, strategy=strategy, **OPTIONS)
    for attempt in range(2):
        # Beyond a checkpoint that this attempt made, or nothing would be gained and it would not restart.
        until(lambda attempt=attempt: (run.read_state() or {}).get("attempt") == attempt and saved(run) >= 5)  # type: ignore[misc]
        least = saved(run) + chance.randint(1, INTERVAL)
        until(lambda least=least: state_of(run) == "running" and step_of(run) >= least)  # type: ignore[misc]
        os.kill(pid_of(run, "rank", chance.randint(0, 1)), signal.SIGKILL)
        fault.at()
        until(lambda attempt=attempt: (run.read_state() or {}).get("attempt") == attempt + 1)  # type: ignore[misc]
    exact(run, whole, replays=2 * INTERVAL)
    fault.harmless(run)


@pytest.mark.long
@pytest.mark.parametrize(
    ("strategy", "optim"), [("ddp", "muon"), ("fsdp2", "muon"), ("zero3", "muon"), ("fsdp2", "lion")]
)
def test_a_rank_is_killed_under_another_optimizer(
    strategy: str, optim: str, home: Path, undisturbed: Undisturbed, noted: Note
) -> None:
    expected, fault = undisturbed(strategy, optim=optim), noted(f"a rank is killed ({optim})", strategy)
    run = detached(home, "mine", 2, strategy=strategy, optim=optim, **OPTIONS)
    until(lambda: state_of(run) == "running" and saved(run) >= INTERVAL and step_of(run) > INTERVAL)
    os.kill(pid_of(run, "rank", 1), signal.SIGKILL)
    fault.at()
    exact(run, expected, replays=INTERVAL)
    fault.harmless(run)


@pytest.mark.long
def test_a_rank_is_killed_in_a_mix_with_a_stream(home: Path, undisturbed: Undisturbed, noted: Note) -> None:
    """In its second window."""
    options = {"mix": mix(), "dataset_name": "none", "max_train_samples": "none", "streaming_window": 30}
    expected, fault = undisturbed("ddp", **options), noted("a rank is killed (a stream in a mix)", "ddp")
    run = detached(home, "mine", 2, strategy="ddp", **{**OPTIONS, **options})
    until(lambda: state_of(run) == "running" and saved(run) >= 2 * INTERVAL and step_of(run) > 2 * INTERVAL)
    position = read_manifest(max(run.checkpoints.glob("step-" + "[0-9]" * 8)))["progress"]["stream"][0]
    assert (position["epoch"], position["window"]) > (0, 0)
    os.kill(pid_of(run, "rank", 1), signal.SIGKILL)
    fault.at()
    exact(run, expected, replays=INTERVAL)
    fault.harmless(run)


@pytest.mark.parametrize("strategy", mostly_long(STRATEGIES, ["ddp"]))
def test_the_launcher_is_killed(strategy: str, home: Path, undisturbed: Undisturbed, noted: Note) -> None:
    whole, fault = undisturbed(strategy), noted("the launcher is killed", strategy)
    run = detached(home, "mine", 2, strategy=strategy, max_restarts=0, **OPTIONS)
    until(lambda: state_of(run) == "running" and step_of(run) >= INTERVAL + 2)
    ranks = [psutil.Process(pid_of(run, "rank", rank)) for rank in (0, 1)]
    os.kill(pid_of(run, "launcher"), signal.SIGKILL)
    fault.at()
    began = time.monotonic()
    until(lambda: not any(rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE for rank in ranks), 30)
    assert time.monotonic() - began < 5
    assert ended(run)["state"] == "failed"
    assert "the launcher was killed" in told(run)
    assert tunesmith("resume", "mine", "--detach", home=home).returncode == 0
    exact(run, whole, replays=0)
    fault.harmless(run)


@pytest.mark.long
def test_the_supervisor_is_killed_and_later_a_rank(home: Path, undisturbed: Undisturbed, noted: Note) -> None:
    """Training goes on without it; what ends then ends alone, and leaves nothing behind."""
    whole, fault = undisturbed("ddp"), noted("the supervisor is killed, then a rank", "ddp")
    run = detached(home, "mine", 2, strategy="ddp", **OPTIONS)
    until(lambda: state_of(run) == "running" and step_of(run) >= 1)
    launcher, rank = pid_of(run, "launcher"), pid_of(run, "rank", 1)
    os.kill(pid_of(run, "supervisor"), signal.SIGKILL)
    reached = saved(run)
    until(lambda: saved(run) > reached)
    assert psutil.pid_exists(launcher)
    os.kill(rank, signal.SIGKILL)
    fault.at()
    gone(run)  # rank 0 says how it ended, where nobody is left to say so after it
    assert ended(run)["state"] == "failed"
    clean(run)
    assert told(run)
    assert (run.read_state() or {})["attempt"] == 0, "nobody was there to restart it"
    assert tunesmith("resume", "mine", "--detach", home=home).returncode == 0
    exact(run, whole, replays=INTERVAL)
    fault.harmless(run)


@pytest.mark.parametrize("phase", mostly_long(PHASES, ["writing", "publishing"]))
def test_a_rank_is_killed_in_the_middle_of_a_save(
    phase: str, home: Path, undisturbed: Undisturbed, faulty: dict[str, str], noted: Note
) -> None:
    whole, at, fault = undisturbed("ddp"), 2 * INTERVAL, noted(f"a rank is killed in a save ({phase})", "ddp")
    variables = {**faulty, "FAULT": f"save:{phase}:{PHASES[phase]}:{at}", "FAULT_NOTE": str(note(home))}
    run = detached(home, "mine", 2, variables, strategy="ddp", **OPTIONS)
    exact(run, whole, replays=INTERVAL)
    fault.at(note(home).stat().st_mtime)
    assert (run.read_state() or {})["attempt"] == 1, "control: it was killed"
    there = note(home).read_text().split("\n")
    half = f"step-{at:08d}.tmp-0"
    assert (half in there) == (phase != "pruning"), "control: a half-written folder was there"
    assert (f"step-{at:08d}" in there) == (phase == "pruning")
    fault.harmless(run)


@pytest.mark.long
def test_a_damaged_checkpoint_is_set_aside(home: Path, undisturbed: Undisturbed, noted: Note) -> None:
    whole, fault = undisturbed("ddp"), noted("one bit of the newest checkpoint is flipped", "ddp")
    run = detached(home, "mine", 2, strategy="ddp", **OPTIONS)
    until(lambda: step_of(run) >= 2 * INTERVAL + 1)
    assert tunesmith("stop", "mine", home=home).returncode == 0
    assert ended(run)["state"] == "stopped"
    newest = saved(run)
    file = run.checkpoints / f"step-{newest:08d}" / "rank-00001.safetensors"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    fault.at()
    assert tunesmith("resume", "mine", "--detach", home=home).returncode == 0
    exact(run, whole, replays=INTERVAL)
    assert (run.checkpoints / f"bad-step-{newest:08d}").is_dir()
    assert f"step-{newest:08d} is bad: rank-00001.safetensors was changed after it was written" in run.log.read_text()
    fault.harmless(run)
