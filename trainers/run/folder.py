"""The run folder: file names, run states, and atomic writes. Imports no torch."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import secrets
import shutil
import socket
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

import psutil

from trainers.config.mistakes import ConfigError, Mistake
from trainers.config.options import TrainConfig
from trainers.run.ending import Ending
from trainers.run.json_file import load_json
from trainers.run.log import log_line, secrets_in, without_secrets
from trainers.run.record import (
    ANSWERS,
    CHAT_TEMPLATE,
    EVALUATION,
    MIX,
    OBJECTIVE,
    ROLLOUTS,
    SAMPLER,
    START,
    TRACKERS,
    RunRecord,
    refuse_irregular,
)

__all__ = [
    "Process",
    "RunFolder",
    "log_line",
    "new_run_id",
    "now",
    "read_json",
    "secrets_in",
    "write_json",
]

LIVE_STATES = ("queued", "starting", "running", "stopping")
END_STATES = ("done", "stopped", "failed")
STOP_REQUEST = "a stop request"
"""What has stopped a run that its user has asked to."""
STATES = LIVE_STATES + END_STATES


def export_name(kind: str, averaged: bool = False) -> str:
    """Returns the name of an export in the run folder.

    Args:
        kind: `adapter`, `merged` or `full`.
        averaged: Whether it is the moving average of the weights.
    """
    return f"export-{kind}{'-ema' * averaged}"


def write_atomic(path: Path, text: str) -> None:
    """Replaces the content of `path` atomically: readers see the old file or the new one, never a partial one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    """Writes a JSON document atomically."""
    write_atomic(path, json.dumps(value, indent=1, ensure_ascii=False) + "\n")


def read_json(path: Path) -> dict[str, Any] | None:
    """Reads the JSON object in `path`; None if it is not a regular file, or contains no valid object."""
    try:
        value = load_json(path)
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def now() -> str:
    """Returns the UTC time in ISO 8601, with milliseconds."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def new_run_id(name: str, started: float, number: int) -> str:
    """Returns a run id such as `20261121-101530-tiny-lora-2c1`: time, name, and a number in hex.

    Args:
        name: Preset or model; characters that are not safe in a path are replaced.
        started: Start time in seconds since the epoch.
        number: Distinguishes runs started in the same second, e.g. the launcher's process id, from which all ranks
            derive the same id without communication.
    """
    word = re.sub(r"[^A-Za-z0-9._]+", "-", Path(name).name).strip("-.")[:40] or "run"
    stamp = datetime.fromtimestamp(started).strftime("%Y%m%d-%H%M%S")
    return f"{stamp}-{word}-{number:x}"


def folder_identity(path: Path) -> tuple[int, int] | None:
    """Returns device and inode, to detect that the folder at a path was replaced; None if there is none."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino


@dataclass(frozen=True)
class Process:
    """A process of a run; its start time distinguishes it from a later process with the same pid.

    Args:
        role: `supervisor`, `launcher` or `rank`.
        rank: Global rank; None for other roles.
        pid: Process id.
        started: Start time in seconds since the epoch; the system reports another value after the clock is adjusted.
        since_boot: Start time in seconds since boot, which does not depend on the clock; None if unknown.
    """

    role: str
    rank: int | None
    pid: int
    started: float
    since_boot: float | None = None

    @classmethod
    def of(cls, role: str, rank: int | None = None, pid: int | None = None) -> Process:
        """Describes the process `pid` (default: this one) in a role: `supervisor`, `launcher` or `rank`."""
        process = psutil.Process(pid)
        return cls(role, rank, process.pid, process.create_time(), _since_boot(process))

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def alive(self) -> bool:
        """Whether this process is still running.

        A zombie counts as running while it has other threads, which keep its files open after the main thread ended.
        """
        try:
            process = psutil.Process(self.pid)
            if self.since_boot is None:
                same = abs(process.create_time() - self.started) < 1.0
            else:
                same = abs(_since_boot(process) - self.since_boot) < 0.1
            return same and (process.status() != psutil.STATUS_ZOMBIE or process.num_threads() > 1)
        except psutil.Error:
            return False


def _since_boot(process: psutil.Process) -> float:
    return round(process.create_time() - psutil.boot_time(), 2)


class RunFolder:
    """Paths and state of one run.

    Args:
        path: the run folder; need not exist yet.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path).absolute()
        self.config = self.path / "config.yaml"
        self.accelerate = self.path / "accelerate.yaml"
        self.command = self.path / "command.txt"
        self.state_file = self.path / "state.json"
        self.heartbeats = self.path / "heartbeat"
        self.metrics = self.path / "metrics.jsonl"
        self.trackers = self.path / TRACKERS
        self.log = self.path / "log.txt"
        self.checkpoints = self.path / "checkpoints"
        self.model = self.path / "model"
        self.stop_request = self.path / "stop"
        self.save_request = self.path / "save"
        self.out_of_memory = self.heartbeats / "out-of-memory.json"
        self.skipped_steps = self.path / "passed_over.json"
        self.chat_template = self.path / CHAT_TEMPLATE
        self.objective = self.path / OBJECTIVE
        self.mix = self.path / MIX
        self.start = self.path / START
        self.rollouts = self.path / ROLLOUTS
        self.evaluation = self.path / EVALUATION
        self.answers = self.path / ANSWERS
        self.sampler = self.path / SAMPLER
        self.scheduler = self.path / "scheduler.json"
        self.ray = self.path / "ray.json"
        self.sweep = self.path / "sweep.json"
        self.lock = self.path / ".lock"
        self.record = RunRecord(self.path)
        self._identity: tuple[int, int] | None = None

    @property
    def id(self) -> str:
        return self.path.name

    def keep(self) -> None:
        """Remembers the identity of the current folder, so that nothing is written to another one at the same path."""
        self._identity = folder_identity(self.path)

    def lost(self) -> str | None:
        """Returns what happened to the folder since `keep`, such as `removed`; None if it is unchanged."""
        if self._identity is None or (current := folder_identity(self.path)) == self._identity:
            return None
        return "removed" if current is None else "replaced by another"

    def refuse_lost(self) -> None:
        """Raises `FileNotFoundError` if the folder was removed or replaced since `keep`."""
        if how := self.lost():
            raise FileNotFoundError(errno.ENOENT, f"the run folder was {how}", str(self.path))

    def exists(self) -> bool:
        """Whether the folder contains a run. A `state.json` is no proof, as other programs write one too."""
        return self.record.exists() and (self.state_file.exists() or self.config.exists())

    def create(self) -> None:
        """Creates the folder, its record and its fixed subfolders.

        Raises:
            ConfigError: If that is not possible, or the folder contains anything other than a run.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self.refuse_foreign()
            self.record.begin()  # first: other ranks refuse a folder that has files but no record
            self.heartbeats.mkdir(exist_ok=True)
            self.checkpoints.mkdir(exist_ok=True)
        except OSError as error:
            raise ConfigError.about(
                "output_dir", self.path, f"cannot be created: {error.strerror}", "choose another folder"
            ) from None

    def refuse_used(self) -> None:
        """Raises `ConfigError` if the folder contains other files, or a run, which may be resumed but not replaced."""
        self.refuse_foreign()
        if self.exists():
            raise ConfigError.about(
                "output_dir", self.path, "holds a run", "resume it with resume_from_checkpoint=auto, or use another"
            )

    def refuse_foreign(self) -> None:
        """Raises `ConfigError` if the folder contains no run but other files, or an export would replace such files."""
        try:
            names = sorted(os.listdir(self.path))
        except (FileNotFoundError, NotADirectoryError):
            return  # a new folder, or one that cannot be created
        if names and not self.record.exists():
            listed = ", ".join(name if len(name) <= 40 else f"{name[:39]}…" for name in names[:3])
            listed += f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise ConfigError.about(
                "output_dir", self.path, f"is not empty and holds no run: {listed}", "choose a new or empty folder"
            )
        refuse_irregular(self.path)
        self.record.refuse_foreign(self.model.name)

    def own_folder(self, name: str) -> None:
        """Records a folder that a library is about to create for this run; an existing one is not claimed."""
        if not (self.path / name).exists():
            self.record.enter([f"{name}/"])

    def mistakes_in(self, config: TrainConfig) -> list[Mistake]:
        """Returns a mistake if the base model is inside this folder, where the export would replace it."""
        base = os.path.expanduser(config.model_name_or_path)
        if not os.path.exists(base) or not Path(base).resolve().is_relative_to(self.path.resolve()):
            return []
        return [
            Mistake(
                "model_name_or_path",
                config.model_name_or_path,
                f"is inside output_dir={self.path}, to which the run exports",
                "name another output_dir",
            )
        ]

    def machine_file(self, machine: int) -> Path:
        """Returns the file through which a machine's supervisor reports to that of machine 0."""
        return self.heartbeats / f"machine-{machine}.json"

    def hold(self, machine: int = 0) -> TextIO:
        """Marks the run as live for as long as the returned file is open.

        Args:
            machine: In a multi-machine run, the machine that this process supervises.

        Raises:
            ConfigError: If another process holds the lock, or a file of the run is a pipe or the like.
        """
        refuse_irregular(self.path)
        path = self.heartbeats / f"machine-{machine}.lock" if machine else self.lock
        file = open(path, "a", encoding="utf-8")  # noqa: SIM115 - held open on purpose; empties no file behind a link
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.close()
            where = f" on machine {machine}; give each machine a --machine_rank of its own, or" if machine else ";"
            raise ConfigError(f"run {self.id} is already running{where} watch it with `tunesmith runs logs`") from None
        return file

    def note_failure(self, rank: int, cause: str) -> None:
        """Records why a rank other than 0 failed; rank 0 copies it into the state file."""
        path = self.heartbeats / f"rank-{rank}.json"
        self._write_note(path, rank=rank, section="failed", cause=without_secrets(cause))

    def note_out_of_memory(self, rank: int) -> None:
        """Records that a rank ran out of memory, and in which section, as a smaller batch may fit."""
        beat = read_json(self.heartbeats / f"rank-{rank}.json") or {}
        self._write_note(self.out_of_memory, rank=rank, section=beat.get("section"))

    def _write_note(self, path: Path, **facts: Any) -> None:
        with contextlib.suppress(FileNotFoundError):  # the run folder was removed: do not recreate it
            self.refuse_lost()
            write_json(path, {**facts, "time": now()})

    def noted_failure(self) -> str | None:
        """Returns what `note_failure` recorded, with the rank; None if there is no failure."""
        notes = (read_json(path) or {} for path in sorted(self.heartbeats.glob("rank-*.json")))
        return next(
            (f"rank {note['rank']}: {note['cause']}" for note in notes if note.get("section") == "failed"), None
        )

    def read_state(self) -> dict[str, Any] | None:
        """Returns the content of the state file, without validation; None if there is none."""
        return read_json(self.state_file)

    def write_state(self, **changes: Any) -> dict[str, Any]:
        """Replaces the given keys of the state file; only the run's single writer may call this."""
        fresh: dict[str, Any] = {
            "id": self.id, "state": "starting", "cause": None, "step": 0, "total_steps": None, "attempt": 0,
            "host": socket.gethostname(), "processes": [], "started_at": now(), "updated_at": now(),
            "export_dir": None,
        }  # fmt: skip
        merged = {**fresh, **(self.read_state() or {}), **changes, "updated_at": now()}
        state = {key: value for key, value in merged.items() if key in fresh or value is not None}
        if state["state"] not in STATES:
            raise AssertionError(f"no such state: {state['state']}")
        self.refuse_lost()
        write_json(self.state_file, state)
        return state

    def end(self, ending: Ending, by_supervisor: bool) -> None:
        """Writes how the run ended; called on rank 0.

        With a supervisor, this only sets the key `ending`, which the supervisor publishes once all processes have ended
        and the GPUs are free. Until then, the state becomes `stopping`, unless the run completed by itself.

        Args:
            ending: The outcome; secrets in its cause are redacted.
            by_supervisor: Whether a supervisor started the run; if it has died, the ending is published here.
        """
        ending = replace(ending, cause=ending.cause and without_secrets(ending.cause))
        if not by_supervisor or not any(
            process.role == "supervisor" and process.alive() for process in self.processes()
        ):
            self.write_state(**ending.published())
        elif ending.state == "done":
            self.write_state(ending=ending.as_json())
        else:
            self.write_state(state="stopping", ending=ending.as_json())

    def processes(self) -> list[Process]:
        """Returns the processes listed in the state file."""
        entries = (self.read_state() or {}).get("processes") or []
        return [Process(**entry) for entry in entries]

    def ask_stop(self, save: bool = True, source: str = STOP_REQUEST) -> None:
        """Requests that the ranks stop at the next step; idempotent.

        Args:
            save: Whether to save a checkpoint first; False also overrides an earlier request that would save.
            source: What has stopped the run, as its cause then says.
        """
        if save and self.stop_request.exists():
            return  # keep an earlier request, which may be one without saving
        self.refuse_lost()
        write_json(self.stop_request, {"save": save, "time": now(), "source": source})

    def stop_asked(self) -> bool | None:
        """Returns whether a requested stop saves first; None if no stop is requested."""
        if not self.stop_request.exists():
            return None
        return (read_json(self.stop_request) or {}).get("save") is not False

    def stop_source(self) -> str:
        """What has requested a stop."""
        source = (read_json(self.stop_request) or {}).get("source")
        return source if isinstance(source, str) else STOP_REQUEST

    def forget_last_attempt(self) -> None:
        """Removes the heartbeats and notes of the previous attempt's ranks."""
        for old in (*self.heartbeats.glob("rank-*.json"), self.out_of_memory):
            old.unlink(missing_ok=True)

    def remove_unfinished(self) -> None:
        """Removes checkpoints left incomplete by a killed attempt; no process of the run may be alive."""
        for path in self.checkpoints.glob("step-*.tmp-*"):
            shutil.rmtree(path, ignore_errors=True)

    def remove_served(self) -> None:
        """Removes the adapters that were exported for a server that samples."""
        for path in self.sampler.glob("[0-9a-f]" * 16 + "*"):
            shutil.rmtree(path, ignore_errors=True)
        with contextlib.suppress(OSError):  # it does not exist, or holds files of the user
            self.sampler.rmdir()

    def write_skipped_steps(self, steps: list[int]) -> None:
        """Records the steps (from 1) whose batches the next attempt must not train on."""
        self.refuse_lost()
        write_json(self.skipped_steps, {"steps": steps})

    def read_skipped_steps(self) -> list[int]:
        """Returns what `write_skipped_steps` recorded; empty if nothing was."""
        steps = (read_json(self.skipped_steps) or {}).get("steps")
        return [step for step in steps if isinstance(step, int)] if isinstance(steps, list) else []

    def ask_save(self) -> None:
        """Requests that the ranks save at the next step and continue; idempotent until that step."""
        self.refuse_lost()
        write_json(self.save_request, {"time": now()})

    def take_save_request(self) -> bool:
        """Returns whether a save was requested since the last call, and clears the request; for rank 0 only."""
        requested = self.save_request.exists() and not self.lost()
        if requested:
            self.save_request.unlink(missing_ok=True)
        return requested


def state_folder() -> Path:
    """Returns Tunesmith's folder in the user's state folder: locks, queue, and the registry of runs."""
    home = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(home).expanduser().absolute() / "tunesmith"


def cache_folder() -> Path:
    """Returns Tunesmith's folder in the user's cache folder: what can be computed again."""
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(home).expanduser().absolute() / "tunesmith"


def registry() -> Path:
    """Returns the folder with a small file for each registered run, such as runs outside `runs_dir`."""
    return state_folder() / "runs"


def register_outside(run: RunFolder, runs_dir: str | Path) -> None:
    """Registers a run folder that is not in `runs_dir`, so that lists find it."""
    if run.path.resolve().parent != Path(runs_dir).expanduser().resolve():
        register(run)


def register(run: RunFolder) -> None:
    """Registers a run folder, so that lists find it wherever it is."""
    try:
        registry().mkdir(parents=True, exist_ok=True)
        write_json(_note_of(run), {"run_dir": str(run.path.resolve())})
    except OSError:
        return  # better an unlisted run than no run


def _note_of(run: RunFolder) -> Path:
    return registry() / f"{hashlib.sha256(str(run.path.resolve()).encode()).hexdigest()[:24]}.json"


def unregister(run: RunFolder) -> bool:
    """Unregisters a run folder; returns whether it was registered."""
    noted = _note_of(run).exists()
    _note_of(run).unlink(missing_ok=True)
    return noted


def registered_runs() -> list[Path]:
    """Returns the registered run folders that still exist."""
    entries = (read_json(path) or {} for path in sorted(registry().glob("*.json")))
    paths = [Path(str(entry["run_dir"])) for entry in entries if entry.get("run_dir")]
    return [path for path in paths if path.is_dir()]
