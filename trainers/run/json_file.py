"""Reads JSON from files that may be anything: pipes, gigabytes, brackets a hundred thousand deep. No torch."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO

MAX_BYTES = 200_000_000
"""A manifest of a very large model has a few MB; a tokenizer may have tens."""


def open_file(path: Path) -> BinaryIO:
    """A regular file, open for reading bytes; a pipe would block its reader for ever.

    Raises:
        OSError: for anything else.
    """
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(0, "not a regular file", str(path))
    return open(handle, "rb")


def parse_json(content: str | bytes) -> Any:
    """`json.loads`, but for nesting that is too deep, which is one more ValueError.

    Raises:
        ValueError: when it is not JSON.
    """
    try:
        return json.loads(content)
    except RecursionError:
        raise ValueError("its brackets are nested too deeply") from None


def load_json(path: Path, most: int = MAX_BYTES) -> Any:
    """The JSON value in a file.

    Raises:
        OSError: when it is not a regular file, or cannot be read.
        ValueError: when it is too large or no JSON.
    """
    with open_file(path) as file:
        if os.fstat(file.fileno()).st_size > most:
            raise ValueError(f"it is larger than {most:,} bytes")
        return parse_json(file.read().decode("utf-8"))
