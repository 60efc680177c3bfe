"""Rows of plain text files: lines, paragraphs or whole documents. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO

from trainers.data.data_file import DataFile
from trainers.data.open_file import open_file
from trainers.data.shards import BOM, ROW_BYTES, BadRow, FileShard, Item, Record, content_end, group, lines, too_large


def _text_records(stream: BinaryIO, start: int, end: int, line: int, sample_by: str) -> Iterator[Record]:
    if sample_by == "document":
        yield start, line, stream.read(end) if end <= ROW_BYTES else None
    elif sample_by == "paragraph":
        yield from _paragraphs(lines(stream, start, end, line))
    else:
        yield from (record for record in lines(stream, start, end, line) if record[2] is None or record[2].strip())


def _paragraphs(records: Iterable[Record]) -> Iterator[Record]:
    """Joins the lines between blank lines into one record, holding at most `ROW_BYTES` of it in memory."""
    paragraph: list[bytes] = []
    first, number, size = 0, 0, 0
    for offset, line, content in records:
        if content is not None and not content.strip():
            if size:
                yield first, number, b"".join(paragraph) if size <= ROW_BYTES else None
            paragraph, size = [], 0
            continue
        if not size:
            first, number = offset, line
        size += ROW_BYTES + 1 if content is None else len(content)
        if content is not None and size <= ROW_BYTES:
            paragraph.append(content)
    if size:
        yield first, number, b"".join(paragraph) if size <= ROW_BYTES else None


def shard_text(file: DataFile, sample_by: str, shard_bytes: int) -> Iterator[FileShard]:
    """Shards of a text file, split between documents."""
    with open_file(file) as stream:
        end = content_end(stream, file)
        if end:
            stream.seek(0)
            yield from group(file, _text_records(stream, 0, end, 1, sample_by), end, shard_bytes)


def read_text(shard: FileShard, sample_by: str, wanted: list[str]) -> Iterator[Item]:
    """The documents of a text shard, each as a row with `text`."""
    with open_file(shard.file, shard.end) as stream:
        for _, line, content in _text_records(stream, shard.start, shard.end, shard.line, sample_by):
            yield line, too_large() if content is None else _text_row(content)


def _text_row(content: bytes) -> dict[str, Any] | BadRow:
    try:
        text = content.removeprefix(BOM).decode("utf-8")
    except UnicodeDecodeError as error:
        return BadRow("invalid UTF-8", f"byte 0x{content[error.start]:02x}; save the file as UTF-8")
    return {"text": text.replace("\r\n", "\n").rstrip("\r\n")}
