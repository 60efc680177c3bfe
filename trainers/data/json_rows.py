"""Rows of JSONL files and of JSON lists. Imports no torch."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from trainers.config import COLUMN_ROLES, ConfigError
from trainers.data.files import DataFile
from trainers.data.shards import ROW_BYTES, Bad, Item, Record, Shard, content_end, group, large, lines

JSON_BYTES = 512 << 20
_DECODER = json.JSONDecoder()
_BETWEEN = re.compile(r"[\s,]*")


def line_cuts(file: DataFile, shard_bytes: int) -> Iterator[Shard]:
    """Shards of a JSONL file: like `group` over its lines, but counting newlines by the block."""
    with open(file.path, "rb") as stream:
        end = content_end(stream, file.size)
        start, line = 0, 1
        while start < end:
            stream.seek(start)
            block = stream.read(min(shard_bytes, end - start))
            stop, rows = start + len(block), block.count(b"\n")
            while block and not block.endswith(b"\n") and stop < end:
                block = stream.readline(min(1 << 20, end - stop))
                stop += len(block)
                rows += block.endswith(b"\n")
            rows += stop >= end  # the last line has no newline: the content ends before it
            yield Shard(file, start, stop, line, 0, rows)
            start, line = stop, line + rows


def read_lines(shard: Shard, sample_by: str, wanted: list[str]) -> Iterator[Item]:
    """The rows of a JSONL shard."""
    with open(shard.file.path, "rb") as stream:
        for _, line, content in lines(stream, shard.start, shard.end, shard.line):
            yield line, large() if content is None else parse_object(content)


def parse_object(content: bytes) -> dict[str, Any] | Bad:
    """One JSON object from UTF-8 bytes, or what is wrong with it."""
    if not content.strip():
        return Bad("empty line", "a blank line between rows")
    try:
        value = json.loads(content.decode("utf-8"))
    except UnicodeDecodeError as error:
        return Bad("invalid UTF-8", f"byte {error.start + 1} is 0x{content[error.start]:02x}; save the file as UTF-8")
    except json.JSONDecodeError as error:
        return Bad("broken JSON", f"{error.msg} at character {error.pos + 1}")
    except RecursionError:
        return Bad("nested too deeply", "JSON within JSON without end")
    except ValueError as error:
        return Bad("broken JSON", str(error)[:100])
    return _object(value)


def _object(value: Any) -> dict[str, Any] | Bad:
    return value if isinstance(value, dict) else Bad("not an object", f"a JSON {type(value).__name__}; write {{...}}")


def list_cuts(file: DataFile, shard_bytes: int) -> Iterator[Shard]:
    """Shards of a `.json` file; the file is held whole meanwhile."""
    if _holds_json_lines(file):
        yield from line_cuts(replace(file, kind="jsonl"), shard_bytes)
        return
    if file.size > JSON_BYTES:
        raise ConfigError(
            f"{file.shown} is one JSON value of {file.size:,} bytes, more than is read at once ({JSON_BYTES:,}); "
            "save it as JSONL, one object per line"
        )
    with open(file.path, "rb") as stream:
        content = stream.read()
    if not content.strip():
        return
    try:
        text = content.decode("utf-8")
        position = _list_start(text)
    except (ValueError, RecursionError):
        yield Shard(file, 0, file.size, 1, 0, 1)  # the reader says what is wrong
        return
    offset = len(text[:position].encode())
    line = content[:offset].count(b"\n") + 1
    yield from group(file, _json_records(text, position, offset, line), len(content), shard_bytes)


def _json_records(text: str, position: int, offset: int, line: int) -> Iterator[Record]:
    """Where each item of a JSON list starts; stops at the list's end, or at the first item that is broken."""
    last = position
    while True:
        position = _BETWEEN.match(text, position).end()  # type: ignore[union-attr]
        offset += len(text[last:position].encode())
        line += text.count("\n", last, position)
        last = position
        if text[position : position + 1] == "]":
            return
        yield offset, line, None
        try:
            position = _DECODER.raw_decode(text, position)[1]
        except (ValueError, RecursionError):
            return


def _holds_json_lines(file: DataFile) -> bool:
    """Whether a `.json` file is JSONL in truth: its first line is an object and another line follows."""
    with open(file.path, "rb") as stream:
        records = lines(stream, 0, content_end(stream, file.size), 1)
        first, second = next(records, None), next(records, None)
    return bool(first and second and first[2] and isinstance(parse_object(first[2]), dict))


def _list_start(text: str) -> int:
    """The position after the opening bracket of the rows.

    Raises:
        ValueError: when the text is neither a list nor an object with one list.
    """
    start = len(text) - len(text.lstrip("\ufeff \t\r\n"))
    if text[start] == "[":
        return start + 1
    value = _DECODER.raw_decode(text, start)[0]
    lists = [key for key, item in value.items() if isinstance(item, list)] if isinstance(value, dict) else []
    if len(lists) == 1 and lists[0] not in COLUMN_ROLES:
        for match in re.finditer(re.escape(json.dumps(lists[0], ensure_ascii=False)) + r"\s*:\s*\[", text):
            if _DECODER.raw_decode(text, match.end() - 1)[0] == value[lists[0]]:
                return match.end()
    raise ValueError("no list of rows")


def read_list(shard: Shard, sample_by: str, wanted: list[str]) -> Iterator[Item]:
    """The rows of a shard of a JSON list."""
    with open(shard.file.path, "rb") as stream:
        stream.seek(shard.start)
        content = stream.read(shard.end - shard.start)
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = shard.line + content.count(b"\n", 0, error.start)
        yield line, Bad("invalid UTF-8", f"byte 0x{content[error.start]:02x}; save the file as UTF-8")
        return
    position, line = int(text.startswith("\ufeff")), shard.line
    while True:
        after = _BETWEEN.match(text, position).end()  # type: ignore[union-attr]
        line += text.count("\n", position, after)
        item, position = _json_item(text, after)
        yield line, item
        if isinstance(item, Bad) and position == after:
            return
        line += text.count("\n", after, position)


def _json_item(text: str, position: int) -> tuple[dict[str, Any] | Bad, int]:
    """The item at a position and where it ends; a broken one ends where it starts."""
    try:
        value, end = _DECODER.raw_decode(text, position)
    except RecursionError:
        return Bad("nested too deeply", "JSON within JSON without end; the rest of the file is not read"), position
    except ValueError as error:
        return Bad("broken JSON", f"{str(error)[:100]}; the rest of the file is not read"), position
    return (large() if end - position > ROW_BYTES else _object(value)), end
