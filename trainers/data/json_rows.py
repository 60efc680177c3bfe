"""Rows of JSONL and `.json` files: lists, concatenated objects, or an object that wraps a list of rows."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from trainers.config.mistakes import ConfigError
from trainers.config.objectives import FORMAT_COLUMNS
from trainers.config.strict_json import STRICT, DuplicateKey
from trainers.data.data_file import DataFile
from trainers.data.open_file import open_file
from trainers.data.shards import ROW_BYTES, BadRow, FileShard, Item, changed, content_end, lines, too_large

JSON_BYTES = 512 << 20
_BLOCK = 16 << 20
_BETWEEN = re.compile(r"[\s,]*")
_COLON = re.compile(r"\s*:\s*")


_LENIENT = json.JSONDecoder()  # finds the end of a value even if it has duplicate keys


def shard_lines(file: DataFile, shard_bytes: int) -> Iterator[FileShard]:
    """Shards of a JSONL file: as `group` over its lines would, but newlines are counted a block at a time."""
    with open_file(file) as stream:
        end = content_end(stream, file)
        start, line = 0, 1
        while start < end:
            stream.seek(start)
            stop, rows, block = start, 0, b""
            while stop < min(start + shard_bytes, end):  # a shard of a compressed file may be large
                if not (block := stream.read(min(_BLOCK, start + shard_bytes - stop, end - stop))):
                    raise changed(file.display_name)
                stop, rows = stop + len(block), rows + block.count(b"\n")
            # Extend it to the end of its last line.
            while block and not block.endswith(b"\n") and stop < end:
                block = stream.readline(min(1 << 20, end - stop))
                stop += len(block)
                rows += block.endswith(b"\n")
            rows += stop >= end  # the last line has no newline: the content ends before it
            yield FileShard(file, start, stop, line, 0, rows)
            start, line = stop, line + rows


def read_lines(shard: FileShard, sample_by: str, wanted: list[str]) -> Iterator[Item]:
    """The rows of a JSONL shard."""
    with open_file(shard.file, shard.end) as stream:
        for _, line, content in lines(stream, shard.start, shard.end, shard.line):
            yield line, too_large() if content is None else parse_object(content)


def parse_object(content: bytes) -> dict[str, Any] | BadRow:
    """One JSON object from UTF-8 bytes, or what is wrong with it."""
    if not content.strip():
        return BadRow("empty line", "a blank line between rows")
    try:
        value = STRICT.decode(content.decode("utf-8"))
    except UnicodeDecodeError as error:
        return BadRow(
            "invalid UTF-8", f"byte {error.start + 1} is 0x{content[error.start]:02x}; save the file as UTF-8"
        )
    except json.JSONDecodeError as error:
        return BadRow("broken JSON", f"{error.msg} at character {error.pos + 1}; a row is a JSON object on one line")
    except DuplicateKey as error:
        return _duplicate_key(error)
    except RecursionError:
        return BadRow("nested too deeply", "too many levels of JSON")
    except ValueError:
        return _long_number()
    return _object(value)


def _duplicate_key(error: DuplicateKey) -> BadRow:
    return BadRow("duplicate key", f"{error.key[:100]!r} appears twice in one object; keep one of them")


def _long_number() -> BadRow:
    """For the only other reason for which Python does not read JSON."""
    return BadRow("broken JSON", f"a number has over {sys.get_int_max_str_digits():,} digits; make it text")


def _object(value: Any) -> dict[str, Any] | BadRow:
    return (
        value if isinstance(value, dict) else BadRow("not an object", f"a JSON {type(value).__name__}; write {{...}}")
    )


def shard_list(file: DataFile, shard_bytes: int, columns: Mapping[str, str]) -> Iterator[FileShard]:
    """Shards of a `.json` file whose rows have these `columns`; the whole file is held in memory meanwhile."""
    if _holds_json_lines(file):
        yield from shard_lines(replace(file, kind="jsonl"), shard_bytes)
        return
    if file.size > JSON_BYTES:
        raise ConfigError(
            f"{file.display_name} is not one object per line and has {file.size:,} bytes, more than can be read at "
            f"once ({JSON_BYTES:,}); save it as JSONL, one object per line"
        )
    with open_file(file) as stream:
        content = stream.read()
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError:
        yield FileShard(file, 0, file.size, 1, 0, 1)  # the reader reports the error
        return
    shard: FileShard | None = None
    rows = 0
    wrapper = _wrapper(text, columns)
    siblings = wrapper.siblings if wrapper else ()
    for offset, line, in_list in _records(text, wrapper):
        if shard and offset - shard.start >= shard_bytes:
            yield replace(shard, end=offset, rows=rows)
            shard, siblings = None, ()
        if shard is None:
            shard, rows = FileShard(file, offset, offset, line, 0, 0, in_list=in_list, siblings=siblings), 0
        rows += 1
    if shard:
        yield replace(shard, end=len(content), rows=rows)


def _records(text: str, wrapper: _Wrapper | None) -> Iterator[tuple[int, int, bool]]:
    """Offset and line of each row, and whether it is in a list; stops after the first that cannot be parsed."""
    position = wrapper.start if wrapper else int(text.startswith("\ufeff"))
    # Positions are in characters, offsets in bytes; both advance together, as encoding from the start would be slow.
    offset, line, last = len(text[:position].encode()), 1 + text.count("\n", 0, position), position
    in_list = wrapper is not None
    while True:
        position, in_list, closed = _next_row(text, position, in_list)
        if (wrapper and closed) or (position == len(text) and not in_list):
            return
        offset += len(text[last:position].encode())
        line += text.count("\n", last, position)
        last = position
        yield offset, line, in_list
        try:
            position = _LENIENT.raw_decode(text, position)[1]
        except (ValueError, RecursionError):
            return


def _next_row(text: str, position: int, in_list: bool) -> tuple[int, bool, bool]:
    """Where the next row starts, whether it is in a list, and whether a list was closed before it."""
    closed = False
    while True:
        position = _BETWEEN.match(text, position).end()  # type: ignore[union-attr]
        if text[position : position + 1] != ("]" if in_list else "["):
            return position, in_list, closed
        closed = closed or in_list
        in_list = not in_list
        position += 1


def _holds_json_lines(file: DataFile) -> bool:
    """Whether a `.json` file is really JSONL: its first line is an object and another line follows."""
    with open_file(file) as stream:
        records = lines(stream, 0, content_end(stream, file), 1)
        first, second = next(records, None), next(records, None)
    if not (first and second and first[2]):
        return False
    row = parse_object(first[2])
    return isinstance(row, dict) or row.kind == "duplicate key"


class _Wrapper(NamedTuple):
    """An object around the list of rows: where the list's content starts, and what else the object holds."""

    start: int
    siblings: tuple[str, ...]


def _wrapper(text: str, columns: Mapping[str, str]) -> _Wrapper | None:
    """The object that wraps the rows, if the file is one object that is not itself a row; otherwise None."""
    begin = _BETWEEN.match(text, int(text.startswith("\ufeff"))).end()  # type: ignore[union-attr]
    if text[begin : begin + 1] != "{":
        return None
    try:
        value, end = STRICT.raw_decode(text, begin)
    except (ValueError, RecursionError):
        return None
    rows_key = _rows_key(value, columns) if _BETWEEN.fullmatch(text, end) else None
    if rows_key is None:
        return None
    position = begin + 1
    while True:  # skip members up to the list of rows
        position = _BETWEEN.match(text, position).end()  # type: ignore[union-attr]
        key, position = _LENIENT.raw_decode(text, position)
        position = _COLON.match(text, position).end()  # type: ignore[union-attr]
        if key == rows_key:
            return _Wrapper(position + 1, tuple(name for name in value if name != key))
        position = _LENIENT.raw_decode(text, position)[1]


_OF_ROWS = {role for needed in FORMAT_COLUMNS.values() for role in needed}


def _rows_key(value: dict[str, Any], columns: Mapping[str, str]) -> str | None:
    """The key of the list of rows in the object that wraps them; None if the object is itself a row.

    Decided by the columns that the user named, then by those that a format needs, then by a single list of objects.
    """
    lists = {key: items for key, items in value.items() if isinstance(items, list)}
    of_objects = [key for key, items in lists.items() if any(isinstance(item, dict) for item in items)]
    column_names = set(columns.values())
    if column_names:
        if column_names.intersection(value):
            return None
        holders = [
            key
            for key in of_objects
            if any(isinstance(item, dict) and column_names.intersection(item) for item in lists[key])
        ]
        if len(holders) == 1:
            return holders[0]
    if _OF_ROWS.intersection(value):
        return None
    keys = of_objects or (list(lists) if len(value) == 1 else [])
    return keys[0] if len(keys) == 1 else None


def read_list(shard: FileShard, sample_by: str, wanted: list[str]) -> Iterator[Item]:
    """The rows of a shard of a `.json` file."""
    with open_file(shard.file, shard.end) as stream:
        stream.seek(shard.start)
        content = stream.read(shard.end - shard.start)
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = shard.line + content.count(b"\n", 0, error.start)
        yield line, BadRow("invalid UTF-8", f"byte 0x{content[error.start]:02x}; save the file as UTF-8")
        return
    position, line, in_list = int(text.startswith("\ufeff")), shard.line, shard.in_list
    while True:
        start, in_list, _ = _next_row(text, position, in_list)
        line += text.count("\n", position, start)
        item, position = _item(text, start, in_list)
        yield line, item
        if position == start:
            return
        line += text.count("\n", start, position)


def _item(text: str, position: int, in_list: bool) -> tuple[dict[str, Any] | BadRow, int]:
    """The item at a position and where it ends (where it starts, if the end cannot be determined)."""
    try:
        value, end = STRICT.raw_decode(text, position)
        return (too_large() if end - position > ROW_BYTES else _object(value)), end
    except DuplicateKey as error:
        bad = _duplicate_key(error)
    except RecursionError:
        bad = BadRow("nested too deeply", "too many levels of JSON")
    except json.JSONDecodeError as error:
        bad = BadRow("broken JSON", f"{error.msg} at {text[error.pos : error.pos + 20]!r}")
    except ValueError:
        bad = _long_number()
    try:
        return bad, _LENIENT.raw_decode(text, position)[1]
    except (ValueError, RecursionError):
        if in_list and position == len(text):
            return BadRow("broken JSON", "the list is not closed; is the file truncated?"), position
        return BadRow(bad.kind, f"{bad.detail}; {len(text) - position:,} characters after it are not read"), position
