"""What the processes of one test session make once and share."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock

_VARIABLE = "TUNESMITH_TESTS"
_COMPLETE = ".complete"


def open_folder() -> None:
    """Makes the session's folder; processes started after this know it."""
    os.environ[_VARIABLE] = tempfile.mkdtemp(prefix="tunesmith-tests-")


def remove_folder() -> None:
    """Removes it with all that is in it."""
    shutil.rmtree(os.environ.pop(_VARIABLE), ignore_errors=True)


def once(name: str, make: Callable[[Path], None]) -> Path:
    """A folder that the first who asks for it fills; those who ask meanwhile wait.

    Args:
        name: of the folder.
        make: fills it; whatever it raises is raised, and the next who asks tries again.
    """
    folder = Path(os.environ[_VARIABLE]) / name
    with FileLock(f"{folder}.lock"):
        if not (folder / _COMPLETE).exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            make(folder)
            (folder / _COMPLETE).touch()
    return folder
