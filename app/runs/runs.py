"""Finds, lists, shows and stops runs. All of it reads the run folder's files; nothing else needs to be running."""

from __future__ import annotations

import contextlib
import difflib
import json
import os
import shlex
import shutil
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from app.console import shortened
from app.accelerate_launch import read_command_line
from trainers.config.options import ConfigError
from trainers.config.parse import read_yaml
from trainers.run.folder import END_STATES, LIVE_STATES, STATES, Process, RunFolder, read_json, registered_runs
from trainers.strategy.strategy import load_strategy

GONE = "ended without a word: its processes are gone"
LITTLE = 1 << 20
"""Free bytes below which a disk counts as full."""


# -- finding ---------------------------------------------------------------------------------------------------------


def list_runs(runs_dir: Path) -> list[RunFolder]:
    """Every run below `runs_dir`, and those elsewhere that are registered, newest first."""
    runs = [RunFolder(path) for path in run_paths(runs_dir)]
    states = [(run, read_json(run.state_file) or {}) for run in runs]
    known = [(str(state.get("started_at") or ""), run.id, run) for run, state in states if state.get("state") in STATES]
    return [run for _, _, run in sorted(known, key=lambda entry: entry[:2], reverse=True)]


def run_paths(runs_dir: Path) -> list[Path]:
    """The folders in `runs_dir` and the registered ones elsewhere, each once, whether they hold a run or not.

    A link in `runs_dir` that leads out of it is left out.
    """
    home = Path(os.path.realpath(runs_dir))
    inside: dict[Path, Path] = {}
    try:
        with os.scandir(runs_dir) as entries:
            for entry in entries:
                whole = home / entry.name if not entry.is_symlink() else Path(os.path.realpath(entry.path))
                if entry.is_dir() and whole.is_relative_to(home):
                    inside[whole] = runs_dir / entry.name
    except OSError:
        inside = {}
    outside = {Path(os.path.realpath(path)): path for path in registered_runs()}
    return list({**outside, **inside}.values())


def _is_inside(path: Path, folder: Path) -> bool:
    """Whether the path leads into the folder, links followed."""
    return path.resolve().is_relative_to(folder.resolve())


def _is_run(run: RunFolder) -> bool:
    """Whether the folder keeps the contract: a state file with a known state."""
    return (read_json(run.state_file) or {}).get("state") in STATES


def run_of_id(name: Any, runs_dir: Path) -> RunFolder:
    """The run of an id, for callers that may not name paths.

    Args:
        name: whatever a stranger sent.
        runs_dir: folder of run folders; a run in it is taken before a registered one of the same id.

    Raises:
        ConfigError: for anything but the id of a run in `runs_dir` or of a registered one.
    """
    text = name if isinstance(name, str) else ""
    shown = repr(shortened(text))
    if not 0 < len(text.encode(errors="replace")) <= 255 or not text.isprintable() or os.sep in text:
        raise ConfigError(f"{shown} is no run id; pick a run from the list of runs")
    near = RunFolder(runs_dir / text)
    try:
        if text not in (".", "..") and _is_run(near) and _is_inside(near.path, runs_dir):
            return near
    except (OSError, RuntimeError):
        pass  # a link that leads to itself
    far = [run for path in registered_runs() if path.name == text and _is_run(run := RunFolder(path))]
    if len(far) == 1:
        return far[0]
    why = f"{shown} is the name of {len(far)} runs" if far else f"there is no run {shown}"
    raise ConfigError(f"{why}; it may have been renamed or deleted: pick one from the list of runs")


def find_run(name: str, runs_dir: Path) -> RunFolder:
    """The run of a name, or of a path to a run folder.

    Args:
        name: a run id in `runs_dir`, the id of a registered run, or a path.
        runs_dir: folder of run folders.

    Raises:
        ConfigError: for no such run, `..`, a folder that holds no run, or a link that leads out of `runs_dir`.
    """
    shown = repr(shortened(name))
    if not name.isprintable() or not name.strip():
        raise ConfigError(f"{shown} is no run; `tunesmith runs list` names them")
    path = Path(os.path.expanduser(name))
    if ".." in path.parts:
        raise ConfigError(f"{shown} is refused: a run's path has no `..`; give its id, or its folder's full path")
    if len(path.parts) == 1 and not path.is_absolute() and os.sep not in name:
        return _by_id(name, shown, runs_dir)
    run = RunFolder(path)
    if _is_run(run) and (not _is_lexically_in(run.path, runs_dir) or _is_inside(run.path, runs_dir)):
        return run
    why = "leads out of the runs folder" if _is_run(run) else "holds no run"
    raise ConfigError(f"{shown} {why}; `tunesmith runs list` names the runs")


def _is_lexically_in(path: Path, folder: Path) -> bool:
    return path.is_relative_to(folder.absolute())


def _by_id(name: str, shown: str, runs_dir: Path) -> RunFolder:
    run = RunFolder(runs_dir / name)
    try:
        if _is_run(run) and not _is_inside(run.path, runs_dir):
            raise ConfigError(f"{shown} leads out of {runs_dir}; give the full path of the folder that it means")
    except OSError:
        pass  # e.g. a name longer than the file system has
    known = list_runs(runs_dir)
    named = [other for other in known if other.id == name]
    if len(named) > 1:
        paths = " or ".join(shlex.quote(str(other.path)) for other in named)
        raise ConfigError(f"{shown} is the name of {len(named)} runs; give the path of one: {paths}")
    if named:
        return named[0]
    near = difflib.get_close_matches(name, [other.id for other in known], n=1, cutoff=0.5)
    way = f"did you mean {near[0]}?" if near else "`tunesmith runs list` names the runs"
    raise ConfigError(f"there is no run {shown} in {runs_dir}; {way}")


# -- what a run is and where it stands -------------------------------------------------------------------------------


def true_state(run: RunFolder) -> dict[str, Any]:
    """The state file, but `failed` where it says that the run lives and none of its processes does.

    And not over yet where it says so and a rank is still on its way out, with its GPU: without a supervisor, rank 0
    itself says so. That is `stopping`, or `running` where the run came to its end by itself. Processes are told by pid
    and start time on this host; a run of another host is believed.
    """
    state = run.read_state() or {"state": "failed", "cause": "it never started: there is no state file"}
    if state.get("host") != socket.gethostname():
        return state
    if state.get("state") in END_STATES and any(one.role == "rank" and _is_alive(one) for one in processes_in(state)):
        return {**state, "state": "running" if state["state"] == "done" else "stopping"}
    while state.get("state") in LIVE_STATES and not _lives(state):
        again = run.read_state() or {}
        if again.get("updated_at") == state.get("updated_at"):
            ending = state.get("ending")  # left by rank 0, for a supervisor that did not live to publish it
            return {**state, **(ending if isinstance(ending, dict) else {"state": "failed", "cause": _gone(run)})}
        state = again  # it ended properly between the two looks
    return state


def _gone(run: RunFolder) -> str:
    """It could not say why it ended where its folder cannot be written to."""
    with contextlib.suppress(OSError):
        if not os.access(run.path, os.W_OK):
            return f"{GONE}, and nothing can be written to {run.path}"
        if (free := shutil.disk_usage(run.path).free) < LITTLE:
            return f"{GONE}, and the disk of {run.path} has {free:,} bytes free"
    return run.noted_failure() or GONE  # a rank may have noted why, and waited in vain for rank 0 to say so


def _lives(state: dict[str, Any]) -> bool:
    return any(_is_alive(process) for process in processes_in(state))


def _is_alive(process: Process) -> bool:
    try:
        return process.alive()
    except (ValueError, OverflowError):
        return False  # a pid that no system gives, from a damaged file


def processes_in(state: dict[str, Any]) -> list[Process]:
    """The processes that a state names; entries that are none are left out."""
    found = []
    named = state.get("processes")
    for entry in named if isinstance(named, list) else []:
        try:
            since = None if entry.get("since_boot") is None else float(entry["since_boot"])
            one = Process(str(entry["role"]), entry["rank"], int(entry["pid"]), float(entry["started"]), since)
            found.append(one)
        except (KeyError, TypeError, AttributeError, ValueError, OverflowError):
            continue
    return found


def config_values(run: RunFolder) -> dict[str, Any]:
    """The plain values of `config.yaml`; empty when it cannot be read."""
    try:
        return read_yaml(run.config)
    except ConfigError:
        return {}


def strategy_name(run: RunFolder) -> str:
    """Name of a run's strategy; empty when its `accelerate.yaml` cannot be read."""
    try:
        return load_strategy(str(run.accelerate)).name
    except ConfigError:
        return ""


def gpu_ids(run: RunFolder) -> list[int]:
    """The GPUs that the run was started on, from its command line; empty on a CPU."""
    try:
        return read_command_line(run.command.read_text(encoding="utf-8"))[0] if run.command.is_file() else []
    except (OSError, UnicodeDecodeError):
        return []


def world_size(run: RunFolder) -> int | None:
    """Processes of the run; None when its Accelerate file cannot be read."""
    try:
        return int(read_yaml(run.accelerate)["num_processes"])
    except (ConfigError, KeyError, TypeError, ValueError, OverflowError):
        return None


def summary(run: RunFolder) -> dict[str, Any]:
    """One row of `runs list --json`."""
    state = true_state(run)
    keys = ("state", "cause", "step", "total_steps")
    return {
        "id": run.id,
        **{key: state.get(key) for key in keys},
        "preset": config_values(run).get("preset"),
        "strategy": strategy_name(run),
        "world_size": world_size(run),
        "gpus": gpu_ids(run),
        "started_at": state.get("started_at"),
        "run_dir": str(run.path),
    }


def metrics(run: RunFolder) -> Iterator[dict[str, Any]]:
    """The rows of `metrics.jsonl`; a line that is still being written is left out."""
    if not run.metrics.is_file():  # a pipe would block for ever
        return
    try:
        with open(run.metrics, encoding="utf-8", errors="replace") as file:
            for line in file:
                try:
                    row = json.loads(line)
                except (ValueError, RecursionError):
                    continue
                if isinstance(row, dict):
                    yield row
    except OSError:
        return


def last_values(run: RunFolder) -> dict[str, Any]:
    """The newest value of every metric."""
    newest: dict[str, Any] = {}
    for row in metrics(run):
        newest.update(row)
    return newest


def last_checkpoint(run: RunFolder) -> str | None:
    """Name of the newest published checkpoint."""
    names = [path.name for path in run.checkpoints.glob("step-*") if path.name.removeprefix("step-").isdigit()]
    return max(names, default=None)


def saved_step(run: RunFolder) -> int:
    """Step of the newest published checkpoint; 0 without any."""
    return int((last_checkpoint(run) or "step-0").removeprefix("step-"))


# -- the log ---------------------------------------------------------------------------------------------------------


class Tail:
    """Reads what was added to a text file since the last look, in whole lines.

    Args:
        path: need not exist yet.
        offset: byte to begin at.
    """

    MOST = 1_000_000

    def __init__(self, path: Path, offset: int = 0):
        self.path, self.offset = path, offset

    def _read(self) -> bytes:
        try:
            if not self.path.is_file():  # a pipe would block for ever
                return b""
            with open(self.path, "rb") as file:
                file.seek(self.offset)
                return file.read(self.MOST)
        except OSError:
            return b""

    def lines(self) -> list[str]:
        """New whole lines; at most `MOST` bytes of them at once, and a longer line in pieces."""
        data = self._read()
        whole = data if len(data) == self.MOST and b"\n" not in data else data[: data.rfind(b"\n") + 1]
        self.offset += len(whole)
        return whole.decode("utf-8", "replace").splitlines()

    def rest(self) -> list[str]:
        """What stands after the last line end: a line that its writer did not live to end."""
        data = self._read()
        self.offset += len(data)
        return data.decode("utf-8", "replace").splitlines()


def log_lines(run: RunFolder, follow: bool = False, poll: float = 0.3) -> Iterator[str]:
    """The lines of `log.txt`.

    Args:
        run: the run.
        follow: go on until the run has ended.
        poll: seconds between two looks.
    """
    tail = Tail(run.log)
    while True:
        ended = not follow or true_state(run)["state"] in END_STATES
        while lines := tail.lines():
            yield from lines
        if ended:
            yield from tail.rest()
            return
        time.sleep(poll)


# -- stopping --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stopped:
    """What `stop_run` found.

    Args:
        state: the true state at the end.
        already: it had ended before.
        in_time: it is in an end state.
    """

    state: dict[str, Any]
    already: bool
    in_time: bool


def stop_run(run: RunFolder, timeout: float, poll: float = 0.2, save: bool = True) -> Stopped:
    """Asks the run to stop, and waits for it.

    Args:
        run: the run.
        timeout: seconds to wait.
        save: a checkpoint first.
        poll: seconds between two looks.
    """
    state = true_state(run)
    if state["state"] in END_STATES:
        return Stopped(state, already=True, in_time=True)
    run.ask_stop(save)
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        state = true_state(run)
        if state["state"] in END_STATES and not _lives(state):
            return Stopped(state, already=False, in_time=True)
        time.sleep(poll)
    return Stopped(true_state(run), already=False, in_time=state["state"] in END_STATES)


def end_by_force(run: RunFolder, patience: float = 15.0) -> Stopped:
    """Kills the launcher and the ranks of a run that did not stop when asked; its last checkpoint stands.

    Args:
        run: a run of this host.
        patience: seconds for its supervisor to say that it has ended; then it is killed too.
    """
    for roles in (("launcher", "rank"), ("supervisor",)):
        named = [process for process in processes_in(true_state(run)) if process.role in roles and _is_alive(process)]
        tree = {process for entry in named for process in _with_children(entry.pid)}
        for process in tree:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(tree, timeout=patience)
        deadline = time.monotonic() + patience
        while _lives(state := true_state(run)) and time.monotonic() < deadline:
            time.sleep(0.1)
    with contextlib.suppress(ConfigError), run.hold():  # nobody else writes its state any more
        if state.get("state") != "done":
            run.write_state(state="stopped", cause="ended by force; the last checkpoint stands", ending=None)
    state = true_state(run)
    return Stopped(state, already=False, in_time=state["state"] in END_STATES and not _lives(state))


def _with_children(pid: int) -> list[psutil.Process]:
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.Error:
        return []
