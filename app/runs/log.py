"""Reads a run's log by byte offset: its end first, older or newer chunks on demand, and searches it for errors or text.

Every answer is bounded in size, whatever the log contains. Text is returned without ANSI codes and control characters.
"""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any, NamedTuple

from app.console import clean
from app.runs.runs import world_size
from app.runs.safe_read import read_span, stamp
from trainers.config.mistakes import ConfigError
from trainers.run.folder import RunFolder

CHUNK_BYTES = 1 << 16
"""Bytes of the log that one answer covers; more where a filter drops most of them."""
SEARCH_BYTES = 1 << 20
"""Bytes that one call searches for a rank's lines, an error or a text."""
MAX_LINE_LENGTH = 2000
"""Characters shown of a line."""
MAX_LINES = 1000
IDLE_SECONDS = 2.0
"""Seconds after which a line without a line end is shown: its writer is gone or waiting."""
_HEAD = re.compile(rb"^(\d{4}-\d\d-\d\dT[\d:.]+)\S* \[(launcher|rank (\d{1,6})|supervisor)\] ?")
_ERROR = re.compile(
    rb"Traceback \(most recent call last\)|^(?:\[rank\d+\]: ?)?[A-Za-z_.]*[a-z](?:Error|Exception)\b"
    rb"|\b(?:ERROR|FATAL|CRITICAL)\b|\b[Ee]rror:|[Oo]ut of memory|\(exitcode: -?\d|died with <|was killed by"
    rb"|[Ss]egmentation fault"
)
_HINT = re.compile(rb"rror|ERROR|ception|raceback|FATAL|CRITICAL|ut of memory|exitcode|died with|killed by|ation fault")
_FRAME = re.compile(rb"^(?:\[rank\d+\]: ?)?\s*File \"[^\"]*\", line \d")


class Line(NamedTuple):
    """A line of a log; `offset` is in bytes, `writer` is `launcher`, `supervisor`, the number of a rank, or empty."""

    offset: int
    time: str
    writer: str
    text: str
    error: bool


def read_log(run: RunFolder, request: Any) -> dict[str, Any]:
    """Reads a chunk of the log.

    Args:
        run: the run.
        request: `after` (offset to read on from; -1 for the end of the log) or `before` (offset to read back from);
            `follow` (with `after`: skip to the end when more than a chunk behind); `who`: empty for all writers,
            `launcher`, `supervisor`, or a rank.

    Returns:
        `lines` (of `Line`), `start` and `end` of the bytes they cover, `size` of the log, and `jumped` when the chunk
        does not directly follow `after`.

    Raises:
        ConfigError: for an invalid offset or writer.
    """
    request = request if isinstance(request, dict) else {}
    writer, status = _parse_writer(request.get("who")), stamp(run.log)
    size = status[2] if status else 0
    if request.get("before") is not None:
        return _read_before(run.log, min(_parse_offset(request["before"], "before"), size), size, writer) | {
            "jumped": False
        }
    after = request.get("after", -1)
    if after == -1 or size < _parse_offset(after, "after"):
        return _read_before(run.log, size, size, writer, last=True) | {"jumped": True}
    newer = _read_after(run.log, after, size, writer)
    behind = size - newer["end"] > CHUNK_BYTES and request.get("follow") is True
    return (
        _read_before(run.log, size, size, writer, last=True) | {"jumped": True} if behind else newer | {"jumped": False}
    )


def _parse_offset(value: Any, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**53:
        raise ConfigError(f"{name}={str(value)[:40]!r} is not an offset in the log; give a number of bytes, 0 or more")
    return value


def _parse_writer(value: Any) -> bytes | None:
    if value in (None, ""):
        return None
    text = str(value)[:40]
    if text in ("launcher", "supervisor") or (text.isascii() and text.isdigit() and len(text) <= 6):
        return text.encode()
    raise ConfigError(f"who={text!r} does not write to the log; use launcher, supervisor or the number of a rank")


def _read_after(path: Path, offset: int, size: int, writer: bytes | None) -> dict[str, Any]:
    """Complete lines from an offset on, until a chunk is full or `SEARCH_BYTES` were searched."""
    lines: list[Line] = []
    start = end = offset
    while end < size and end - start < SEARCH_BYTES and len(lines) < MAX_LINES:
        data, _ = read_span(path, end, CHUNK_BYTES)
        complete = _complete_lines(path, data)
        if not complete:
            break
        parsed, end = _parse_lines(complete, end, writer, MAX_LINES - len(lines))
        lines += parsed
        if writer is None:
            break
    return {"lines": lines, "start": start, "end": end, "size": size}


def _complete_lines(path: Path, data: bytes) -> bytes:
    """The lines with a line end; a full chunk of a longer line; or an unfinished line whose writer is idle."""
    end = data.rfind(b"\n") + 1
    if end == len(data) or len(data) == CHUNK_BYTES:
        return data[: end or CHUNK_BYTES]
    status = stamp(path)
    idle = status is not None and time.time() - status[1] / 1e9 > IDLE_SECONDS
    return data if idle else data[:end]


def _read_before(path: Path, end: int, size: int, writer: bytes | None, last: bool = False) -> dict[str, Any]:
    """Complete lines before an offset. `last`: the offset is the end of the log, where a line may be half written."""
    lines: list[Line] = []
    start, stop = end, end
    while start > 0 and stop - start < (SEARCH_BYTES if writer else 1) and len(lines) < MAX_LINES:
        begin = max(0, start - CHUNK_BYTES)
        data, _ = read_span(path, begin, start - begin)
        skip = 0 if begin == 0 else data.find(b"\n") + 1
        if begin > 0 and skip == len(data):
            skip = 0  # one line that is longer than a chunk, or only its end
        data = data[skip:]
        # At the end of the log, leave a line that is still being written for the next call.
        if last and not lines and start == end:
            data = _complete_lines(path, data) or data[:0]
            stop = begin + skip + len(data)
            end = stop
        # Without a filter, only the last MAX_LINES lines are needed: drop the others before parsing them.
        if writer is None and data.count(b"\n") > MAX_LINES:
            surplus = len(data.rsplit(b"\n", MAX_LINES + 1)[0]) + 1
            skip, data = skip + surplus, data[surplus:]
        parsed, _ = _parse_lines(data, begin + skip, writer, None)
        lines = parsed[-(MAX_LINES - len(lines)) :] + lines
        start = begin + skip
        if len(lines) >= MAX_LINES:
            start = lines[0].offset
    return {"lines": lines, "start": start, "end": stop, "size": size}


def _parse_lines(data: bytes, offset: int, writer: bytes | None, limit: int | None) -> tuple[list[Line], int]:
    """The lines of `writer` in a chunk, and the offset after the last line parsed."""
    end = offset + len(data)
    if writer is not None and b" [" + writer + b"] " not in data and b" [rank " + writer + b"]" not in data:
        return [], end
    lines: list[Line] = []
    for raw in data.split(b"\n"):  # not at carriage returns, which only overwrite the line (progress bars)
        if limit is not None and len(lines) >= limit:
            return lines, offset
        head = _HEAD.match(raw)
        selected = writer is None or (head is not None and (head[3] or head[2]) == writer)
        if selected and (raw or offset < end - 1):
            lines.append(_parse_line(raw, head, offset))
        offset += len(raw) + 1
    return lines, end


def _parse_line(raw: bytes, head: re.Match[bytes] | None, offset: int) -> Line:
    content = (raw[head.end() :] if head else raw).rstrip(b"\r")
    visible = content.rpartition(b"\r")[2]  # what a terminal would show of a line redrawn by carriage returns
    text = clean(visible[: 4 * MAX_LINE_LENGTH].decode("utf-8", "replace"))
    if len(text) > MAX_LINE_LENGTH or len(visible) > 4 * MAX_LINE_LENGTH:
        text = f"{text[:MAX_LINE_LENGTH]} … ({len(visible):,} bytes in this line)"
    when, writer = (head[1].decode()[:19], (head[3] or head[2]).decode()) if head else ("", "")
    start = visible[:MAX_LINE_LENGTH]
    return Line(offset, when, writer, text, is_error(start) or bool(_FRAME.search(start)))


def is_error(text: bytes) -> bool:
    """Whether a line, without its time and rank, reports an error."""
    return bool(_HINT.search(text) and _ERROR.search(text))


def find_in_log(run: RunFolder, request: Any) -> dict[str, Any]:
    """Finds the next or previous line with an error, or with a text.

    Args:
        run: the run.
        request: `start` (offset to search from; inside a line, the search begins after it), `back` (search towards the
            start of the log), `who` as in `read_log`, and `words` (a text, case-insensitive; empty for errors).

    Returns:
        `at`: offset of the line, or None; `searched`: offset that the search reached; `more`: whether to call again
        from there.

    Raises:
        ConfigError: for an invalid offset or writer.
    """
    request = request if isinstance(request, dict) else {}
    writer = _parse_writer(request.get("who"))
    search = str(request.get("words") or "")[:200].lower().encode(errors="replace")
    status = stamp(run.log)
    size = status[2] if status else 0
    start = min(_parse_offset(request.get("start", 0), "start"), size)
    back = request.get("back") is True
    begin, end = (max(0, start - SEARCH_BYTES), start) if back else (max(0, start - 1), min(size, start + SEARCH_BYTES))
    data, _ = read_span(run.log, begin, end - begin)
    # Search complete lines only: trim the partial ones at both ends of the window.
    if begin > 0 and 0 < (line_end := data.find(b"\n") + 1) < len(data):
        data, begin = data[line_end:], begin + line_end
    if not back and end < size and (line_end := data.rfind(b"\n") + 1):
        data, end = data[:line_end], begin + line_end
    match = _find_line(data, writer, search, back)
    return {
        "at": None if match is None else begin + match,
        "searched": begin if back else end,
        "more": match is None and (begin > 0 if back else end < size),
    }


def _find_line(data: bytes, writer: bytes | None, search: bytes, back: bool) -> int | None:
    """Position of the first (`back`: last) line that matches."""
    last = None
    for position in _candidates(data, search):
        begin = data.rfind(b"\n", 0, position) + 1
        end = data.find(b"\n", position)
        raw = data[begin : end if end >= 0 else len(data)]
        head = _HEAD.match(raw)
        if writer is not None and (not head or (head[3] or head[2]) != writer):
            continue
        if search or is_error(raw[head.end() if head else 0 :]):
            if not back:
                return begin
            last = begin
    return last


def _candidates(data: bytes, search: bytes) -> Any:
    """Positions of possible matches, at most one per line."""
    haystack, start = data.lower() if search else data, 0
    while True:
        if search:
            position = haystack.find(search, start)
        else:
            hint = _HINT.search(data, start)
            position = hint.start() if hint else -1
        if position < 0:
            return
        yield position
        end = data.find(b"\n", position)
        if end < 0:
            return
        start = end + 1


def log_writers(run: RunFolder) -> list[int]:
    """The ranks that may have written to the log."""
    return list(range(min(world_size(run) or 0, 1024)))
