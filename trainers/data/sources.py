"""Splits data files into shards of rows and reads them, with the line of each row. Imports no torch.

A file is scanned once (`plan`) and split into shards of about `SHARD_BYTES` at row boundaries. Any process can then
read a shard (`read`), which yields exactly `rows` items: rows, or what is wrong with them. Memory stays flat: one row
is held at a time, except for `.json` lists, which are held in full while they are planned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace

from trainers.config.mistakes import ConfigError
from trainers.config.remote_data import is_url
from trainers.data import json_rows, table_rows, text_rows
from trainers.data.data_file import DataFile
from trainers.data.shards import SHARD_BYTES, BadRow, FileShard, Item, unreadable

PACKED_SHARDS = 16
"""Most shards of a local compressed file: reading each from its beginning costs half as many times the file in all."""
_UNREADABLE = (OSError, ValueError, OverflowError, KeyError)
"""The last two are times that Python cannot represent and time zones that it does not know, in columnar files."""


def plan(
    files: Iterable[DataFile], sample_by: str, shard_bytes: int = SHARD_BYTES, columns: Mapping[str, str] | None = None
) -> list[FileShard]:
    """Splits files into shards, in order.

    Args:
        files: The files of a data set.
        sample_by: `line`, `paragraph` or `document`, for text files.
        shard_bytes: Minimum size of a shard; the last of a file may be smaller.
        columns: `config.columns`; they distinguish a row from an object that wraps rows.

    Raises:
        ConfigError: if a file cannot be read, or is a `.json` list too large to hold in memory.
    """
    return list(iter_shards(files, sample_by, shard_bytes, columns or {}))


def iter_shards(
    files: Iterable[DataFile], sample_by: str, shard_bytes: int, columns: Mapping[str, str]
) -> Iterator[FileShard]:
    """The shards of `plan`, lazily: files are scanned only as far as shards are consumed."""
    row = 0
    for file in files:
        empty = True
        try:
            for shard in _file_shards(file, sample_by, shard_bytes, columns):
                yield replace(shard, first_row=row)
                row, empty = row + shard.rows, False
        except _UNREADABLE as error:
            raise error if isinstance(error, ConfigError) else unreadable(file.display_name, error) from None
        if empty:
            yield FileShard(file, 0, 0, 1, row, 1)
            row += 1


def read(shard: FileShard, sample_by: str, wanted: Iterable[str] = ()) -> Iterator[Item]:
    """Yields `shard.rows` items: line number (row number for Parquet, Arrow and Hub data) and row.

    Args:
        shard: From `plan`.
        sample_by: As given to `plan`.
        wanted: Columns to read from columnar files; all, if none of them exists.

    Raises:
        ConfigError: if the file cannot be read.
    """
    items = _empty(shard) if shard.end == 0 else _READERS[shard.file.kind](shard, sample_by, list(wanted))
    try:
        for count, item in enumerate(items):
            if count == shard.rows:
                return
            yield item
    except _UNREADABLE as error:
        raise error if isinstance(error, ConfigError) else unreadable(shard.file.display_name, error) from None


def unread_columns(file: DataFile, wanted: Iterable[str]) -> list[str]:
    """The columns of a columnar file that `read` does not read.

    Args:
        file: File of a shard.
        wanted: As given to `read`.

    Raises:
        ConfigError: if the file cannot be read.
    """
    if file.kind not in ("parquet", "arrow"):
        return []
    try:
        names = table_rows.column_names(file)
    except _UNREADABLE as error:
        raise error if isinstance(error, ConfigError) else unreadable(file.display_name, error) from None
    columns = table_rows.columns_to_read(names, wanted)
    return [name for name in names if columns and name not in columns]


def _empty(shard: FileShard) -> Iterator[Item]:
    yield 1, BadRow("empty file", "it has no rows")


def _file_shards(file: DataFile, sample_by: str, shard_bytes: int, columns: Mapping[str, str]) -> Iterator[FileShard]:
    if file.content_size is not None:  # each shard is read from the beginning of the file
        parts = 1 if is_url(file.path) else PACKED_SHARDS
        shard_bytes = max(shard_bytes, -(-file.content_size // parts))
    if file.kind == "arrow":
        return table_rows.shard_mapped(file)
    if file.kind == "parquet":
        return table_rows.shard_parquet(file, shard_bytes)
    if file.kind == "json":
        return json_rows.shard_list(file, shard_bytes, columns)
    if file.kind == "text":
        return text_rows.shard_text(file, sample_by, shard_bytes)
    return (json_rows.shard_lines if file.kind == "jsonl" else table_rows.shard_csv)(file, shard_bytes)


_READERS: dict[str, Callable[[FileShard, str, list[str]], Iterator[Item]]] = {
    "jsonl": json_rows.read_lines,
    "json": json_rows.read_list,
    "csv": table_rows.read_csv,
    "tsv": table_rows.read_csv,
    "text": text_rows.read_text,
    "parquet": table_rows.read_parquet,
    "arrow": table_rows.read_mapped,
}
