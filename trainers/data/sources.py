"""Data files as shards of rows that know where they come from. Imports no torch.

A file is looked through once (`plan`) and cut into shards of about `SHARD_BYTES` at row borders; each shard can then be
read by itself, by any process (`read`), and gives exactly `rows` items: a row, or what is wrong with it. Memory stays
flat: no more than a shard's row is held, except for `.json` lists, which are held whole while they are planned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace

from trainers.config.options import ConfigError
from trainers.data import json_rows, table_rows, text_rows
from trainers.data.files import DataFile, unreadable
from trainers.data.shards import SHARD_BYTES, Bad, Item, Shard


def plan(
    files: Iterable[DataFile], sample_by: str, shard_bytes: int = SHARD_BYTES, columns: Mapping[str, str] | None = None
) -> list[Shard]:
    """Cuts files into shards, in order.

    Args:
        files: The files of a data set.
        sample_by: `line`, `paragraph` or `document`, for text files.
        shard_bytes: Least size of a shard; the last of a file may be smaller.
        columns: `config.columns`; they tell a row from an object around rows.

    Raises:
        ConfigError: when a file cannot be read, or is a `.json` list too large to be held.
    """
    return list(cut(files, sample_by, shard_bytes, columns or {}))


def cut(files: Iterable[DataFile], sample_by: str, shard_bytes: int, columns: Mapping[str, str]) -> Iterator[Shard]:
    """The shards of `plan` one by one: a file is looked through no further than they are asked for."""
    row = 0
    for file in files:
        empty = True
        try:
            for shard in _cuts(file, sample_by, shard_bytes, columns):
                yield replace(shard, first_row=row)
                row, empty = row + shard.rows, False
        except (OSError, ValueError) as error:
            raise error if isinstance(error, ConfigError) else unreadable(file.shown, error) from None
        if empty:
            yield Shard(file, 0, 0, 1, row, 1)
            row += 1


def read(shard: Shard, sample_by: str, wanted: Iterable[str] = ()) -> Iterator[Item]:
    """The rows of a shard with their line numbers (row numbers for Parquet and Hub data), `shard.rows` of them.

    Args:
        shard: From `plan`.
        sample_by: As given to `plan`.
        wanted: Columns to read where columns are stored apart; all when none of them is there.

    Raises:
        ConfigError: when the file cannot be read.
    """
    items = _empty(shard) if shard.end == 0 else _READERS[shard.file.kind](shard, sample_by, list(wanted))
    try:
        for count, item in enumerate(items):
            if count == shard.rows:
                return
            yield item
    except (OSError, ValueError) as error:
        raise error if isinstance(error, ConfigError) else unreadable(shard.file.shown, error) from None


def unread_columns(file: DataFile, wanted: Iterable[str]) -> list[str]:
    """The columns that `read` leaves where they are, in files that store columns apart.

    Args:
        file: Of a shard.
        wanted: As given to `read`.
    """
    if file.kind not in ("parquet", "hub"):
        return []
    names = table_rows.column_names(file)
    columns = table_rows.columns_to_read(names, wanted)
    return [name for name in names if columns and name not in columns]


def _empty(shard: Shard) -> Iterator[Item]:
    yield 1, Bad("empty file", "it has no rows")


def _cuts(file: DataFile, sample_by: str, shard_bytes: int, columns: Mapping[str, str]) -> Iterator[Shard]:
    if file.kind == "hub":
        return table_rows.hub_cuts(file)
    if file.kind == "parquet":
        return table_rows.parquet_cuts(file, shard_bytes)
    if file.kind == "json":
        return json_rows.list_cuts(file, shard_bytes, columns)
    if file.kind == "text":
        return text_rows.cuts(file, sample_by, shard_bytes)
    return (json_rows.line_cuts if file.kind == "jsonl" else table_rows.csv_cuts)(file, shard_bytes)


_READERS: dict[str, Callable[[Shard, str, list[str]], Iterator[Item]]] = {
    "jsonl": json_rows.read_lines,
    "json": json_rows.read_list,
    "csv": table_rows.read_csv,
    "tsv": table_rows.read_csv,
    "text": text_rows.read,
    "parquet": table_rows.read_parquet,
    "hub": table_rows.read_hub,
}
