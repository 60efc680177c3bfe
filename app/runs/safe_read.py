"""Opens files of run folders for reading: regular ones only, and never through a link that leads elsewhere."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import BinaryIO

Stamp = tuple[int, int, int]
"""Inode, time of change in ns, bytes: alike means that the content is too."""


def open_regular(path: Path) -> BinaryIO:
    """The file, open for reading bytes, unbuffered.

    Raises:
        OSError: for no file, a link, a folder, a device or a pipe (which would block for ever).
    """
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(f"{path.name} is not a regular file")
    return open(handle, "rb", buffering=0)


def read_span(path: Path, start: int, most: int) -> tuple[bytes, int]:
    """A piece of a file, and the file's size; nothing and 0 where there is not a regular file.

    Args:
        path: the file.
        start: byte to begin at.
        most: bytes.
    """
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(start)
            return file.read(most), size
    except OSError:
        return b"", 0


def stamp(path: Path) -> Stamp | None:
    """What tells a changed file from an unchanged one; None where there is none."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size
