"""Finds, lists, shows and stops runs. Works from the files of the run folder alone; no server is needed."""

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

from app.accelerate_launch import read_command_line
from app.console import shortened
from app.runs.machines import lost_machine_0
from app.runs.scheduled import cancel_waiting, kill_job, scheduled_state
from trainers.config.mistakes import ConfigError
from trainers.config.yaml_file import read_yaml
from trainers.run.folder import END_STATES, LIVE_STATES, STATES, Process, RunFolder, read_json, registered_runs
from trainers.strategy.strategy import load_strategy

DIED = "its processes ended without reporting a cause"
MIN_FREE_BYTES = 1 << 20
"""Free bytes below which a disk counts as full."""


# -- finding ---------------------------------------------------------------------------------------------------------


def list_runs(runs_dir: Path) -> list[RunFolder]:
    """All runs in `runs_dir` and registered runs elsewhere, newest first."""
    runs = [RunFolder(path) for path in run_paths(runs_dir)]
    states = [(run, read_json(run.state_file) or {}) for run in runs]
    dated = [(str(state.get("started_at") or ""), run.id, run) for run, state in states if state.get("state") in STATES]
    return [run for _, _, run in sorted(dated, key=lambda entry: entry[:2], reverse=True)]


def run_paths(runs_dir: Path) -> list[Path]:
    """The folders in `runs_dir` and registered folders elsewhere, without duplicates; not all need hold a run.

    Skips links in `runs_dir` that point outside it.
    """
    root = Path(os.path.realpath(runs_dir))
    inside: dict[Path, Path] = {}
    try:
        with os.scandir(runs_dir) as entries:
            for entry in entries:
                real_path = root / entry.name if not entry.is_symlink() else Path(os.path.realpath(entry.path))
                if entry.is_dir() and real_path.is_relative_to(root):
                    inside[real_path] = runs_dir / entry.name
    except OSError:
        inside = {}
    outside = {Path(os.path.realpath(path)): path for path in registered_runs()}
    return list({**outside, **inside}.values())


def _is_inside(path: Path, folder: Path) -> bool:
    """Whether the path is in the folder once links are resolved."""
    return path.resolve().is_relative_to(folder.resolve())


def _is_run(run: RunFolder) -> bool:
    """Whether the folder has a state file with a known state."""
    return (read_json(run.state_file) or {}).get("state") in STATES


def run_of_id(name: Any, runs_dir: Path) -> RunFolder:
    """Finds a run by id, for callers that may not pass paths.

    Args:
        name: untrusted input.
        runs_dir: folder of run folders; a run in it takes precedence over a registered run of the same id.

    Raises:
        ConfigError: unless it is the id of exactly one run in `runs_dir`, or among the registered runs.
    """
    text = name if isinstance(name, str) else ""
    quoted = repr(shortened(text))
    if not 0 < len(text.encode(errors="replace")) <= 255 or not text.isprintable() or os.sep in text:
        raise ConfigError(f"{quoted} is not a run id; pick a run from the list of runs")
    local = RunFolder(runs_dir / text)
    try:
        if text not in (".", "..") and _is_run(local) and _is_inside(local.path, runs_dir):
            return local
    except (OSError, RuntimeError):
        pass  # a link that points to itself
    registered = [run for path in registered_runs() if path.name == text and _is_run(run := RunFolder(path))]
    if len(registered) == 1:
        return registered[0]
    problem = f"{quoted} is the name of {len(registered)} runs" if registered else f"there is no run {quoted}"
    raise ConfigError(f"{problem}; it may have been renamed or deleted: pick one from the list of runs")


def find_run(name: str, runs_dir: Path) -> RunFolder:
    """Finds a run by id or by the path of its folder.

    Args:
        name: a run id in `runs_dir`, the id of a registered run, or a path.
        runs_dir: folder of run folders.

    Raises:
        ConfigError: for an unknown run, a path with `..`, a folder without a run, or a link that points out of
            `runs_dir`.
    """
    quoted = repr(shortened(name))
    if not name.isprintable() or not name.strip():
        raise ConfigError(f"{quoted} is not a run; `tunesmith runs list` lists them")
    path = Path(os.path.expanduser(name))
    if ".." in path.parts:
        raise ConfigError(
            f"{quoted} is refused: the path of a run may not contain `..`; give its id, or the full path of its folder"
        )
    if len(path.parts) == 1 and not path.is_absolute() and os.sep not in name:
        return _find_by_id(name, quoted, runs_dir)
    run = RunFolder(path)
    if _is_run(run) and (not _is_lexically_in(run.path, runs_dir) or _is_inside(run.path, runs_dir)):
        return run
    problem = "points outside the runs folder" if _is_run(run) else "is not a run folder"
    raise ConfigError(f"{quoted} {problem}; `tunesmith runs list` lists the runs")


def _is_lexically_in(path: Path, folder: Path) -> bool:
    return path.is_relative_to(folder.absolute())


def _find_by_id(name: str, quoted: str, runs_dir: Path) -> RunFolder:
    run = RunFolder(runs_dir / name)
    try:
        # A link in the runs folder could lead to any folder: its target must be named by path.
        if _is_run(run) and not _is_inside(run.path, runs_dir):
            raise ConfigError(f"{quoted} points outside {runs_dir}; give the full path of the folder it points to")
    except OSError:
        pass  # e.g. a name longer than the file system allows
    known = list_runs(runs_dir)
    matches = [other for other in known if other.id == name]
    if len(matches) > 1:
        paths = " or ".join(shlex.quote(str(other.path)) for other in matches)
        raise ConfigError(f"{quoted} is the name of {len(matches)} runs; give the path of one: {paths}")
    if matches:
        return matches[0]
    similar = difflib.get_close_matches(name, [other.id for other in known], n=1, cutoff=0.5)
    hint = f"did you mean {similar[0]}?" if similar else "`tunesmith runs list` lists the runs"
    raise ConfigError(f"there is no run {quoted} in {runs_dir}; {hint}")


# -- state and settings ----------------------------------------------------------------------------------------------


def true_state(run: RunFolder) -> dict[str, Any]:
    """The state file, corrected by which processes are alive.

    A run marked live without a live process is `failed`. A run marked ended with a rank that is still exiting, and so
    still holds its GPU, is `stopping` (`running` if it finished by itself); this happens without a supervisor, when
    rank 0 writes the end state. Processes are identified by pid and start time on this host; the state of a run on
    another host is returned as it is, unless that was machine 0 of several and is lost. If a scheduler starts the run,
    that or its driver says whether it waits, runs or is gone.
    """
    state = run.read_state() or {"state": "failed", "cause": "it never started: there is no state file"}
    if (scheduled := scheduled_state(run, state)) is not None:
        return scheduled
    if state.get("host") != socket.gethostname():
        lost = lost_machine_0(run, state)  # pids of another host mean nothing here
        return {**state, "state": "failed", "cause": lost} if lost else state
    if state.get("state") in END_STATES and any(
        process.role == "rank" and _is_alive(process) for process in processes_in(state)
    ):
        return {**state, "state": "running" if state["state"] == "done" else "stopping"}
    while state.get("state") in LIVE_STATES and not _any_alive(state):
        newer = run.read_state() or {}
        if newer.get("updated_at") == state.get("updated_at"):
            ending = state.get("ending")  # left by rank 0 for a supervisor that died before publishing it
            return {
                **state,
                **(ending if isinstance(ending, dict) else {"state": "failed", "cause": _death_cause(run)}),
            }
        state = newer  # it ended properly between the two reads
    return state


def _death_cause(run: RunFolder) -> str:
    """Why the run died without a cause: an unwritable folder, a full disk, or what a rank noted."""
    with contextlib.suppress(OSError):
        if not os.access(run.path, os.W_OK):
            return f"{DIED}, and nothing can be written to {run.path}"
        if (free := shutil.disk_usage(run.path).free) < MIN_FREE_BYTES:
            return f"{DIED}, and the disk of {run.path} has {free:,} bytes free"
    return run.noted_failure() or DIED  # noted by a rank that never got its answer from rank 0


def _any_alive(state: dict[str, Any]) -> bool:
    return any(_is_alive(process) for process in processes_in(state))


def _is_alive(process: Process) -> bool:
    try:
        return process.alive()
    except (ValueError, OverflowError):
        return False  # an impossible pid, from a damaged file


def processes_in(state: dict[str, Any]) -> list[Process]:
    """The processes that a state lists, without malformed entries."""
    processes = []
    entries = state.get("processes")
    for entry in entries if isinstance(entries, list) else []:
        try:
            since = None if entry.get("since_boot") is None else float(entry["since_boot"])
            role, pid, started = str(entry["role"]), int(entry["pid"]), float(entry["started"])
            processes.append(Process(role, entry["rank"], pid, started, since))
        except (KeyError, TypeError, AttributeError, ValueError, OverflowError):
            continue
    return processes


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
    """The GPUs of the run, from its command line; empty on CPU."""
    try:
        return read_command_line(run.command.read_text(encoding="utf-8"))[0] if run.command.is_file() else []
    except (OSError, UnicodeDecodeError):
        return []


def world_size(run: RunFolder) -> int | None:
    """Number of processes of the run; None when its Accelerate file cannot be read."""
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


def sweep_of(run: RunFolder) -> dict[str, Any] | None:
    """The sweep that a run belongs to: `sweep`, `trial` and `seed`; None if it belongs to none."""
    document = read_json(run.sweep) or {}
    name, numbers = document.get("sweep"), [document.get(key) for key in ("trial", "seed")]
    is_name = isinstance(name, str) and name.isprintable() and os.sep not in name and 0 < len(name.strip(".")) < 256
    if not is_name or not all(type(number) is int and 0 <= number < 2**63 for number in numbers):
        return None
    return {"sweep": name, "trial": numbers[0], "seed": numbers[1]}


def metrics(run: RunFolder) -> Iterator[dict[str, Any]]:
    """The rows of `metrics.jsonl`, without a line that is still being written."""
    if not run.metrics.is_file():  # a pipe would block forever
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
    """Reads the complete lines added to a text file since the last call.

    Args:
        path: need not exist yet.
        offset: byte to begin at.
    """

    MAX_BYTES = 1_000_000

    def __init__(self, path: Path, offset: int = 0):
        self.path = path
        self.offset = offset

    def _read(self) -> bytes:
        try:
            if not self.path.is_file():  # a pipe would block forever
                return b""
            with open(self.path, "rb") as file:
                file.seek(self.offset)
                return file.read(self.MAX_BYTES)
        except OSError:
            return b""

    def lines(self) -> list[str]:
        """New complete lines, at most `MAX_BYTES` at a time; a longer line comes in pieces."""
        data = self._read()
        complete = data if len(data) == self.MAX_BYTES and b"\n" not in data else data[: data.rfind(b"\n") + 1]
        self.offset += len(complete)
        return complete.decode("utf-8", "replace").splitlines()

    def remainder(self) -> list[str]:
        """The text after the last line end: a line that its writer never finished."""
        data = self._read()
        self.offset += len(data)
        return data.decode("utf-8", "replace").splitlines()


def log_lines(run: RunFolder, follow: bool = False, poll: float = 0.3) -> Iterator[str]:
    """The lines of `log.txt`.

    Args:
        run: the run.
        follow: continue until the run has ended.
        poll: seconds between two reads.
    """
    tail = Tail(run.log)
    while True:
        ended = not follow or true_state(run)["state"] in END_STATES
        while lines := tail.lines():
            yield from lines
        if ended:
            yield from tail.remainder()
            return
        time.sleep(poll)


# -- stopping --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stopped:
    """Result of `stop_run`.

    Args:
        state: the true state at the end.
        already: the run had ended before.
        in_time: the run reached an end state before the timeout.
    """

    state: dict[str, Any]
    already: bool
    in_time: bool


def stop_run(run: RunFolder, timeout: float, poll: float = 0.2, save: bool = True) -> Stopped:
    """Asks the run to stop, and waits until it has.

    Args:
        run: the run.
        timeout: seconds to wait.
        save: save a checkpoint first.
        poll: seconds between two reads.
    """
    state = true_state(run)
    if state["state"] in END_STATES:
        return Stopped(state, already=True, in_time=True)
    if cancel_waiting(run):
        return Stopped(true_state(run), already=False, in_time=True)
    run.ask_stop(save)
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        state = true_state(run)
        if state["state"] in END_STATES and not _any_alive(state):
            return Stopped(state, already=False, in_time=True)
        time.sleep(poll)
    return Stopped(true_state(run), already=False, in_time=state["state"] in END_STATES)


def end_by_force(run: RunFolder, timeout: float = 15.0) -> Stopped:
    """Kills the launcher and the ranks of a run that did not stop when asked; its last checkpoint remains.

    Args:
        run: a run on this host.
        timeout: seconds its supervisor has to record the end before it is killed too.
    """
    if kill_job(run):
        return _after_kill(run, timeout)
    # Kill the supervisor last: it may still record how the run ended.
    for roles in (("launcher", "rank"), ("supervisor",)):
        alive = [process for process in processes_in(true_state(run)) if process.role in roles and _is_alive(process)]
        tree = {process for entry in alive for process in _with_children(entry.pid)}
        for process in tree:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(tree, timeout=timeout)
        deadline = time.monotonic() + timeout
        while _any_alive(state := true_state(run)) and time.monotonic() < deadline:
            time.sleep(0.1)
    _write_forced_end(run, state)
    state = true_state(run)
    return Stopped(state, already=False, in_time=state["state"] in END_STATES and not _any_alive(state))


def _after_kill(run: RunFolder, timeout: float) -> Stopped:
    """Waits until a scheduler has ended the job of a run, and writes its end."""
    deadline = time.monotonic() + timeout
    while (state := true_state(run))["state"] not in END_STATES and time.monotonic() < deadline:
        time.sleep(0.5)
    if ended := state["state"] in END_STATES:
        _write_forced_end(run, state)
    return Stopped(true_state(run), already=False, in_time=ended)


def _write_forced_end(run: RunFolder, state: dict[str, Any]) -> None:
    with contextlib.suppress(ConfigError), run.hold():  # nobody else writes its state any more
        if state.get("state") != "done":
            run.write_state(state="stopped", cause="ended by force; the last checkpoint remains", ending=None)


def _with_children(pid: int) -> list[psutil.Process]:
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.Error:
        return []
