"""Stores uploaded data in the uploads folder, under a safe file name."""

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
from trainers.config.mistakes import ConfigError

EXTENSIONS = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet", ".txt", ".md")
MAX_BYTES = 20 << 30
MAX_NAME_LENGTH = 100


def store(path: Path, name: str, uploads: Path, max_bytes: int = MAX_BYTES) -> Path:
    """Copies an uploaded file into the uploads folder; never replaces an existing file.

    Args:
        path: where the server stored the upload.
        name: the sender's name for it.
        uploads: the folder; created if missing.
        max_bytes: largest accepted file.

    Returns:
        The new file.

    Raises:
        ConfigError: for a link, an unknown extension, a file that is too large, or a full disk.
    """
    safe = safe_name(name)
    try:
        source = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise ConfigError(f"upload {safe} cannot be read: {error.strerror}; upload it again") from None
    with open(source, "rb") as stream:
        status = os.fstat(source)
        if not stat.S_ISREG(status.st_mode):
            raise ConfigError(f"upload {safe} is not a regular file; upload the data itself")
        if status.st_size > max_bytes:
            raise ConfigError(
                f"upload {safe} has {status.st_size:,} bytes, more than {max_bytes:,}; "
                "copy it into an allowed folder and give its path"
            )
        try:
            uploads.mkdir(parents=True, exist_ok=True)
            return _copy(stream, safe, uploads)
        except OSError as error:
            problem = f"upload {safe} cannot be stored in {uploads}: {error.strerror}"
            raise ConfigError(f"{problem}; free some space") from None


def store_upload(path: Path, uploads: Path) -> Path:
    """Stores a received file under its own name, and removes the server's copy.

    Args:
        path: where the server put it.
        uploads: the folder.

    Raises:
        ConfigError: as `store`.
    """
    try:
        return store(path, path.name, uploads)
    finally:
        remove_received(path, uploads)


def remove_received(path: Path, uploads: Path) -> None:
    """Removes the server's copy of an upload, in its own folder below the uploads; does nothing for other paths."""
    if path.parent.parent == uploads:
        path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            path.parent.rmdir()


def _copy(stream: BinaryIO, name: str, folder: Path) -> Path:
    stem, extension = os.path.splitext(name)
    for number in count(1):
        target = folder / (name if number == 1 else f"{stem}-{number}{extension}")
        try:
            descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        except FileExistsError:
            continue
        try:
            with open(descriptor, "wb") as copy:
                shutil.copyfileobj(stream, copy, 1 << 20)
        except BaseException:
            target.unlink(missing_ok=True)
            raise
        return target
    raise AssertionError("there is always a next number")


def safe_name(name: str) -> str:
    """A file name of at most 100 characters without path separators, invisible characters or leading dots.

    Raises:
        ConfigError: when its extension is not one of `EXTENSIONS`.
    """
    base_name = re.split(r"[/\\]", name)[-1]
    visible = "".join(letter for letter in base_name if unicodedata.category(letter)[0] not in "CZ" or letter == " ")
    stem, extension = os.path.splitext(re.sub(r"[\s*?\[\]%~]+", "-", visible.strip()).lstrip(".-"))
    if extension.lower() not in EXTENSIONS:
        label = shortened(visible) or "without a name"
        raise ConfigError(f"upload {label} ends in {extension or 'nothing'!r}; use one of {', '.join(EXTENSIONS)}")
    max_stem = MAX_NAME_LENGTH - len(extension)
    while len(stem[:max_stem].encode()) > 200:
        max_stem -= 1
    return f"{stem[:max_stem] or 'data'}{extension.lower()}"
