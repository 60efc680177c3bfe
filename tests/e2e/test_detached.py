"""Runs that outlive everything: detached, queued, stopped, killed and restarted, with real training."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import psutil
import pytest

from app.launch import actions
from app.runs.runs import last_checkpoint
from app.runs.state import allowed, queue_position
from tests.detached import (
    SMALL,
    TUNESMITH,
    detached,
    ended,
    gone,
    inside,
    pid_of,
    processes,
    saved,
    state_of,
    step_of,
    train_words,
    tunesmith,
    until,
)
from tests.launching import Finished, launch, shadow_modules
from trainers.run import device_locks
from trainers.run.device_locks import Holder, Need, holders
from trainers.run.folder import RunFolder

pytestmark = pytest.mark.usefixtures("two_cores")
ENDLESS = {**SMALL, "max_steps": 5000, "save_steps": 5000}


def test_a_run_outlives_its_terminal_and_the_kill_of_a_rank(home: Path) -> None:
    """Under DeepSpeed, for which Accelerate puts the launcher's working folder on the ranks' import path."""
    shadow_modules(home)
    run = RunFolder(home / "runs" / "mine")
    words = [*TUNESMITH, *train_words(run, 2, **SMALL, max_steps=24, strategy="zero2")]
    shell = 'out=$1; shift; "$@" > "$out"; echo $? > "$out.status"; exec sleep 600'
    terminal = subprocess.Popen(
        ["bash", "-c", shell, "bash", str(home / "out.json"), *words],
        cwd=home, env=inside(home), start_new_session=True,
    )  # fmt: skip
    until(lambda: (home / "out.json.status").exists() and (home / "out.json.status").read_text())
    assert (home / "out.json.status").read_text() == "0\n"
    os.killpg(terminal.pid, signal.SIGKILL)
    terminal.wait()
    assert json.loads((home / "out.json").read_text())["state"] in ("queued", "starting", "running")

    until(lambda: state_of(run) == "running" and 5 <= saved(run) <= step_of(run) - 2)
    os.kill(pid_of(run, "rank", 1), signal.SIGKILL)
    state = ended(run)
    assert (state["state"], state["step"], state["attempt"]) == ("done", 24, 1), state
    assert (run.model / "adapter_model.safetensors").exists()
    rows = [(row["attempt"], row["step"]) for row in Finished(run, 0, "").rows()]
    first, second = ([step for attempt, step in sorted(rows) if attempt == number] for number in (0, 1))
    assert first == list(range(1, len(first) + 1))
    assert second == list(range(second[0], 25)), "it goes on from a checkpoint"
    assert second[0] % 5 == 1
    assert set(first) & set(second), "steps after it are computed again"
    assert 1 < second[0] <= len(first) <= second[0] + 4, "and at most one save interval of them"
    assert run.log.read_text().count("[supervisor] restart 1 of 3, from step-0000") == 1
    gone(run)


def test_training_outlives_its_supervisor_and_keeps_its_slots_to_the_end(home: Path) -> None:
    run = detached(home, "mine", 1, **{**ENDLESS, "max_steps": 200})
    until(lambda: state_of(run) == "running" and step_of(run) >= 1)
    os.kill(pid_of(run, "supervisor"), signal.SIGKILL)
    until(lambda: not psutil.pid_exists(pid_of(run, "supervisor")))
    assert (state_of(run), {holder["run"] for holder in holders().values()}) == ("running", {"mine"})
    until(lambda: (run.read_state() or {})["state"] != "running" or not holders())
    assert (run.read_state() or {})["state"] in ("stopping", "done"), "the slots were free before it said that it ended"
    gone(run)
    assert holders() == {}
    state = ended(run)
    assert (state["state"], state["step"], state["export_dir"]) == ("done", 200, str(run.model))


def test_two_runs_at_once_a_queue_and_every_kind_of_stop(home: Path) -> None:
    first, second = (detached(home, name, 1, **ENDLESS) for name in ("first", "second"))
    until(lambda: step_of(first) >= 1 and step_of(second) >= 1)
    assert (state_of(first), state_of(second)) == ("running", "running")
    assert {holder["run"] for holder in holders().values()} == {"first", "second"}

    ahead = device_locks.enqueue(home / "ahead", "ahead", Need(cpu_slots=1))
    third = detached(home, "third", 1, **ENDLESS)
    assert (state_of(third), queue_position(third)) == ("queued", 2)
    assert allowed(third) == ["cancel", "move_up", "clone"], "the last one cannot move down"
    moved = tunesmith("runs", "move", "third", "-1", "--json", home=home)
    assert json.loads(moved.stdout) == {"id": "third", "place": 1}, moved.stderr
    assert allowed(third) == ["cancel", "move_down", "clone"]
    device_locks.give_up(ahead)
    cancelled = tunesmith("stop", "third", "--json", home=home)
    assert cancelled.returncode == 0, cancelled.stderr
    assert (ended(third)["cause"], queue_position(third)) == ("cancelled before it started", None)
    assert not third.metrics.exists()

    discarded = tunesmith("stop", "second", "--no_save", "--json", home=home)
    assert discarded.returncode == 0, discarded.stderr
    assert ended(second)["cause"].startswith("stopped without saving at step ")
    assert last_checkpoint(second) is None
    assert state_of(first) == "running", "the other goes on"

    for _ in range(5):
        actions.stop(first)
    state = ended(first)
    assert (state["state"], state["attempt"]) == ("stopped", 0)
    assert "its checkpoint is saved" in state["cause"]
    assert [path.name for path in first.checkpoints.iterdir()] == [f"step-{state['step']:08}"]
    until(lambda: not processes(home / "runs"))
    assert holders() == {}

    longer = ["--max_steps", str(state["step"] + 1), "--force"]
    again = tunesmith("resume", "first", "--detach", "--json", *longer, home=home)
    assert again.returncode == 0, again.stderr
    assert (ended(first)["state"], step_of(first)) == ("done", state["step"] + 1)


def test_a_launch_by_hand_does_not_take_what_another_holds(home: Path) -> None:
    options = {"preset": "tiny-lora", **SMALL, "max_steps": 1}
    here = {"XDG_STATE_HOME": str(home / "state"), "CUDA_VISIBLE_DEVICES": ""}
    with device_locks.take_now(Need(cpu_slots=2), Holder("the other run")):
        refused = launch(home / "refused", 1, options, **here)
        assert refused.status != 0
        assert "1 CPU slot cannot be taken: cpu-0, cpu-1 held by the other run" in refused.output
        assert "--share_gpus true" in refused.output
        assert refused.state == {}
        shared = launch(home / "shared", 1, {**options, "share_gpus": True}, **here)
        assert shared.state["state"] == "done", shared.output[-2000:]


@pytest.mark.parametrize(("anew", "how"), [(False, "removed"), (True, "replaced by another")])
def test_a_run_folder_that_is_lost_while_it_trains_ends_the_run(anew: bool, how: str, home: Path) -> None:
    run = RunFolder(home / "runs" / "mine")
    words = [word for word in train_words(run, 1, **{**ENDLESS, "save_steps": 1}) if word != "--detach"]
    program = subprocess.Popen(
        [*TUNESMITH, *words], cwd=home, env=inside(home), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    until(lambda: state_of(run) == "running" and saved(run) >= 1)
    ranks = [psutil.Process(pid_of(run, "rank", 0)), psutil.Process(pid_of(run, "launcher"))]
    run.path.rename(home / "moved")
    if anew:
        run.path.mkdir()
    out, errors = program.communicate(timeout=600)
    cause = f"the run folder {run.path} was {how} while it trained"
    assert (program.returncode, json.loads(out)["state"], json.loads(out)["cause"]) == (1, "failed", cause)
    assert errors.splitlines()[-1] == f"failed: {cause}"
    assert not [process for process in ranks if process.is_running()]
    assert list(run.path.iterdir()) == [] if anew else not run.path.exists()
    assert holders() == {}
