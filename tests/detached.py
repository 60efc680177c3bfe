"""Starts detached runs as the command line does, looks at them, and waits for what must come."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil

from app.runs.runs import last_checkpoint, true_state
from tests import forked
from tests.launching import ROOT, environment, flags
from trainers.run.device_locks import holders
from trainers.run.folder import END_STATES, RunFolder

TUNESMITH = [sys.executable, "-P", "-m", "app.cli"]
SMALL: dict[str, Any] = {
    "max_train_samples": 60,
    "max_length": 128,
    "global_batch_size": 4,
    "per_device_train_batch_size": 2,
    "eval_dataset_name": "none",
    "save_steps": 5,
    "save_total_limit": 100,
}


def processes(folder: Path) -> list[psutil.Process]:
    """What runs with a path below the folder in its command line."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        words = process.info["cmdline"] or []
        named = any(word.startswith(f"{folder}{os.sep}") for word in words)
        if named and process.info["status"] != psutil.STATUS_ZOMBIE and process.pid != os.getpid():
            found.append(process)
    return found


def inside(home: Path, **more: str) -> dict[str, str]:
    own = {"PYTHONPATH": str(ROOT), "XDG_STATE_HOME": str(home / "state"), "CUDA_VISIBLE_DEVICES": ""}
    return environment(**{**own, **more})


def tunesmith(*words: str, home: Path, **more: str) -> subprocess.CompletedProcess[str]:
    return forked.run(
        [*TUNESMITH, *words], cwd=home, env=inside(home, **more), capture_output=True, text=True, timeout=600
    )


def train_words(run: RunFolder, processes: int, **options: Any) -> list[str]:
    words = ["tiny-lora", "--num_processes", str(processes), "--detach", "--json"]
    return ["train", *words, *flags({"output_dir": run.path, **options})]


def detached(
    home: Path, name: str, processes: int, variables: Mapping[str, str] | None = None, **options: Any
) -> RunFolder:
    """A run that was started with `--detach`, by a command that has ended; `variables` go to its environment."""
    run = RunFolder(home / "runs" / name)
    done = tunesmith(*train_words(run, processes, **options), home=home, **(variables or {}))
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


def gone(run: RunFolder) -> None:
    """Waits for the last process of it; one on its way out has no command line any more, and may still hold files."""
    until(lambda: not processes(run.path) and not any(one.alive() for one in run.processes()), 60)


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
