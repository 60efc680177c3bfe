"""Hundreds of kills: ranks, launchers and whole runs, while they train and while they start; KILLS says how many."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from pathlib import Path

import psutil
import pytest

from tests.detached import detached, ended, gone, pid_of, saved, state_of, tunesmith, until
from tests.faults.conftest import Note, Undisturbed
from tests.faults.oracle import OPTIONS, clean, exact, told
from trainers.run.folder import END_STATES, RunFolder

KILLS = int(os.environ.get("KILLS", "70"))
STEPS_PER_KILL = 16
STEPS, INTERVAL, KEPT = STEPS_PER_KILL * KILLS + 20, 2, 3
WAYS = {"one rank": 6, "both ranks": 1, "the launcher": 1, "the whole run": 1, "one rank as it starts": 1}
"""What is killed, and how often of ten times."""


def kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def attempt(run: RunFolder) -> int:
    return int((run.read_state() or {}).get("attempt") or 0)


def ranks_that_start(run: RunFolder) -> list[int]:
    """They are not in the state yet."""
    with contextlib.suppress(psutil.Error, StopIteration):
        return [child.pid for child in psutil.Process(pid_of(run, "launcher")).children()]
    return []


def strike(run: RunFolder, way: str, chance: random.Random) -> None:
    """Kills once: a while after a checkpoint of this attempt was published, or at any moment of its start."""
    begun = saved(run)
    if way == "one rank as it starts":
        until(lambda: len(ranks_that_start(run)) == 2)
        time.sleep(chance.uniform(0, 8))  # the fault's own moment; nothing is waited for
        for pid in chance.sample(ranks_that_start(run), 1):
            kill(pid)
        return
    until(lambda: saved(run) > begun)
    time.sleep(chance.uniform(0, 0.4))
    named = {(one.role, one.rank): one.pid for one in run.processes()}
    kills = {
        "one rank": [("rank", chance.randint(0, 1))],
        "both ranks": [("rank", 0), ("rank", 1)],
        "the launcher": [("launcher", None)],
        "the whole run": [("supervisor", None), ("launcher", None), ("rank", 0), ("rank", 1)],
    }
    for who in kills[way]:
        kill(named[who])


def goes_on(run: RunFolder, before: int, home: Path) -> None:
    """It restarts by itself, or has ended in order and is resumed."""
    until(lambda: attempt(run) > before or state_of(run) in END_STATES)
    if attempt(run) == before:
        assert ended(run)["state"] == "failed"
        assert told(run)
        gone(run)
        again = tunesmith("resume", "mine", "--detach", home=home)
        assert again.returncode == 0, again.stderr
        until(lambda: attempt(run) > before)


@pytest.mark.long
@pytest.mark.timeout(60 * KILLS + 1800)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", "zero3"])
def test_many_random_kills(strategy: str, home: Path, undisturbed: Undisturbed, noted: Note) -> None:
    chance = random.Random(f"{strategy} {KILLS}")
    whole = undisturbed(strategy, max_steps=STEPS, save_steps=STEPS)
    faults = {way: noted(f"{way} killed, at random", strategy) for way in WAYS}
    options = {**OPTIONS, "max_steps": STEPS, "save_steps": INTERVAL, "save_total_limit": KEPT, "max_restarts": 1000}
    run = detached(home, "mine", 2, strategy=strategy, **options)
    each = chance.sample(list(WAYS), len(WAYS))  # so that few kills try every way too
    for way in [*each, *chance.choices(list(WAYS), list(WAYS.values()), k=KILLS)][:KILLS]:
        before = attempt(run)
        strike(run, way, chance)
        faults[way].at()
        goes_on(run, before, home)
        assert saved(run) < STEPS, "the run is too short for so many kills"
    exact(run, whole, KILLS * INTERVAL, STEPS, INTERVAL, KEPT)
    clean(run)
    for fault in faults.values():
        fault.harmless(run)
