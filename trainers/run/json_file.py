"""Reads JSON from untrusted files: refuses pipes, gigabytes and excessive nesting. Imports no torch."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO

MAX_BYTES = 200_000_000
"""The manifest of a very large model takes a few MB, a tokenizer tens of MB."""


def open_file(path: Path) -> BinaryIO:
    """Opens a regular file for reading bytes.

    Raises:
        OSError: If it is anything else, such as a pipe, which would block its reader forever.
    """
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(0, "not a regular file", str(path))
    return open(handle, "rb")


def parse_json(content: str | bytes) -> Any:
    """Like `json.loads`, but raises ValueError if the JSON is nested too deeply.

    Raises:
        ValueError: If the content is not valid JSON.
    """
    try:
        return json.loads(content)
    except RecursionError:
        raise ValueError("its brackets are nested too deeply") from None


def load_json(path: Path, most: int = MAX_BYTES) -> Any:
    """Reads the JSON value in a file.

    Args:
        path: The file.
        most: Size limit in bytes.

    Raises:
        OSError: If it is not a regular file, or cannot be read.
        ValueError: If it is too large, or not valid JSON.
    """
    with open_file(path) as file:
        if os.fstat(file.fileno()).st_size > most:
            raise ValueError(f"it is larger than {most:,} bytes")
        return parse_json(file.read().decode("utf-8"))
