"""Folders that are written under another name and renamed when they are complete. Imports no torch.

Whoever writes one holds a lock on it, which ends with the process. So what a killed process has left is told from what
another one is writing.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from trainers.config.mistakes import ConfigError

_RANDOM = r"[0-9a-f]{16}"


def unfinished_name(name: str) -> str:
    """A new hidden name for the unfinished `name`."""
    return f".{name}.{secrets.token_hex(8)}"


def new_beside(target: Path) -> Path:
    """Creates an empty folder beside a target; removes those that were left there unfinished."""
    target.parent.mkdir(parents=True, exist_ok=True)
    pattern = re.compile(rf"\.{re.escape(target.name)}\.{_RANDOM}")
    for path in target.parent.iterdir():
        if pattern.fullmatch(path.name):
            remove_left(path)
    folder = target.with_name(unfinished_name(target.name))
    folder.mkdir()
    return folder


@contextlib.contextmanager
def being_written(folder: Path) -> Iterator[None]:
    """Marks a folder as being written by this process; removes it at the end, unless it has been renamed."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with contextlib.suppress(OSError):  # some network file systems cannot lock a folder
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(handle)


def remove_left(folder: Path) -> None:
    """Removes a folder that nobody is writing; does nothing where that cannot be known."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(handle)


@contextlib.contextmanager
def held_alone(folder: Path, busy: str) -> Iterator[None]:
    """Holds the lock on a folder, which ends with the process; there is none on some network file systems.

    Args:
        folder: an existing folder.
        busy: the message if another process holds the lock.

    Raises:
        ConfigError: if another process holds the lock.
    """
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(busy) from None
        except OSError:
            pass
        yield
    finally:
        os.close(handle)
