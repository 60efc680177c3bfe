"""Rows of CSV, TSV and Parquet files and of Hub data sets. Imports no torch."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO

from trainers.config import ConfigError
from trainers.data.files import DataFile, hub_rows
from trainers.data.shards import ROW_BYTES, Bad, Item, Shard, content_end, group, large, lines

HUB_ROWS = 10_000  # rows of a Hub data set per shard


def _csv_records(
    stream: BinaryIO, start: int, end: int, line: int, delimiter: str
) -> Iterator[tuple[int, int, list[str] | Bad]]:
    """Rows of a CSV file with their offsets. The text is Latin-1 at this stage: one character per byte."""
    used = [start, line]

    def feed() -> Iterator[str]:
        for _, number, content in lines(stream, start, end, line):
            used[:] = [stream.tell(), number + 1]
            yield "x" * (ROW_BYTES + 2) if content is None else content.decode("latin-1")

    csv.field_size_limit(ROW_BYTES)
    rows = csv.reader(feed(), delimiter=delimiter)
    while True:
        offset, number = used
        try:
            yield offset, number, next(rows)
        except StopIteration:
            return
        except csv.Error as error:
            yield offset, number, large() if "field limit" in str(error) else Bad("broken CSV", str(error)[:100])


def _delimiter(file: DataFile) -> str:
    return "," if file.kind == "csv" else "\t"


def csv_cuts(file: DataFile, shard_bytes: int) -> Iterator[Shard]:
    """Shards of a CSV or TSV file: it is parsed once for its borders, since a quoted field may hold newlines."""
    with open(file.path, "rb") as stream:
        end = content_end(stream, file.size, b"\r\n")
        records = _csv_records(stream, 0, end, 1, _delimiter(file))
        first = next(records, None)
        if first is None:
            return
        try:
            names = [] if isinstance(first[2], Bad) else first[2]
            header = tuple(name.encode("latin-1").decode("utf-8").strip() for name in names)
        except UnicodeDecodeError:
            header = ()
        if not header or len(set(header)) < len(header):
            raise ConfigError(f"{file.shown}: its first line must be the column names, each once, in UTF-8; add it")
        yield from group(file, ((offset, line, None) for offset, line, _ in records), end, shard_bytes, header)


def read_csv(shard: Shard, sample_by: str, wanted: list[str]) -> Iterator[Item]:
    """The rows of a CSV or TSV shard."""
    with open(shard.file.path, "rb") as stream:
        records = _csv_records(stream, shard.start, shard.end, shard.line, _delimiter(shard.file))
        for _, line, fields in records:
            yield line, fields if isinstance(fields, Bad) else _csv_row(fields, shard.header)


def _csv_row(fields: list[str], header: tuple[str, ...]) -> dict[str, Any] | Bad:
    if not fields:
        return Bad("empty line", "a blank line between rows")
    if len(fields) != len(header):
        return Bad("wrong number of columns", f"{len(fields)} and not {len(header)}; check its quotes")
    if sum(map(len, fields)) > ROW_BYTES:
        return large()
    try:
        return {
            name: field if field.isascii() else field.encode("latin-1").decode("utf-8")
            for name, field in zip(header, fields, strict=True)
        }
    except UnicodeDecodeError as error:
        return Bad("invalid UTF-8", f"byte 0x{error.object[error.start]:02x}; save the file as UTF-8")


def _even_cuts(file: DataFile, counts: Iterable[int]) -> Iterator[Shard]:
    start = 0
    for count in counts:
        if count:
            yield Shard(file, start, start + count, start + 1, 0, count)
        start += count


def hub_cuts(file: DataFile) -> Iterator[Shard]:
    """Shards of `HUB_ROWS` rows."""
    return _even_cuts(file, [min(HUB_ROWS, file.size - start) for start in range(0, file.size, HUB_ROWS)])


def parquet_cuts(file: DataFile, shard_bytes: int) -> Iterator[Shard]:
    """Shards of a Parquet file: row groups joined up to `shard_bytes`."""
    import pyarrow.parquet as pq

    counts, size = [], shard_bytes
    metadata = pq.ParquetFile(file.path).metadata
    for index in range(metadata.num_row_groups):
        group = metadata.row_group(index)
        if size >= shard_bytes:
            counts.append(0)
            size = 0
        counts[-1] += group.num_rows
        size += group.total_byte_size
    return _even_cuts(file, counts)


def read_parquet(shard: Shard, sample_by: str, wanted: list[str]) -> Iterator[Item]:
    """The rows of a Parquet shard, a few megabytes at a time."""
    import pyarrow.parquet as pq

    with pq.ParquetFile(shard.file.path, memory_map=True, pre_buffer=False) as parquet:
        columns = [name for name in wanted if name in parquet.schema_arrow.names] or None
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
                yield number, value
                number += 1


def read_hub(shard: Shard, sample_by: str, wanted: list[str]) -> Iterator[Item]:
    """The rows of a shard of a Hub data set."""
    data = hub_rows(shard.file.path, shard.file.config_name, shard.file.split)
    columns = [name for name in wanted if name in data.column_names]
    data = data.select_columns(columns) if columns else data
    for start in range(shard.start, shard.end, 100):
        block = data[start : min(start + 100, shard.end)]
        for index, values in enumerate(zip(*block.values(), strict=True)):
            yield start + index + 1, dict(zip(block, values, strict=True))
