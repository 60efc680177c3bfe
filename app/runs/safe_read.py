"""Safely reads files of run folders, which others may write: only regular files, never through a symbolic link."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import BinaryIO

Stamp = tuple[int, int, int]
"""Inode, modification time in ns, size in bytes: equal stamps mean equal content."""


def open_regular(path: Path) -> BinaryIO:
    """Opens a file for unbuffered binary reading.

    Raises:
        OSError: for a missing file, a link, a folder, a device or a pipe (which would block forever).
    """
    # O_NONBLOCK keeps the open itself from waiting for the writer of a pipe. The type is checked on the open
    # descriptor, as the path may be replaced in between.
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(f"{path.name} is not a regular file")
    return open(handle, "rb", buffering=0)


def read_span(path: Path, start: int, max_bytes: int) -> tuple[bytes, int]:
    """Reads at most `max_bytes` bytes from offset `start`.

    Returns:
        The bytes and the size of the file; `(b"", 0)` if it is missing or not a regular file.
    """
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(start)
            return file.read(max_bytes), size
    except OSError:
        return b"", 0


def stamp(path: Path) -> Stamp | None:
    """A value that changes whenever the file does; None if there is no file."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size
