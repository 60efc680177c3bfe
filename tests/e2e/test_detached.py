"""Runs that outlive everything: detached, queued, stopped, killed and restarted, with real training."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from app import actions
from app.runs import last_checkpoint, true_state
from tests.launching import ROOT, Finished, environment, flags, launch
from trainers import device_locks
from trainers.device_locks import Holder, Need, holders
from trainers.run_folder import END_STATES, RunFolder

TUNESMITH = [sys.executable, "-m", "app.cli"]
SMALL: dict[str, Any] = {
    "max_train_samples": 60,
    "max_length": 128,
    "global_batch_size": 4,
    "per_device_train_batch_size": 2,
    "eval_dataset_name": "none",
    "save_steps": 5,
    "save_total_limit": 100,
}
ENDLESS = {**SMALL, "max_steps": 5000, "save_steps": 5000}


@pytest.fixture(scope="module", autouse=True)
def _two_cores() -> Iterator[None]:
    """Two CPU slots, whatever the machine has; children inherit it."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(before)[:2])
    yield
    os.sched_setaffinity(0, before)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An own folder, with own locks and queue; what is left of its runs at the end is killed."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    yield tmp_path
    for process in processes(tmp_path):
        process.kill()


def processes(folder: Path) -> list[psutil.Process]:
    """What runs with a path below the folder in its command line."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        words = process.info["cmdline"] or []
        named = any(word.startswith(f"{folder}{os.sep}") for word in words)
        if named and process.info["status"] != psutil.STATUS_ZOMBIE and process.pid != os.getpid():
            found.append(process)
    return found


def inside(home: Path) -> dict[str, str]:
    return environment(PYTHONPATH=str(ROOT), XDG_STATE_HOME=str(home / "state"), CUDA_VISIBLE_DEVICES="")


def tunesmith(*words: str, home: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*TUNESMITH, *words], cwd=home, env=inside(home), capture_output=True, text=True, timeout=600)


def train_words(run: RunFolder, processes: int, **options: Any) -> list[str]:
    words = ["tiny-lora", "--num_processes", str(processes), "--detach", "--json"]
    return ["train", *words, *flags({"output_dir": run.path, **options})]


def detached(home: Path, name: str, processes: int, **options: Any) -> RunFolder:
    """A run that was started with `--detach`, by a command that has ended."""
    run = RunFolder(home / "runs" / name)
    done = tunesmith(*train_words(run, processes, **options), home=home)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["run_dir"] == str(run.path)
    return run


def until(condition: Callable[[], Any], seconds: float = 600) -> Any:
    """Looks until the condition holds; the time is a bound, not a wait."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, "the condition did not come to hold"
        time.sleep(0.05)
    return value


def ended(run: RunFolder) -> dict[str, Any]:
    """The state in which it ended; no process of it lives then, and it holds nothing."""
    until(lambda: true_state(run)["state"] in END_STATES)
    state = true_state(run)
    assert [process for process in run.processes() if process.role != "supervisor" and process.alive()] == []
    assert run.id not in {holder["run"] for holder in holders().values()}
    return state


def state_of(run: RunFolder) -> str:
    return str(true_state(run)["state"])


def step_of(run: RunFolder) -> int:
    return int((run.read_state() or {}).get("step") or 0)


def saved(run: RunFolder) -> int:
    """The step of the newest checkpoint, 0 without one."""
    return int((last_checkpoint(run) or "step-0").removeprefix("step-"))


def pid_of(run: RunFolder, role: str, rank: int | None = None) -> int:
    return next(one.pid for one in run.processes() if (one.role, one.rank) == (role, rank))


def test_a_run_outlives_its_terminal_and_the_kill_of_a_rank(home: Path) -> None:
    run = RunFolder(home / "runs" / "mine")
    words = [*TUNESMITH, *train_words(run, 2, **SMALL, max_steps=24)]
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
    until(lambda: not processes(run.path))


def test_training_outlives_its_supervisor_and_keeps_its_slots_to_the_end(home: Path) -> None:
    run = detached(home, "mine", 1, **{**ENDLESS, "max_steps": 200})
    until(lambda: state_of(run) == "running" and step_of(run) >= 1)
    os.kill(pid_of(run, "supervisor"), signal.SIGKILL)
    until(lambda: not psutil.pid_exists(pid_of(run, "supervisor")))
    assert (state_of(run), {holder["run"] for holder in holders().values()}) == ("running", {"mine"})
    until(lambda: (run.read_state() or {})["state"] != "running" or not holders())
    assert (run.read_state() or {})["state"] in ("stopping", "done"), "the slots were free before it said that it ended"
    until(lambda: not processes(run.path))
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
    assert (state_of(third), actions.queue_place(third)) == ("queued", 2)
    assert actions.allowed(third) == ["cancel", "move_up", "move_down", "clone"]
    moved = tunesmith("runs", "move", "third", "-1", "--json", home=home)
    assert json.loads(moved.stdout) == {"id": "third", "place": 1}, moved.stderr
    device_locks.give_up(ahead)
    cancelled = tunesmith("stop", "third", "--json", home=home)
    assert cancelled.returncode == 0, cancelled.stderr
    assert (ended(third)["cause"], actions.queue_place(third)) == ("cancelled before it started", None)
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

    again = tunesmith("resume", "first", "--detach", "--json", "--max_steps", str(state["step"] + 1), home=home)
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
