"""The folders of work in the background, `tunesmith prove` and `tunesmith eval`: their notes, and who does the work.

Such work outlives the server and the browser that started it; all that is told of it comes from its folder.
"""

from __future__ import annotations

import contextlib
import functools
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from app.runs.runs import processes_in
from app.runs.safe_read import Stamp, read_span, stamp
from trainers.run.folder import Process, write_json
from trainers.run.json_file import parse_json

_MAX_BYTES = 1 << 18


@dataclass(frozen=True)
class WorkFolder:
    """The folder of one piece of work.

    Args:
        path: the folder; need not exist yet.
    """

    path: Path
    note_name: ClassVar[str]
    """File name of the note."""

    @property
    def output(self) -> Path:
        """What the program printed."""
        return self.path / "output.txt"

    def note(self) -> dict[str, Any]:
        """`started_at`, `host`, `processes`, `stopped_at` and more, without validation; {} if missing."""
        return read_object(self.path / self.note_name)

    def write_note(self, note: Mapping[str, Any]) -> None:
        """Replaces the note."""
        write_json(self.path / self.note_name, dict(note))

    def process(self) -> Process | None:
        """The process in the note, if it is alive and on this machine."""
        note = self.note()
        processes = processes_in(note) if note.get("host") == socket.gethostname() else []
        with contextlib.suppress(ValueError, OverflowError):  # an impossible pid, from a damaged file
            return next((process for process in processes if process.alive()), None)
        return None


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a small file, which anyone may have written; {} if there is none."""
    return _read(path, stamp(path))


@functools.lru_cache(maxsize=1024)
def _read(path: Path, version: Stamp | None) -> dict[str, Any]:
    data, size = read_span(path, 0, _MAX_BYTES)
    with contextlib.suppress(ValueError):
        value = parse_json(data) if size <= _MAX_BYTES else None
        return value if isinstance(value, dict) else {}
    return {}
