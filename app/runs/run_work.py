"""Background work on a run that is kept in its folder, such as proofs: `proofs/N` is renamed and deleted with it.

The process of such work holds the lock of its kind until it ends, however it ends: what was killed is not running.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Generic, TextIO, TypeVar

from app.runs.locks import is_locked, lock_file
from app.runs.work_folder import WorkFolder
from trainers.run.folder import RunFolder

Work = TypeVar("Work", bound=WorkFolder)


class RunWork(Generic[Work]):
    """All work of one kind on runs.

    Args:
        folder: name of the folder in the run's, with a folder for each piece of work.
        kind: its class.
        noun: what it is called, with its article.
    """

    def __init__(self, folder: str, kind: type[Work], noun: str):
        self.folder, self.kind, self.noun = folder, kind, noun

    def of(self, run: RunFolder) -> list[Work]:
        """The work on a run, newest first."""
        names: list[str] = []
        with contextlib.suppress(OSError):
            names = [
                name for name in os.listdir(run.path / self.folder)
                if name.isascii() and name.isdigit() and len(name) < 10
            ]  # fmt: skip
        return [self.kind(run.path / self.folder / name) for name in sorted(names, key=int, reverse=True)]

    def following(self, run: RunFolder) -> Work:
        """The folder of the next work on a run; not created."""
        number = max((int(work.path.name) for work in self.of(run)), default=0) + 1
        return self.kind(run.path / self.folder / str(number))

    def running(self, run: RunFolder) -> Work | None:
        """The work on a run that is running; only the newest can be."""
        return next(iter(self.of(run)), None) if is_locked(self._lock(run)) else None

    @contextlib.contextmanager
    def lock(self, run: RunFolder) -> Iterator[TextIO]:
        """Holds the lock on the work on a run; a child that inherits the file holds it to its own end.

        Raises:
            ConfigError: if such work is running, or the lock cannot be opened.
        """
        busy = f"{self.noun} of run {run.id} is running; wait for its end, or stop it on the run's page"
        with lock_file(self._lock(run), busy) as file:
            yield file

    def _lock(self, run: RunFolder) -> Path:
        return run.path / self.folder / ".lock"
