"""Records which files a run wrote into its folder, so that exports and `runs delete` touch no others. Imports no torch.

A run starts in a new or empty folder, so once the record exists, all files with fixed names belong to the run. The
files of exports vary, and each is recorded before it is written.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import stat
from collections.abc import Iterable
from pathlib import Path, PurePath

from trainers.config.mistakes import ConfigError
from trainers.run.unfinished import held_alone, remove_left, unfinished_name

RECORD = ".written.jsonl"
CHAT_TEMPLATE = "chat_template.json"
"""Holds the chat template that the run trains with, and the digest of the model's own."""
OBJECTIVE = "objective.py"
"""A copy of the file of one's own that defines the objective."""
MIX = "mix.yaml"
"""A copy of the mix of data, with absolute paths."""
EVALUATION = "evaluation.jsonl"
"""Holds what the model loses on each evaluation row, and its answers (`eval_only`)."""
ANSWERS = "answers.jsonl"
"""Holds the answers to the same prompts at several steps (`eval_generate_steps`)."""
START = "from_run.json"
"""Holds what the run started from, if that is the result of another run."""
TRACKERS = "trackers.json"
"""Holds the id of the run in each tracker, by the name of the tracker, and the id of the run that they belong to."""
FILES = frozenset({
    "config.yaml", "accelerate.yaml", "command.txt", "state.json", "metrics.jsonl", "log.txt", "stop", "save",
    "passed_over.json", CHAT_TEMPLATE, START, ".lock", "slurm.sh", "slurm.out", "scheduler.json", "ray.json",
    "sweep.json", RECORD, OBJECTIVE, MIX, EVALUATION,
    ANSWERS, TRACKERS,
})  # fmt: skip
"""The files that every run may write."""
ROLLOUTS = "rollouts"
"""Holds the newest answers that were sampled, one file per step."""
KEPT_STEPS = 100
"""Newest steps whose sampled answers a run keeps."""
SAMPLER = "sampler"
"""Holds the adapter that a server samples with, in a folder named by its digest."""
FOLDERS = ("heartbeat", "checkpoints", ROLLOUTS, SAMPLER)
MAX_BYTES = 10_000_000
_HEARTBEAT = re.compile(r"rank-\d+\.json|machine-\d+\.(json|lock)|out-of-memory\.json")
_ROLLOUT = re.compile(r"step-\d+\.json")
_SERVED = re.compile(r"[0-9a-f]{16}(\.tmp)?")
_SERVED_FILE = re.compile(r"adapter_config\.json|adapter_model\.safetensors|README\.md")
_CHECKPOINT = re.compile(r"(bad-|later-)?step-\d{8}")
_UNFINISHED = re.compile(r"step-\d{8}\.tmp-\w+")
_CHECKPOINT_FILE = re.compile(r"rank-\d{5}\.safetensors|manifest\.json")
_HALF_WRITTEN = re.compile(r"\.(.+)\.\d+\.[0-9a-f]{8}")
"""Temporary files of writers that were killed before renaming them: `.NAME.PID.RANDOM`."""


class RunRecord:
    """The record of the files that belong to a run.

    Args:
        folder: The run folder; need not exist yet.
    """

    def __init__(self, folder: Path):
        self.folder, self.path = folder, folder / RECORD

    def exists(self) -> bool:
        """Whether a run was started in this folder."""
        return self.path.is_file()

    def begin(self) -> None:
        """Marks the folder, which must be empty, as a run folder; idempotent."""
        with contextlib.suppress(FileExistsError):
            os.close(os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644))

    def enter(self, names: Iterable[str]) -> None:
        """Records paths relative to the folder, before they are written; a trailing `/` stands for a whole folder.

        Raises:
            FileNotFoundError: If there is no record: one made now would claim files that the run may not have written.
        """
        lines = "\n" + "".join(json.dumps(name) + "\n" for name in names)  # the previous line may be incomplete
        handle = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW)
        try:
            os.write(handle, lines.encode())
            os.fsync(handle)
        finally:
            os.close(handle)

    def entries(self) -> set[str]:
        """Returns the recorded paths; skips lines truncated by a crash, for which nothing was written."""
        if not self.path.is_file() or self.path.stat().st_size > MAX_BYTES:
            return set()
        names = []
        for line in self.path.read_bytes().splitlines():
            with contextlib.suppress(ValueError, RecursionError):
                names.append(json.loads(line))
        return {name for name in names if isinstance(name, str)}

    def foreign(self, name: str) -> str | None:
        """Returns the first path at or below `name` that this run did not write; None if there is none."""
        top, entries = self.folder / name, self.entries()
        if not os.path.lexists(top):
            return None
        if top.is_symlink() or not top.is_dir():
            return None if name in entries else name
        files = (Path(base, file).relative_to(self.folder) for base, file in _files_below(top))
        return next((str(path) for path in sorted(files) if not _is_entered(path, entries)), None)

    def temporary(self, name: str) -> Path:
        """Creates and records an empty folder next to `name`; removes those left by exports that were killed."""
        for entry in self.entries():
            if entry.startswith(f".{name}.") and entry.count("/") == 1 and entry.endswith("/"):
                remove_left(self.folder / entry)
        return self._new_folder(name)

    def _new_folder(self, name: str) -> Path:
        folder = self.folder / unfinished_name(name)
        self.enter([f"{folder.name}/"])
        folder.mkdir()
        return folder

    def exported_alone(self) -> contextlib.AbstractContextManager[None]:
        """Holds the lock of exports into the run's folder, on that of its checkpoints.

        Raises:
            ConfigError: If another process holds it.
        """
        problem = f"run {self.folder.name} is being exported by another process"
        return held_alone(self.folder / "checkpoints", f"{problem}; wait for its end, or name a folder with --output")

    def publish(self, temporary: Path, name: str) -> None:
        """Renames a folder to `name`, replacing what the run wrote there before.

        Raises:
            ConfigError: If anything there was not written by this run.
        """
        self.refuse_foreign(name)
        # Record the files first: after a crash in between, they still count as the run's own.
        target = self.folder / name
        files = (Path(base, file).relative_to(temporary) for base, file in _files_below(temporary))
        self.enter(f"{name}/{file}" for file in files)
        if not target.exists():
            os.replace(temporary, target)
            return
        old = self._new_folder(name)
        try:
            os.replace(target, old)
            os.replace(temporary, target)
        except BaseException:  # a signal in between
            if not target.exists():
                os.replace(old, target)
            raise
        shutil.rmtree(old, ignore_errors=True)

    def refuse_foreign(self, name: str) -> None:
        """Raises `ConfigError` if anything at or below `name` was not written by this run."""
        if (path := self.foreign(name)) is not None:
            raise ConfigError(
                f"{self.folder / path} was not written by this run, which exports to {name}; move it to another folder"
            )

    def remove_all(self) -> None:
        """Removes what the run wrote, the state file first and this record last; keeps folders that are not empty then.

        Raises:
            OSError: If something cannot be removed.
        """
        entries = self.entries()
        (self.folder / "state.json").unlink(missing_ok=True)
        for base, name in _files_below(self.folder):
            relative = Path(base, name).relative_to(self.folder)
            if str(relative) != RECORD and (_is_fixed(relative) or _is_entered(relative, entries)):
                os.unlink(Path(base, name))
        for base, _, _ in os.walk(self.folder, topdown=False):
            relative = Path(base).relative_to(self.folder)
            if relative.parts and _is_own_folder(relative, entries):
                with contextlib.suppress(OSError):  # it contains files of the user
                    os.rmdir(base)
        self.path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            os.rmdir(self.folder)


def refuse_irregular(folder: Path) -> None:
    """Raises `ConfigError` if a fixed name is a pipe, device or the like, on which readers and writers would hang."""
    for name in (*sorted(FILES), *FOLDERS):
        with contextlib.suppress(OSError):
            mode = os.stat(folder / name).st_mode
            if not (stat.S_ISDIR(mode) if name in FOLDERS else stat.S_ISREG(mode)):
                raise ConfigError(f"{folder / name} is not a regular file or folder; remove it")


def _files_below(folder: Path) -> list[tuple[str, str]]:
    """Returns parent and name of everything below that is not a folder; links to folders are included, not followed."""
    paths = []
    for base, folders, files in os.walk(folder):
        links = [name for name in folders if os.path.islink(os.path.join(base, name))]
        paths += [(base, name) for name in (*files, *links)]
    return paths


def _is_fixed(path: PurePath) -> bool:
    """Whether a file is one that every run may write, or the temporary file of one."""
    top, name = path.parts[0], path.name
    half = _HALF_WRITTEN.fullmatch(name)
    original = half[1] if half else name
    if len(path.parts) == 1:
        return original in FILES
    if top == "heartbeat":
        return len(path.parts) == 2 and bool(_HEARTBEAT.fullmatch(original))
    if top == ROLLOUTS:
        return len(path.parts) == 2 and bool(_ROLLOUT.fullmatch(original))
    if top == SAMPLER:
        return len(path.parts) == 3 and bool(_SERVED.fullmatch(path.parts[1]) and _SERVED_FILE.fullmatch(name))
    if top != "checkpoints":
        return False
    if _UNFINISHED.fullmatch(path.parts[1]):
        return True
    if not _CHECKPOINT.fullmatch(path.parts[1]):
        return False
    return len(path.parts) == 2 or (len(path.parts) == 3 and bool(_CHECKPOINT_FILE.fullmatch(original)))


def _is_entered(path: PurePath, entries: set[str]) -> bool:
    return str(path) in entries or any(f"{parent}/" in entries for parent in path.parents[:-1])


def _is_own_folder(path: PurePath, entries: set[str]) -> bool:
    """Whether a folder was made by the run."""
    if path.parts[0] == "checkpoints" and len(path.parts) > 1:
        return bool(_CHECKPOINT.fullmatch(path.parts[1]) or _UNFINISHED.fullmatch(path.parts[1]))
    if path.parts[0] == SAMPLER and len(path.parts) == 2:
        return bool(_SERVED.fullmatch(path.name))
    below = f"{path}/"
    return str(path) in FOLDERS or _is_entered(path / "x", entries) or any(entry.startswith(below) for entry in entries)
