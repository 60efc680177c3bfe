"""A rank that hangs is named, and the run restarts; a number gone wrong stops every rank before the update."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest

from tests.detached import detached, ended, pid_of, saved, state_of, step_of, tunesmith, until
from tests.faults.conftest import Note, Undisturbed
from tests.faults.oracle import INTERVAL, OPTIONS, clean, exact, told
from tests.parity.runs import mostly_long

STRATEGIES = ["ddp", "fsdp2", "zero3"]


@pytest.mark.parametrize("strategy", mostly_long(STRATEGIES, ["ddp"]))
def test_a_rank_that_is_stopped_is_named_and_the_run_restarts(
    strategy: str, home: Path, undisturbed: Undisturbed, noted: Note
) -> None:
    whole, fault = undisturbed(strategy), noted("a rank hangs (SIGSTOP)", strategy)
    run = detached(home, "mine", 2, strategy=strategy, hang_timeout=12, **OPTIONS)
    until(lambda: state_of(run) == "running" and saved(run) >= INTERVAL and step_of(run) > saved(run))
    os.kill(pid_of(run, "rank", 1), signal.SIGSTOP)
    fault.at()
    exact(run, whole, replays=INTERVAL)
    log = run.log.read_text()
    (line,) = [line for line in log.splitlines() if "RankHung" in line and "[rank" in line]
    assert "rank 1 hangs in " in line
    assert "its process is stopped (SIGSTOP)" in line
    assert "(hang_timeout=12)" in line
    assert "rank 0: RankHung: rank 1 hangs" in next(line for line in log.splitlines() if "restart 1 of 3" in line)
    fault.harmless(run)


@pytest.mark.parametrize("strategy", mostly_long(STRATEGIES, []))
def test_a_rank_that_hangs_tells_where(strategy: str, home: Path, faulty: dict[str, str], noted: Note) -> None:
    """It is alive, and the first to speak: its own stack is in the log."""
    at, fault = INTERVAL + 2, noted("a rank hangs (endless loop)", strategy)
    variables = {**faulty, "FAULT": f"hang:1:{at}"}
    run = detached(home, "mine", 2, variables, strategy=strategy, hang_timeout=8, max_restarts=0, **OPTIONS)
    state = ended(run)
    fault.at()
    assert (state["state"], saved(run)) == ("failed", INTERVAL)
    assert told(run).startswith(f"rank 1: RankHung: rank 1 hangs in data of step {at}; no progress for ")
    spoken = [line for line in run.log.read_text().splitlines() if "[rank 1]" in line]
    assert any("in never_ends" in line for line in spoken)
    clean(run)
    fault.harmless()


@pytest.mark.parametrize("strategy", mostly_long([*STRATEGIES, "tp"], []))
def test_without_a_watch_the_others_give_up_after_the_time_asked_for(strategy: str, home: Path) -> None:
    """Control: the default is more than half an hour."""
    run = detached(home, "mine", 2, strategy=strategy, ddp_backend="gloo", hang_timeout=0, ddp_timeout=20,
                   max_restarts=0, **OPTIONS)  # fmt: skip
    until(lambda: state_of(run) == "running" and saved(run) >= INTERVAL)
    os.kill(pid_of(run, "rank", 1), signal.SIGSTOP)
    stopped = time.monotonic()
    state = ended(run)
    assert 15 < time.monotonic() - stopped < 100
    assert state["state"] == "failed"
    assert re.search(r"communication +gloo$", run.log.read_text(), re.MULTILINE)
    assert "Timed out waiting 20000ms" in told(run)
    report = tunesmith("runs", "show", "mine", home=home)
    assert "A collective did not complete in time: some rank never came to it" in report.stdout + report.stderr
    clean(run)


CASES = [(kind, strategy) for kind in ("nan", "inf") for strategy in STRATEGIES]


@pytest.mark.parametrize(("kind", "strategy"), mostly_long(CASES, [("nan", "ddp")]))
def test_a_number_gone_wrong_on_one_rank_stops_all_before_the_update(
    kind: str, strategy: str, home: Path, faulty: dict[str, str], undisturbed: Undisturbed, noted: Note
) -> None:
    whole, fault = undisturbed(strategy), noted(f"{kind} on one rank", strategy)
    at = INTERVAL + 2
    run = detached(home, "mine", 2, {**faulty, "FAULT": f"{kind}:1:{at}"}, strategy=strategy, **OPTIONS)
    state = ended(run)
    fault.at()
    assert (state["state"], state["attempt"]) == ("failed", 0), "it would only fall again"
    cause = told(run)
    assert f"step {at}: loss " in cause
    if kind == "nan":
        assert f"step {at}: loss nan" in cause
        assert "on rank 1, in the batch from embedded/train.jsonl:" in cause
    else:  # every rank has the sum of all gradients by then, so the batches of all are told
        assert re.search(r"gradient norm (inf|nan), .* in the batch from embedded/train.jsonl:", cause), cause
    assert "no weight was updated" in cause
    assert saved(run) == INTERVAL
    clean(run)
    assert tunesmith("resume", "mine", "--detach", home=home).returncode == 0, "without the fault"
    exact(run, whole, replays=1)
    fault.harmless(run)
