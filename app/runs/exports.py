"""The exports of a run that its page has started, `tunesmith export` in the background: where they are, which one runs.

Each has a folder `exports/N`, so that it is renamed and deleted with the run. Its process holds the lock of the run's
exports until it ends, however it ends.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from app.runs.locks import is_locked, lock_file
from app.runs.work_folder import WorkFolder
from trainers.run.folder import RunFolder

FOLDER = "exports"


class ExportFolder(WorkFolder):
    """The work of one export. Its note also has `target`, the folder of the model when it began, and `options`."""

    note_name = "export.json"


def exports(run: RunFolder) -> list[ExportFolder]:
    """The exports of a run, newest first."""
    names: list[str] = []
    with contextlib.suppress(OSError):
        names = [name for name in os.listdir(run.path / FOLDER) if name.isascii() and name.isdigit() and len(name) < 10]
    return [ExportFolder(run.path / FOLDER / name) for name in sorted(names, key=int, reverse=True)]


def next_export(run: RunFolder) -> ExportFolder:
    """The folder of the next export; not created."""
    number = max((int(each.path.name) for each in exports(run)), default=0) + 1
    return ExportFolder(run.path / FOLDER / str(number))


def running_export(run: RunFolder) -> ExportFolder | None:
    """The export of a run that is running; only the newest can be."""
    return next(iter(exports(run)), None) if is_locked(_lock_of(run)) else None


def _lock_of(run: RunFolder) -> Path:
    return run.path / FOLDER / ".lock"


@contextlib.contextmanager
def lock_exports(run: RunFolder) -> Iterator[TextIO]:
    """Holds the lock on the exports of a run; a child that inherits the file holds it to its own end.

    Raises:
        ConfigError: if an export of the run is running, or the lock cannot be opened.
    """
    busy = f"an export of run {run.id} is running; wait for its end, or stop it on the run's page"
    with lock_file(_lock_of(run), busy) as file:
        yield file
