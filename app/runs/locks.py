"""Locks of work that goes on in the background: held by its process to its end, however that ends."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from app.runs.safe_read import open_regular
from trainers.config.mistakes import ConfigError

_TIMEOUT = 0.5
"""Seconds to try for the lock, as readers take it for a moment."""


def is_locked(path: Path) -> bool:
    """Whether a process holds the lock in a file; False if there is no such file."""
    with contextlib.suppress(OSError), open_regular(path) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


@contextlib.contextmanager
def lock_file(path: Path, busy: str) -> Iterator[TextIO]:
    """Holds the lock in a file, which is made if missing; a child that inherits the file holds it to its own end.

    Args:
        path: the file.
        busy: the message if another process holds it.

    Raises:
        ConfigError: if another process holds the lock, or it cannot be opened.
    """
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(f"{path} cannot be opened: {error.strerror}; check its permissions") from None
    with open(handle, "r+", encoding="utf-8") as file:
        deadline = time.monotonic() + _TIMEOUT
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise ConfigError(busy) from None
            time.sleep(0.02)
        yield file
