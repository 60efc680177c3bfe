"""Rows of CSV, TSV, Parquet and Arrow files and of Hub data sets. Imports no torch."""

from __future__ import annotations

import csv
import os
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import islice
from typing import Any, BinaryIO

from trainers.config.mistakes import ConfigError
from trainers.config.remote_data import is_url
from trainers.data.data_file import DataFile
from trainers.data.open_file import open_file
from trainers.data.shards import ROW_BYTES, BadRow, FileShard, Item, content_end, group, lines, too_large

MAPPED_ROWS = 10_000  # rows of Arrow data per shard
SNIFFED_LINES = 20
TABLE_LINES = 100  # a field with fewer lines may well contain a table


class _Lines:
    """Lines for `csv.reader` that track where the current record starts and where its second line starts.

    Args:
        stream: The file.
        start: First byte.
        end: Byte after the last.
        line: Number of the first line, from 1.
    """

    def __init__(self, stream: BinaryIO, start: int, end: int, line: int):
        self._lines = lines(stream, start, end, line)
        self._stream = stream
        self.next_line = self.second_line = (start, line)
        self.count = 0

    def begin(self) -> tuple[int, int]:
        """Offset and line of the next record."""
        self.count = 0
        return self.next_line

    def __iter__(self) -> Iterator[str]:
        """Yields lines decoded as Latin-1: one character per byte."""
        for _, number, content in self._lines:
            self.next_line = (self._stream.tell(), number + 1)
            self.count += 1
            if self.count == 1:
                self.second_line = self.next_line
            # A line too large to hold is replaced by one that exceeds `csv.field_size_limit`, so that it is reported.
            yield "x" * (ROW_BYTES + 2) if content is None else content.decode("latin-1")


def _csv_records(
    stream: BinaryIO, start: int, end: int, line: int, delimiter: str, columns: int = 0
) -> Iterator[tuple[int, int, list[str] | BadRow]]:
    """Rows of a CSV file with their offsets and lines, `columns` wide (0: as wide as the first).

    An unclosed quote invalidates only the line that contains it: reading resumes on the next line. The same holds for
    a quote that a later row happens to close, which is detected by the rows within the field (`_swallowed_rows`).
    """
    csv.field_size_limit(ROW_BYTES)
    while True:
        source = _Lines(stream, start, end, line)
        rows = csv.reader(iter(source), delimiter=delimiter, strict=True)
        while True:
            offset, number = source.begin()
            try:
                fields = next(rows)
            except StopIteration:
                return
            except csv.Error as error:
                yield offset, number, _broken(str(error), source.count)
                break
            if source.count > TABLE_LINES and _swallowed_rows(fields, delimiter, columns):
                yield offset, number, _broken("rows within a field", source.count)
                break
            columns = columns or len(fields)
            yield offset, number, fields
        start, line = source.second_line


def _broken(error: str, count: int) -> BadRow:
    """The `BadRow` for a parse error; does not depend on later lines, so that it is the same for any sharding."""
    if "new-line character" in error:
        return BadRow("broken CSV", "a carriage return within a line; end lines with a newline")
    if "field limit" in error and count == 1:
        return too_large()
    return BadRow(
        "broken CSV",
        "a quoted field is never closed, or closed only after what looks like other rows, or holds a quote that is not "
        f"doubled, or over {ROW_BYTES:,} bytes; close it, double quotes within quotes, or save the data as JSONL",
    )


def _swallowed_rows(fields: list[str], delimiter: str, columns: int) -> bool:
    """Whether most lines within a field are as wide as a row: they are rows then, after an unclosed quote.

    In a file of one column nearly every line is that wide. There a few lines that are blank or contain a delimiter, as
    a row of one column cannot, are enough to show that the field is text.
    """
    inner = [line for field in fields for line in field.split("\n")[1:-1]]
    alike = sum(line.count(delimiter) == columns - 1 and bool(line.strip()) for line in inner)
    return alike > (0.8 if columns > 1 else 0.99) * len(inner)


def _delimiter(stream: BinaryIO, end: int, kind: str) -> str:
    """The column separator: the usual one of this kind of file, unless only another one yields a table.

    Args:
        stream: The file.
        end: Byte after the last.
        kind: `csv` or `tsv`.
    """
    usual = "," if kind == "csv" else "\t"
    for delimiter in (usual, *(other for other in ",;\t|" if other != usual)):
        rows = [fields for _, _, fields in islice(_csv_records(stream, 0, end, 1, delimiter), SNIFFED_LINES)]
        widths = [0 if isinstance(fields, BadRow) else len(fields) for fields in rows if fields]
        # A table has several columns, and at least half of its rows are as wide as the header.
        if widths and widths[0] > 1 and 2 * widths.count(widths[0]) >= len(widths):
            return delimiter
    return usual


def shard_csv(file: DataFile, shard_bytes: int) -> Iterator[FileShard]:
    """Shards of a CSV or TSV file, which is parsed to find row boundaries, as a quoted field may contain newlines."""
    with open_file(file) as stream:
        end = content_end(stream, file, b"\r\n")
        delimiter = _delimiter(stream, end, file.kind)
        records = _csv_records(stream, 0, end, 1, delimiter)
        first = next(records, None)
        if first is None:
            return
        if isinstance(first[2], BadRow):
            raise ConfigError(f"{file.display_name}: its first line is broken: {first[2].detail}")
        try:
            header = tuple(name.encode("latin-1").decode("utf-8").strip() for name in first[2])
        except UnicodeDecodeError:
            header = ()
        if not header or len(set(header)) < len(header):
            raise ConfigError(
                f"{file.display_name}: its first line must be the column names, each once, in UTF-8; add it"
            )
        shards = group(file, ((offset, line, None) for offset, line, _ in records), end, shard_bytes, header)
        yield from (replace(shard, delimiter=delimiter) for shard in shards)


def read_csv(shard: FileShard, sample_by: str, wanted: list[str]) -> Iterator[Item]:
    """The rows of a CSV or TSV shard."""
    with open_file(shard.file, shard.end) as stream:
        columns = len(shard.header)
        records = _csv_records(stream, shard.start, shard.end, shard.line, shard.delimiter, columns)
        for _, line, fields in records:
            yield line, fields if isinstance(fields, BadRow) else _csv_row(fields, shard.header)


def _csv_row(fields: list[str], header: tuple[str, ...]) -> dict[str, Any] | BadRow:
    if not fields:
        return BadRow("empty line", "a blank line between rows")
    if len(fields) != len(header):
        return BadRow("wrong number of columns", f"{len(fields)} and not {len(header)}; check its quotes")
    if sum(map(len, fields)) > ROW_BYTES:
        return too_large()
    try:
        values = [field if field.isascii() else field.encode("latin-1").decode("utf-8") for field in fields]
    except UnicodeDecodeError as error:
        return BadRow("invalid UTF-8", f"byte 0x{error.object[error.start]:02x}; save the file as UTF-8")
    if tuple(values) == header and len(header) > 1:
        return BadRow("repeated header", "the column names again; were files joined? remove this line")
    return dict(zip(header, values, strict=True))


def _row_shards(file: DataFile, counts: Iterable[int]) -> Iterator[FileShard]:
    start = 0
    for count in counts:
        if count:
            yield FileShard(file, start, start + count, start + 1, 0, count)
        start += count


def shard_mapped(file: DataFile) -> Iterator[FileShard]:
    """Shards of `MAPPED_ROWS` rows."""
    return _row_shards(file, [min(MAPPED_ROWS, file.size - start) for start in range(0, file.size, MAPPED_ROWS)])


def shard_parquet(file: DataFile, shard_bytes: int) -> Iterator[FileShard]:
    """Shards of a Parquet file: row groups joined up to `shard_bytes`."""

    names = column_names(file)
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(f"{file.display_name}: the column {repeated[0]!r} appears twice; keep one of them")
    counts, size = [], shard_bytes
    with _parquet(file) as parquet:
        metadata = parquet.metadata
    for index in range(metadata.num_row_groups):
        group = metadata.row_group(index)
        if size >= shard_bytes:
            counts.append(0)
            size = 0
        counts[-1] += group.num_rows
        size += group.total_byte_size
    return _row_shards(file, counts)


def _parquet(file: DataFile) -> Any:
    """An open Parquet file; a remote one is read by the ranges that are needed."""
    import pyarrow.parquet as pq

    if is_url(file.path):
        from trainers.data.remote_file import RemoteFile

        return pq.ParquetFile(RemoteFile(file), pre_buffer=True)
    return pq.ParquetFile(file.path, memory_map=True, pre_buffer=False)


def column_names(file: DataFile) -> list[str]:
    """The columns of a Parquet or Arrow file, or of a Hub data set."""
    if file.kind == "arrow":
        return list(mapped_rows(file).column_names)

    with _parquet(file) as parquet:
        return list(parquet.schema_arrow.names)


def columns_to_read(names: Iterable[str], wanted: Iterable[str]) -> list[str]:
    """The wanted columns that exist; an empty list means all columns are read."""
    present = set(names)
    return [name for name in dict.fromkeys(wanted) if name in present]


def _without_nulls(row: dict[str, Any]) -> dict[str, Any]:
    """A row without nulls in its nested objects: a columnar file gives each object the keys of all others."""
    return {name: _stripped(value) if isinstance(value, list | dict) else value for name, value in row.items()}


def _stripped(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _stripped(item) for key, item in value.items() if item is not None}
    return [_stripped(item) for item in value] if isinstance(value, list) else value


def read_parquet(shard: FileShard, sample_by: str, wanted: list[str]) -> Iterator[Item]:
    """The rows of a Parquet shard, a few megabytes at a time."""

    with _parquet(shard.file) as parquet:
        columns = columns_to_read(parquet.schema_arrow.names, wanted) or None
        # Find the row groups of the shard, and the bytes per row of the heaviest, to limit a batch to about 4 MiB.
        groups, row, weight = [], 0, 0
        for index in range(parquet.metadata.num_row_groups):
            group = parquet.metadata.row_group(index)
            if shard.start <= row < shard.end:
                groups.append(index)
                weight = max(weight, group.total_byte_size // max(1, group.num_rows))
            row += group.num_rows
        size = max(1, min(1000, (4 << 20) // max(1, weight)))
        number = shard.line
        for batch in parquet.iter_batches(batch_size=size, row_groups=groups, columns=columns, use_threads=False):
            for value in batch.to_pylist():
                yield number, _without_nulls(value)
                number += 1


def read_mapped(shard: FileShard, sample_by: str, wanted: list[str]) -> Iterator[Item]:
    """The rows of a shard of an Arrow file or a Hub data set; images and other media stay the bytes that they are."""
    data = mapped_rows(shard.file)
    columns = columns_to_read(data.column_names, wanted) or data.column_names
    media = [name for name in columns if _holds_media(data.features[name])]
    decoded = data.select_columns([name for name in columns if name not in media])
    stored = data.select_columns(media).with_format("arrow")
    for start in range(shard.start, shard.end, 100):
        rows = range(start, min(start + 100, shard.end))
        block = {**(decoded[rows] if decoded.column_names else {}), **(stored[rows].to_pydict() if media else {})}
        for number, *values in zip(rows, *(block[name] for name in columns), strict=True):
            yield number + 1, _without_nulls(dict(zip(columns, values, strict=True)))


def _holds_media(feature: Any) -> bool:
    """Whether a column has values that `datasets` decodes, such as images, other than JSON."""
    if isinstance(feature, dict | list | tuple):
        return any(map(_holds_media, feature.values() if isinstance(feature, dict) else feature))
    if (inner := getattr(feature, "feature", None)) is not None:
        return _holds_media(inner)
    return bool(getattr(feature, "decode", False)) and type(feature).__name__ != "Json"


def mapped_rows(file: DataFile) -> Any:
    """A memory-mapped `datasets.Dataset` of an Arrow file or a Hub data set; its images stay the bytes that they are.

    Raises:
        OSError, ValueError: If an Arrow file cannot be read.
    """
    if file.is_hub:
        return _hub_rows(file.path, file.config_name, file.split)
    return _arrow_rows(file.path, os.stat(file.path).st_mtime_ns)


@lru_cache(maxsize=64)
def _arrow_rows(path: str, changed_ns: int) -> Any:
    import pyarrow as pa
    from datasets import Dataset
    from datasets.table import InMemoryTable  # of mapped memory, in this case

    source = pa.memory_map(path)
    try:
        table = pa.ipc.open_stream(source).read_all()
    except pa.ArrowInvalid:  # the other format of Arrow files
        source.seek(0)
        table = pa.ipc.open_file(source).read_all()
    names = table.column_names
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"the column {repeated[0]!r} appears twice")
    return Dataset(InMemoryTable(table), fingerprint=f"{changed_ns}")


@lru_cache(maxsize=4)
def _hub_rows(name: str, config_name: str | None, split: str) -> Any:
    """A Hub data set's split as a memory-mapped `datasets.Dataset`."""
    from datasets import load_dataset

    return load_dataset(name, config_name, split=split)
