"""The proofs of a run, `tunesmith prove` on its own config and strategy: where they are, and which one is running.

Each has a folder `proofs/N`, so that it is renamed and deleted with the run. Its process holds the lock of the run's
proofs until it ends, however it ends: a proof that was killed is not running.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from app.runs.locks import is_locked, lock_file
from app.runs.work_folder import WorkFolder, read_object
from trainers.run.folder import RunFolder

FOLDER = "proofs"


class ProofFolder(WorkFolder):
    """One proof. Its note also has `control`."""

    note_name = "proof.json"

    @property
    def number(self) -> int:
        """Its place among the proofs of the run, from 1."""
        return int(self.path.name)

    @property
    def report(self) -> Path:
        """The folder that `prove` writes."""
        return self.path / "report"

    def document(self) -> dict[str, Any]:
        """The JSON document of `prove` so far, without validation; {} if missing."""
        return read_object(self.report / "report.json")


def proofs(run: RunFolder) -> list[ProofFolder]:
    """The proofs of a run, newest first."""
    names: list[str] = []
    with contextlib.suppress(OSError):
        names = [name for name in os.listdir(run.path / FOLDER) if name.isascii() and name.isdigit() and len(name) < 10]
    return [ProofFolder(run.path / FOLDER / name) for name in sorted(names, key=int, reverse=True)]


def next_proof(run: RunFolder) -> ProofFolder:
    """The folder of the next proof; not created."""
    number = max((proof.number for proof in proofs(run)), default=0) + 1
    return ProofFolder(run.path / FOLDER / str(number))


def running_proof(run: RunFolder) -> ProofFolder | None:
    """The proof of a run that is running; only the newest can be."""
    return next(iter(proofs(run)), None) if is_locked(_lock_of(run)) else None


def _lock_of(run: RunFolder) -> Path:
    return run.path / FOLDER / ".lock"


@contextlib.contextmanager
def lock_proofs(run: RunFolder) -> Iterator[TextIO]:
    """Holds the lock on the proofs of a run; a child that inherits the file holds it to its own end.

    Raises:
        ConfigError: if a proof of the run is running, or the lock cannot be opened.
    """
    busy = f"a proof of run {run.id} is running; wait for its end, or stop it on the run's page"
    with lock_file(_lock_of(run), busy) as file:
        yield file
