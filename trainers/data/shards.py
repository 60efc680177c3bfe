"""A shard of a file, and line reading shared by JSONL, CSV and text. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO, NamedTuple

from trainers.config.mistakes import ConfigError
from trainers.data.data_file import DataFile

SHARD_BYTES = 16 << 20
ROW_BYTES = 10_000_000
BOM = b"\xef\xbb\xbf"


def changed(name: str) -> ConfigError:
    """The error of a file that another program writes to while it is read."""
    return ConfigError(f"{name} changed while it was read; start again when it is complete")


def unreadable(display_name: str, error: BaseException) -> ConfigError:
    """The error for a file that cannot be read."""
    reason = getattr(error, "strerror", None) or str(error).partition("\n")[0][:200]
    return ConfigError(f"cannot read {display_name}: {reason}; check the file and its permissions")


class BadRow(NamedTuple):
    """Why a row cannot be used: a kind to count by, and the detail."""

    kind: str
    detail: str


@dataclass(frozen=True)
class FileShard:
    """A contiguous range of one file.

    Attributes:
        file: The file.
        start: First byte (first row, from 0, of Parquet, Arrow and Hub data).
        end: Byte (or row) after the last.
        line: Number of the first line, from 1 (of the first row for Parquet, Arrow and Hub data).
        first_row: Number of the first row within the whole data set, from 0.
        rows: Items that `read` yields.
        header: Column names of CSV and TSV.
        delimiter: Column separator of CSV and TSV.
        in_list: Whether it starts inside a list of a `.json` file.
        siblings: Other keys of the object that wraps the list of rows; set on the first shard only.
    """

    file: DataFile
    start: int
    end: int
    line: int
    first_row: int
    rows: int
    header: tuple[str, ...] = ()
    delimiter: str = ","
    in_list: bool = False
    siblings: tuple[str, ...] = ()


Item = tuple[int, dict[str, Any] | BadRow]
Record = tuple[int, int, bytes | None]  # offset, line, content (None: too large)


def content_end(stream: BinaryIO, file: DataFile, blank: bytes = b" \t\r\n") -> int:
    """Offset where the content ends: blank lines at the end of a file are not rows."""
    if file.content_size is not None:  # measured when it was first decompressed
        return file.content_size
    end = file.size
    while end:
        start = max(0, end - 65536)
        stream.seek(start)
        length = len(stream.read(end - start).rstrip(blank))
        if length:
            return start + length
        end = start
    return 0


def lines(stream: BinaryIO, start: int, end: int, line: int) -> Iterator[Record]:
    """Lines with their offsets; the content of a line over `ROW_BYTES` is None and is never held in memory."""
    stream.seek(start)
    offset = start
    while offset < end:
        first, content = offset, stream.readline(min(ROW_BYTES + 2, end - offset))
        if not content:
            return
        offset += len(content)
        # Skip the rest of a line that is too large in pieces, without keeping it.
        large = len(content) > ROW_BYTES + 1
        while offset < end and not content.endswith(b"\n"):
            content = stream.readline(min(1 << 20, end - offset))
            if not content:
                break
            offset += len(content)
        if first == 0 and not large:
            content = content.removeprefix(BOM)
        yield first, line, None if large else content
        line += 1


def group(
    file: DataFile, records: Iterable[Record], end: int, shard_bytes: int, header: tuple[str, ...] = ()
) -> Iterator[FileShard]:
    """Groups records into shards of at least `shard_bytes` each, except the last."""
    start, first_line, rows = -1, 1, 0
    for offset, line, _ in records:
        if start < 0:
            start, first_line = offset, line
        elif offset - start >= shard_bytes:
            yield FileShard(file, start, offset, first_line, 0, rows, header)
            start, first_line, rows = offset, line, 0
        rows += 1
    if rows:
        yield FileShard(file, start, end, first_line, 0, rows, header)


def too_large() -> BadRow:
    """The `BadRow` for a row over `ROW_BYTES`."""
    return BadRow("row too large", f"over {ROW_BYTES:,} bytes; split it into several rows")
