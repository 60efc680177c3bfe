"""The folders of `tunesmith eval`: where they are, which one is running, and what they hold.

The process of an evaluation holds the lock of its folder until it ends, however it ends: one that was killed is not
running. Its report may be of another version, damaged, or far too large for a page.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from app.runs.locks import is_locked, lock_file
from app.runs.safe_read import read_span
from app.runs.work_folder import WorkFolder
from trainers.config.mistakes import ConfigError
from trainers.run.folder import Process, RunFolder, now
from trainers.run.json_file import parse_json

PREFIX = "eval-"
_LOCK = ".lock"
SAMPLES = "forgetting"
"""Folder of the runs on samples for forgetting."""
MAX_REPORT_BYTES = 4 << 20
"""Bytes of a report that are read."""
_MAX_ENTRIES = 2000
"""Entries of a list of a report that are read."""
_MAX_OUTPUT_BYTES = 1 << 16
_RUN = re.compile(r"(\d{1,6})-.*", re.ASCII | re.DOTALL)


class EvaluationFolder(WorkFolder):
    """The folder of one evaluation. Its note also has `models` and `command`."""

    note_name = "evaluation.json"

    @property
    def id(self) -> str:
        """Its name, such as `eval-20261128-184509-2-models-1a2b`."""
        return self.path.name

    @property
    def report(self) -> Path:
        """The JSON document of the comparison, written at the end."""
        return self.path / "report.json"

    @property
    def lock(self) -> Path:
        """Locked while it is evaluated."""
        return self.path / _LOCK

    def is_running(self) -> bool:
        """Whether it is evaluated now; a process that has just started has no lock yet."""
        return is_locked(self.lock) or self.process() is not None

    def runs(self) -> list[RunFolder]:
        """The run of each model so far, in the order in which they are evaluated."""
        return _runs_in(self.path)

    def runs_of_samples(self, run: RunFolder) -> list[RunFolder]:
        """The runs of a model on samples for forgetting so far.

        Args:
            run: the model's run, one of `runs`.
        """
        return [of_sample for of_sample in _runs_in(self.path / SAMPLES) if of_sample.id.startswith(f"{run.id}-")]

    def document(self) -> tuple[dict[str, Any], bool]:
        """The report, without validation, and whether all of it was read; ({}, True) if there is none."""
        data, size = read_span(self.report, 0, MAX_REPORT_BYTES)
        if size <= MAX_REPORT_BYTES:
            with contextlib.suppress(ValueError):
                value = parse_json(data)
                return (value, True) if isinstance(value, dict) else ({}, size == 0)
        return beginning_of(data.decode("utf-8", "ignore")), size == 0

    def end_of_output(self) -> str:
        """The end of what it printed."""
        _, size = read_span(self.output, 0, 0)
        return read_span(self.output, max(0, size - _MAX_OUTPUT_BYTES), _MAX_OUTPUT_BYTES)[0].decode("utf-8", "replace")


def _runs_in(path: Path) -> list[RunFolder]:
    """The run folders whose names begin with a number, by that number."""
    names: list[tuple[int, str]] = []
    with contextlib.suppress(OSError):
        names = [(int(match[1]), name) for name in os.listdir(path) if (match := _RUN.fullmatch(name))]
    return [run for _, name in sorted(names) if (run := RunFolder(path / name)).state_file.exists()]


def tasks_file(run: RunFolder) -> Path:
    """The results of tasks of lm-evaluation-harness of a model, beside its run."""
    return run.path.with_name(f"{run.id}-tasks.json")


@contextlib.contextmanager
def held(folder: EvaluationFolder, models: Sequence[str], command: Sequence[str]) -> Iterator[None]:
    """Holds the folder of an evaluation, which is made if missing, for the process that evaluates.

    Args:
        folder: the folder.
        models: the names of the models, in the order in which they are evaluated.
        command: the command line.

    Raises:
        ConfigError: if it holds another evaluation, or cannot be written.
    """
    with contextlib.ExitStack() as stack:
        try:
            folder.path.mkdir(parents=True, exist_ok=True)
            if {*os.listdir(folder.path)} - {_LOCK, folder.note_name, folder.output.name}:
                raise ConfigError.about("output_dir", folder.path, "holds other files", "name a new folder")
            busy = f"output_dir={folder.path} holds an evaluation that is running; name a new folder"
            stack.enter_context(lock_file(folder.lock, busy))
            own = {"models": list(models), "command": list(command), "started_at": now()}
            process = {"host": socket.gethostname(), "processes": [Process.of("eval").as_json()]}
            folder.write_note({**own, **folder.note(), **process})  # who has started it may have written one before
        except OSError as error:
            problem = f"cannot be written: {error.strerror}"
            raise ConfigError.about("output_dir", folder.path, problem, "name another folder") from None
        yield


def evaluations(runs_dir: Path) -> list[EvaluationFolder]:
    """The evaluations in a folder of runs, newest first."""
    names: list[str] = []
    with contextlib.suppress(OSError), os.scandir(runs_dir) as entries:
        names = [entry.name for entry in entries
                 if entry.name.startswith(PREFIX) and entry.is_dir(follow_symlinks=False)]  # fmt: skip
    return [EvaluationFolder(runs_dir / name) for name in sorted(names, reverse=True)]


def evaluation_of_id(name: Any, runs_dir: Path) -> EvaluationFolder:
    """Finds an evaluation by the name of its folder.

    Args:
        name: untrusted input.
        runs_dir: folder of runs.

    Raises:
        ConfigError: unless there is such a folder, which is no link.
    """
    text = name if isinstance(name, str) and name.isprintable() else ""
    if text.startswith(PREFIX) and len(text.encode(errors="replace")) <= 255 and os.sep not in text:
        folder = EvaluationFolder(runs_dir / text)
        if folder.path.is_dir() and not folder.path.is_symlink():
            return folder
    raise ConfigError("there is no such evaluation; it may have been deleted: pick one from the list")


def beginning_of(text: str) -> dict[str, Any]:
    """The parts of a JSON object of which only the beginning is there; of a list, its first entries."""
    decoder, part = json.JSONDecoder(), dict[str, Any]()
    at = _after(text, 0, "{")
    with contextlib.suppress(ValueError, RecursionError):
        while True:
            key, at = decoder.raw_decode(text, _after(text, at, ","))
            at = _after(text, at, ":")
            if text[at : at + 1] != "[":
                part[key], at = decoder.raw_decode(text, at)
                continue
            part[key] = entries = list[Any]()
            at = _after(text, at, "[")
            while text[at : at + 1] != "]" and len(entries) < _MAX_ENTRIES:
                entry, at = decoder.raw_decode(text, at)
                entries.append(entry)
                at = _after(text, at, ",")
            if len(entries) >= _MAX_ENTRIES:
                break  # the parts behind a list that is too long to be read
            at = _after(text, at, "]")
    return part


def _after(text: str, at: int, sign: str) -> int:
    """The position behind white space and, if it is there, a sign."""
    space = re.compile(r"\s*")
    at = space.match(text, at).end()  # type: ignore[union-attr]
    return space.match(text, at + 1).end() if text[at : at + 1] == sign else at  # type: ignore[union-attr]
