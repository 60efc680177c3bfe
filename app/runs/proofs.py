"""The proofs of a run, `tunesmith prove` on its own config and strategy: where they are, and which one is running.

Each has a folder `proofs/N`, so that it is renamed and deleted with the run. Its process holds the lock of the run's
proofs until it ends, however it ends: a proof that was killed is not running.
"""

from __future__ import annotations

import contextlib
import functools
import os
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from app.runs.locks import is_locked, lock_file
from app.runs.runs import processes_in
from app.runs.safe_read import Stamp, read_span, stamp
from trainers.run.folder import Process, RunFolder, write_json
from trainers.run.json_file import parse_json

FOLDER = "proofs"
_MAX_BYTES = 1 << 18


@dataclass(frozen=True)
class ProofFolder:
    """One proof.

    Args:
        path: its folder; need not exist yet.
    """

    path: Path

    @property
    def number(self) -> int:
        """Its place among the proofs of the run, from 1."""
        return int(self.path.name)

    @property
    def report(self) -> Path:
        """The folder that `prove` writes."""
        return self.path / "report"

    @property
    def output(self) -> Path:
        """What `prove` printed."""
        return self.path / "output.txt"

    @property
    def _note(self) -> Path:
        return self.path / "proof.json"

    def note(self) -> dict[str, Any]:
        """`control`, `started_at`, `host`, `processes` and `stopped_at`, without validation; {} if missing."""
        return _read(self._note, stamp(self._note))

    def write_note(self, note: Mapping[str, Any]) -> None:
        """Replaces the note."""
        write_json(self._note, dict(note))

    def document(self) -> dict[str, Any]:
        """The JSON document of `prove` so far, without validation; {} if missing."""
        path = self.report / "report.json"
        return _read(path, stamp(path))

    def process(self) -> Process | None:
        """The process in the note, if it is alive and on this machine."""
        note = self.note()
        processes = processes_in(note) if note.get("host") == socket.gethostname() else []
        with contextlib.suppress(ValueError, OverflowError):  # an impossible pid, from a damaged file
            return next((process for process in processes if process.alive()), None)
        return None


@functools.lru_cache(maxsize=256)
def _read(path: Path, version: Stamp | None) -> dict[str, Any]:
    """The JSON object in a file, which anyone may have written; {} if there is none."""
    data, size = read_span(path, 0, _MAX_BYTES)
    with contextlib.suppress(ValueError):
        value = parse_json(data) if size <= _MAX_BYTES else None
        return value if isinstance(value, dict) else {}
    return {}


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
