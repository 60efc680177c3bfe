"""The run folder: its names, its states, and writers that never leave half a file. Imports no torch."""

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
from trainers.run.record import CHAT_TEMPLATE, RunRecord, not_regular

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
STATES = LIVE_STATES + END_STATES


def write_atomic(path: Path, text: str) -> None:
    """Replaces `path` by `text` in one step: a reader sees the old file or the new one, never a part."""
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
    """`write_atomic` of one JSON document."""
    write_atomic(path, json.dumps(value, indent=1, ensure_ascii=False) + "\n")


def read_json(path: Path) -> dict[str, Any] | None:
    """The JSON object in `path`; None when there is not a regular file or no whole object in it."""
    try:
        value = load_json(path)
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def now() -> str:
    """UTC time as ISO 8601 with milliseconds."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def new_run_id(name: str, started: float, number: int) -> str:
    """`20261121-101530-tiny-lora-2s1`: time, name, and a number that tells apart two runs of one second.

    Args:
        name: preset or model; what a path cannot hold is taken out.
        started: seconds since the epoch.
        number: e.g. the process id of the launcher, so that all ranks derive the same id alone.
    """
    word = re.sub(r"[^A-Za-z0-9._]+", "-", Path(name).name).strip("-.")[:40] or "run"
    stamp = datetime.fromtimestamp(started).strftime("%Y%m%d-%H%M%S")
    return f"{stamp}-{word}-{number:x}"


def folder_identity(path: Path) -> tuple[int, int] | None:
    """What tells a folder from another one at its path: device and inode; None when none is there."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino


@dataclass(frozen=True)
class Process:
    """A process of a run, told apart from a later one of the same pid by its start time.

    Args:
        role: supervisor, launcher or rank.
        rank: global rank; None for the others.
        pid: its process id.
        started: seconds since the epoch. When the system's clock is set, the system tells another time for it.
        since_boot: seconds from the machine's start to its own, which no clock changes; None where that is not known.
    """

    role: str
    rank: int | None
    pid: int
    started: float
    since_boot: float | None = None

    @classmethod
    def of(cls, role: str, rank: int | None = None, pid: int | None = None) -> Process:
        """The process `pid` (default: this one) in a role: supervisor, launcher or rank."""
        process = psutil.Process(pid)
        return cls(role, rank, process.pid, process.create_time(), _since_boot(process))

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def alive(self) -> bool:
        """Whether that very process still runs.

        A zombie does not, unless threads of it are left: its main thread may be gone first, and they hold its files.
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
        self.log = self.path / "log.txt"
        self.checkpoints = self.path / "checkpoints"
        self.model = self.path / "model"
        self.stop_request = self.path / "stop"
        self.save_request = self.path / "save"
        self.out_of_memory = self.heartbeats / "out-of-memory.json"
        self.skipped_steps = self.path / "passed_over.json"
        self.chat_template = self.path / CHAT_TEMPLATE
        self.lock = self.path / ".lock"
        self.record = RunRecord(self.path)
        self._identity: tuple[int, int] | None = None

    @property
    def id(self) -> str:
        return self.path.name

    def keep(self) -> None:
        """Takes the folder that is here now for this run's: nothing is written into another one at its path."""
        self._identity = folder_identity(self.path)

    def lost(self) -> str | None:
        """What became of the folder that was kept, such as `removed`; None while it is here."""
        if self._identity is None or (current := folder_identity(self.path)) == self._identity:
            return None
        return "removed" if current is None else "replaced by another"

    def refuse_lost(self) -> None:
        """Raises FileNotFoundError when the folder that was kept is no longer here."""
        if how := self.lost():
            raise FileNotFoundError(errno.ENOENT, f"the run folder was {how}", str(self.path))

    def exists(self) -> bool:
        """Whether a run is here."""
        return self._began() and (self.state_file.exists() or self.config.exists())

    def _began(self) -> bool:
        """Whether a run made this folder its own."""
        return self.record.exists() or (self.read_state() or {}).get("state") in STATES

    def create(self) -> None:
        """Makes the folder, its record and its fixed subfolders.

        Raises:
            ConfigError: when that is not possible, or the folder holds something else than a run.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self.refuse_foreign()
            self.record.begin()  # before anything else: other ranks take a folder that has none for a stranger's
            self.heartbeats.mkdir(exist_ok=True)
            self.checkpoints.mkdir(exist_ok=True)
        except OSError as error:
            raise ConfigError.about(
                "output_dir", self.path, f"cannot be created: {error.strerror}", "choose another folder"
            ) from None

    def refuse_used(self) -> None:
        """Raises ConfigError when a run is here already, which must be resumed and not written over, or other files."""
        self.refuse_foreign()
        if self.exists():
            raise ConfigError.about(
                "output_dir", self.path, "holds a run", "resume it with resume_from_checkpoint=auto, or use another"
            )

    def refuse_foreign(self) -> None:
        """Raises ConfigError for a folder of the user's own, or one where an export would replace files of theirs."""
        try:
            names = sorted(os.listdir(self.path))
        except (FileNotFoundError, NotADirectoryError):
            return  # a new folder, or one that cannot be made
        if names and not self._began():
            listed = ", ".join(name if len(name) <= 40 else f"{name[:39]}…" for name in names[:3])
            listed += f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise ConfigError.about(
                "output_dir", self.path, f"is not empty and holds no run: {listed}", "choose a new or empty folder"
            )
        if name := not_regular(self.path):
            raise ConfigError(f"{self.path / name} is not a regular file or folder; remove it")
        self.record.refuse_foreign(self.model.name)

    def own_folder(self, name: str) -> None:
        """Enters a folder that a library is about to make for this run; one that is there already stays whose it is."""
        if not (self.path / name).exists():
            self.record.enter([f"{name}/"])

    def mistakes_in(self, config: TrainConfig) -> list[Mistake]:
        """A line when the base model lies in this folder, where the export would replace it."""
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
        """Where the supervisor of a machine other than 0 leaves word for that of machine 0."""
        return self.heartbeats / f"machine-{machine}.json"

    def hold(self, machine: int = 0) -> TextIO:
        """Marks the run as live for as long as the returned file is open.

        Args:
            machine: in a run over several machines, the one that this process supervises.

        Raises:
            ConfigError: when another process holds it.
        """
        path = self.heartbeats / f"machine-{machine}.lock" if machine else self.lock
        file = open(path, "w", encoding="utf-8")  # noqa: SIM115 - held open on purpose
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.close()
            where = f" on machine {machine}" if machine else ""
            raise ConfigError(f"run {self.id} is already running{where}; watch it with `tunesmith runs logs`") from None
        return file

    def note_failure(self, rank: int, cause: str) -> None:
        """Records why a non-zero rank failed; rank 0 copies it into the state file."""
        path = self.heartbeats / f"rank-{rank}.json"
        self._write_note(path, rank=rank, section="failed", cause=without_secrets(cause))

    def note_out_of_memory(self, rank: int) -> None:
        """Records that memory ran out on a rank, and in which section: a smaller batch may fit."""
        beat = read_json(self.heartbeats / f"rank-{rank}.json") or {}
        self._write_note(self.out_of_memory, rank=rank, section=beat.get("section"))

    def _write_note(self, path: Path, **facts: Any) -> None:
        with contextlib.suppress(FileNotFoundError):  # the run folder was removed, and is not to come back
            self.refuse_lost()
            write_json(path, {**facts, "time": now()})

    def noted_failure(self) -> str | None:
        """What `note_failure` recorded, with the rank that failed; None without one."""
        notes = (read_json(path) or {} for path in sorted(self.heartbeats.glob("rank-*.json")))
        return next(
            (f"rank {note['rank']}: {note['cause']}" for note in notes if note.get("section") == "failed"), None
        )

    def read_state(self) -> dict[str, Any] | None:
        """What the state file says, unchecked; None when there is none."""
        return read_json(self.state_file)

    def write_state(self, **changes: Any) -> dict[str, Any]:
        """Replaces the given keys of the state file. Only the run's one writer may call this."""
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
        """Writes how the run ended, on its rank 0.

        A supervisor publishes it once no process lives and the GPUs are free: till then it is the key `ending`, and a
        run that came to its end by itself is not said to be stopping.

        Args:
            ending: its cause is written without secrets.
            by_supervisor: whether the run was started by one; when that is dead, the end is published here.
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
        """The processes that the state file names."""
        entries = (self.read_state() or {}).get("processes") or []
        return [Process(**entry) for entry in entries]

    def ask_stop(self, save: bool = True) -> None:
        """Asks the ranks to stop at the next step; asking twice is the same.

        Args:
            save: save a checkpoint there first; False also takes back a request that would save.
        """
        if save and self.stop_request.exists():
            return  # an earlier request may be one without saving
        self.refuse_lost()
        write_json(self.stop_request, {"save": save, "time": now()})

    def stop_asked(self) -> bool | None:
        """None when no stop is asked for; else whether it saves first."""
        if not self.stop_request.exists():
            return None
        return (read_json(self.stop_request) or {}).get("save") is not False

    def forget_last_attempt(self) -> None:
        """Removes what the ranks of the attempt before left word of."""
        for old in (*self.heartbeats.glob("rank-*.json"), self.out_of_memory):
            old.unlink(missing_ok=True)

    def remove_unfinished(self) -> None:
        """Removes the checkpoints that a killed attempt had begun; no process of the run may live."""
        for path in self.checkpoints.glob("step-*.tmp-*"):
            shutil.rmtree(path, ignore_errors=True)

    def write_skipped_steps(self, steps: list[int]) -> None:
        """Records the steps (from 1) whose batches the next attempt must not train on."""
        self.refuse_lost()
        write_json(self.skipped_steps, {"steps": steps})

    def read_skipped_steps(self) -> list[int]:
        """What `write_skipped_steps` recorded; empty without a record."""
        steps = (read_json(self.skipped_steps) or {}).get("steps")
        return [step for step in steps if isinstance(step, int)] if isinstance(steps, list) else []

    def ask_save(self) -> None:
        """Asks the ranks to save at the next step and go on; asking twice before that is the same."""
        self.refuse_lost()
        write_json(self.save_request, {"time": now()})

    def take_save_request(self) -> bool:
        """Whether a save was asked for since the last look. For rank 0 alone."""
        requested = self.save_request.exists() and not self.lost()
        if requested:
            self.save_request.unlink(missing_ok=True)
        return requested


def state_folder() -> Path:
    """Tunesmith's folder in the user's state folder: locks, queue, and notes of runs outside their `runs_dir`."""
    home = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(home).expanduser().absolute() / "tunesmith"


def registry() -> Path:
    """Folder with one small file for each run outside its `runs_dir`."""
    return state_folder() / "runs"


def register_outside(run: RunFolder, runs_dir: str | Path) -> None:
    """Notes a run folder that is not in `runs_dir`, so that lists find it; one inside needs no note."""
    if run.path.resolve().parent != Path(runs_dir).expanduser().resolve():
        register(run)


def register(run: RunFolder) -> None:
    """Notes a run folder, so that lists find it wherever it is."""
    try:
        registry().mkdir(parents=True, exist_ok=True)
        write_json(_note_of(run), {"run_dir": str(run.path.resolve())})
    except OSError:
        return  # a run that lists do not find is better than no run


def _note_of(run: RunFolder) -> Path:
    return registry() / f"{hashlib.sha256(str(run.path.resolve()).encode()).hexdigest()[:24]}.json"


def unregister(run: RunFolder) -> bool:
    """Takes back what `register_outside` noted; tells whether there was a note."""
    noted = _note_of(run).exists()
    _note_of(run).unlink(missing_ok=True)
    return noted


def registered_runs() -> list[Path]:
    """The noted run folders that are still there."""
    entries = (read_json(path) or {} for path in sorted(registry().glob("*.json")))
    paths = [Path(str(entry["run_dir"])) for entry in entries if entry.get("run_dir")]
    return [path for path in paths if path.is_dir()]
