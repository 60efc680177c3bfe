"""A rank that hangs is named, and the run restarts; a number gone wrong stops every rank before the update."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

from tests.detached import detached, ended, pid_of, saved, state_of, step_of, until
from tests.faults.oracle import INTERVAL, OPTIONS, clean, exact, note, told
from trainers.run_folder import RunFolder

Undisturbed = Callable[[str], RunFolder]


def test_a_rank_that_is_stopped_is_named_and_the_run_restarts(home: Path, undisturbed: Undisturbed) -> None:
    whole = undisturbed("ddp")
    run = detached(home, "mine", 2, strategy="ddp", hang_timeout=12, **OPTIONS)
    until(lambda: state_of(run) == "running" and saved(run) >= INTERVAL and step_of(run) > saved(run))
    os.kill(pid_of(run, "rank", 1), signal.SIGSTOP)
    exact(run, whole, replays=INTERVAL)
    log = run.log.read_text()
    (line,) = [line for line in log.splitlines() if "RankHung" in line and "[rank" in line]
    assert "rank 1 hangs in " in line
    assert "its process is stopped (SIGSTOP)" in line
    assert "(hang_timeout=12)" in line
    assert "rank 0: RankHung: rank 1 hangs" in next(line for line in log.splitlines() if "restart 1 of 3" in line)


def test_a_rank_that_hangs_tells_where(home: Path, faulty: dict[str, str]) -> None:
    """It is alive, and the first to speak: its own stack is in the log."""
    at = INTERVAL + 2
    variables = {**faulty, "FAULT": f"hang:1:{at}"}
    run = detached(home, "mine", 2, variables, strategy="ddp", hang_timeout=8, max_restarts=0, **OPTIONS)
    state = ended(run)
    assert (state["state"], saved(run)) == ("failed", INTERVAL)
    assert told(run).startswith(f"rank 1: RankHung: rank 1 hangs in data of step {at}; nothing has moved for ")
    spoken = [line for line in run.log.read_text().splitlines() if "[rank 1]" in line]
    assert any("in never_ends" in line for line in spoken)
    clean(run)


def test_a_loss_that_is_no_number_on_one_rank_stops_all(home: Path, faulty: dict[str, str]) -> None:
    at = INTERVAL + 2
    variables = {**faulty, "FAULT": f"nan:1:{at}", "FAULT_NOTE": str(note(home))}
    run = detached(home, "mine", 2, variables, strategy="ddp", **OPTIONS)
    state = ended(run)
    assert (state["state"], state["attempt"]) == ("failed", 0), "it would only fall again"
    cause = told(run)
    assert f"step {at}: loss nan" in cause
    assert "on rank 1, in the batch from embedded/train.jsonl:" in cause
    assert "no weight was updated" in cause
    assert saved(run) == INTERVAL
    clean(run)
