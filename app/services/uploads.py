"""Puts uploaded data under the uploads folder, with a name that is only a name."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import stat
import unicodedata
from itertools import count
from pathlib import Path
from typing import BinaryIO

from app.console import shortened
from trainers.config.options import ConfigError

ENDINGS = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet", ".txt", ".md")
MOST_BYTES = 20 << 30
LONGEST_NAME = 100


def take(path: Path, name: str, uploads: Path, most_bytes: int = MOST_BYTES) -> Path:
    """Copies an uploaded file into the uploads folder; a file that is there already is never replaced.

    Args:
        path: where the server put what was sent.
        name: what the sender calls it.
        uploads: the folder; made when it is not there.
        most_bytes: largest file that is taken.

    Returns:
        The new file.

    Raises:
        ConfigError: for a link, an unknown ending, a file that is too large, or no room.
    """
    safe = safe_name(name)
    try:
        source = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise ConfigError(f"upload {safe} cannot be read: {error.strerror}; send it again") from None
    with open(source, "rb") as stream:
        status = os.fstat(source)
        if not stat.S_ISREG(status.st_mode):
            raise ConfigError(f"upload {safe} is no plain file; send the data itself")
        if status.st_size > most_bytes:
            raise ConfigError(
                f"upload {safe} has {status.st_size:,} bytes, at most {most_bytes:,} are taken; "
                "copy it into an allowed folder and give its path"
            )
        try:
            uploads.mkdir(parents=True, exist_ok=True)
            return _copied(stream, safe, uploads)
        except OSError as error:
            shown = f"upload {safe} cannot be stored in {uploads}: {error.strerror}"
            raise ConfigError(f"{shown}; free some room") from None


def take_sent(path: Path, uploads: Path) -> Path:
    """`take` of a file under the name with which it was sent; what the server stored of it is removed.

    Args:
        path: where the server put it.
        uploads: the folder.

    Raises:
        ConfigError: as `take`.
    """
    try:
        return take(path, path.name, uploads)
    finally:
        forget(path, uploads)


def forget(path: Path, uploads: Path) -> None:
    """Removes what the server stored of an upload, in a folder of its own below the uploads; nothing elsewhere."""
    if path.parent.parent == uploads:
        path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            path.parent.rmdir()


def _copied(stream: BinaryIO, name: str, folder: Path) -> Path:
    stem, ending = os.path.splitext(name)
    for number in count(1):
        target = folder / (name if number == 1 else f"{stem}-{number}{ending}")
        try:
            made = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        except FileExistsError:
            continue
        try:
            with open(made, "wb") as copy:
                shutil.copyfileobj(stream, copy, 1 << 20)
        except BaseException:
            target.unlink(missing_ok=True)
            raise
        return target
    raise AssertionError("there is always a next number")


def safe_name(name: str) -> str:
    """A file name of at most 100 letters without path parts, invisible letters or leading dots.

    Raises:
        ConfigError: when its ending is not one of `ENDINGS`.
    """
    last = re.split(r"[/\\]", name)[-1]
    visible = "".join(letter for letter in last if unicodedata.category(letter)[0] not in "CZ" or letter == " ")
    stem, ending = os.path.splitext(re.sub(r"[\s*?\[\]%~]+", "-", visible.strip()).lstrip(".-"))
    if ending.lower() not in ENDINGS:
        shown = shortened(visible) or "without a name"
        raise ConfigError(f"upload {shown} ends in {ending or 'nothing'!r}; send one of {', '.join(ENDINGS)}")
    room = LONGEST_NAME - len(ending)
    while len(stem[:room].encode()) > 200:
        room -= 1
    return f"{stem[:room] or 'data'}{ending.lower()}"
