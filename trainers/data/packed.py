"""Files that are read from their compressed form, or as the rows of a tar, without a copy on disk. Imports no torch.

Such a file has no random access: what lies before the part that is read is decompressed and dropped.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from trainers.data.archives import Content, lines_of_tar
from trainers.data.data_file import DataFile
from trainers.data.progress import say
from trainers.run.folder import read_json, write_json

OpenRaw = Callable[[], IO[bytes]]


@dataclass(frozen=True)
class Contents:
    """What a file holds once it is decompressed.

    Attributes:
        size: Bytes, without blank lines at the end.
        suffix: Suffix of the content, such as `.jsonl`.
        digest: sha256 of the content.
    """

    size: int
    suffix: str
    digest: str


def contents_of(open_raw: OpenRaw, name: str, display_name: str, version: list[Any], cache: Path) -> Contents:
    """Reads a file once; what it holds is known from the cache folder until its version changes.

    Args:
        open_raw: Opens the file as it is stored.
        name: Its name, whose suffix says how it is compressed.
        display_name: Its name in messages.
        version: What changes with the content, and where it lies.
        cache: The cache folder.

    Raises:
        ConfigError: If the file is not what its suffix says.
        OSError: If it cannot be read, or the cache folder not be written to.
    """
    index = cache / "sources" / f"{hashlib.sha256(json.dumps(version).encode()).hexdigest()[:32]}.packed.json"
    if (known := _known(index)) is not None:
        return known
    say(f"reading {display_name} once, as it is compressed")
    digest, size, end, suffix = hashlib.sha256(), 0, 0, ""
    with ExitStack() as stack:
        suffix, pieces = _pieces(open_raw, name, display_name, stack)
        blank = b"\r\n" if suffix in (".csv", ".tsv") else b" \t\r\n"  # a row may end with empty columns
        for piece in pieces:
            digest.update(piece)
            if filled := len(piece.rstrip(blank)):
                end = size + filled
            size += len(piece)
    contents = Contents(end, suffix, digest.hexdigest())
    index.parent.mkdir(parents=True, exist_ok=True)
    write_json(index, asdict(contents))
    return contents


def _known(index: Path) -> Contents | None:
    """What an earlier start found in a file; None if it was not read, or the index is damaged or of another version."""
    values = read_json(index) or {}
    types = {name: type(value) for name, value in values.items()}
    if types != {"size": int, "suffix": str, "digest": str}:
        return None
    return Contents(**values)


def _pieces(open_raw: OpenRaw, name: str, display_name: str, stack: ExitStack) -> tuple[str, Iterator[bytes]]:
    """The suffix of the content, and its bytes; of a tar, its rows as lines of JSON."""
    content = stack.enter_context(Content(stack.enter_context(open_raw()), name, display_name))
    if content.suffix == ".tar":
        return ".jsonl", lines_of_tar(content)
    return content.suffix, content.pieces()


class PackedFile(io.RawIOBase):
    """The content of a file that is compressed; seeking reads on, or once more from the beginning.

    Args:
        file: The file.
        open_raw: Opens it as it is stored.
    """

    def __init__(self, file: DataFile, open_raw: OpenRaw):
        self._data_file, self._open_raw = file, open_raw
        self._stack = ExitStack()
        self._begin()

    def _begin(self) -> None:
        self._stack.close()
        self._at, self._buffered = 0, b""
        _, self._pieces = _pieces(self._open_raw, self._data_file.name, self._data_file.display_name, self._stack)

    def readinto(self, buffer: Any) -> int:
        """Reads from the current position."""
        if not self._buffered:
            self._buffered = next(self._pieces, b"")
        piece, self._buffered = self._buffered[: len(buffer)], self._buffered[len(buffer) :]
        buffer[: len(piece)] = piece
        self._at += len(piece)
        return len(piece)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Changes the position; `whence` is not the end, which is not known."""
        target = offset if whence == io.SEEK_SET else self._at + offset
        if target < self._at:
            self._begin()
        while self._at < target:
            self._buffered = self._buffered or next(self._pieces, b"")
            if not self._buffered:
                break
            skipped = min(len(self._buffered), target - self._at)
            self._buffered, self._at = self._buffered[skipped:], self._at + skipped
        return self._at

    def tell(self) -> int:
        """The current position."""
        return self._at

    def readable(self) -> bool:
        """True."""
        return True

    def seekable(self) -> bool:
        """True."""
        return True

    def close(self) -> None:
        """Closes the file."""
        if not self.closed:
            self._stack.close()
        super().close()
