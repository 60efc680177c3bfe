"""Pieces of a run's log by byte offset: the end first, older or newer ones on demand, and where the next error is.

Every answer is bounded, whatever the log holds. Texts are plain: without ANSI codes and other control characters.
"""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any, NamedTuple

from app.console import clean
from app.runs.safe_read import read_span, stamp
from app.runs.runs import world_size
from trainers.config.options import ConfigError
from trainers.run.folder import RunFolder

PIECE = 1 << 16
"""Bytes of the log that one answer covers; more where a filter leaves most of them out."""
LOOK = 1 << 20
"""Bytes that one call looks through for a rank's lines, an error or a word."""
LONGEST = 2000
"""Letters of a line that are shown."""
MOST_LINES = 1000
RESTED = 2.0
"""Seconds after which a line without an end is shown: its writer is gone or waits."""
_HEAD = re.compile(rb"^(\d{4}-\d\d-\d\dT[\d:.]+)\S* \[(launcher|rank (\d{1,6})|supervisor)\] ?")
_ERROR = re.compile(
    rb"Traceback \(most recent call last\)|^(?:\[rank\d+\]: ?)?[A-Za-z_.]*[a-z](?:Error|Exception)\b"
    rb"|\b(?:ERROR|FATAL|CRITICAL)\b|\b[Ee]rror:|[Oo]ut of memory|\(exitcode: -?\d|died with <|was killed by"
    rb"|[Ss]egmentation fault"
)
_HINT = re.compile(rb"rror|ERROR|ception|raceback|FATAL|CRITICAL|ut of memory|exitcode|died with|killed by|ation fault")
_FRAME = re.compile(rb"^(?:\[rank\d+\]: ?)?\s*File \"[^\"]*\", line \d")


class Line(NamedTuple):
    """A line of a log: its offset, time, writer (`launcher`, a rank's number, or nothing), text, and what it tells."""

    at: int
    time: str
    who: str
    text: str
    error: bool


def log_piece(run: RunFolder, asked: Any) -> dict[str, Any]:
    """A piece of the log.

    Args:
        run: the run.
        asked: one of `after` (offset: what follows it; -1, or more than a piece behind the end: the end), `before`
            (offset: what stands ahead of it); and `who`: empty for all, `launcher`, or the number of a rank.

    Returns:
        `lines` (of `Line`), `start` and `end` of the bytes that they cover, `size`
        of the log, and `jumped` when the piece does not follow `after`.

    Raises:
        ConfigError: for an offset or a rank that is none.
    """
    asked = asked if isinstance(asked, dict) else {}
    who, found = _who(asked.get("who")), stamp(run.log)
    size = found[2] if found else 0
    if asked.get("before") is not None:
        return _before(run.log, min(_offset(asked["before"], "before"), size), size, who) | {"jumped": False}
    after = asked.get("after", -1)
    if after == -1 or size < _offset(after, "after"):
        return _before(run.log, size, size, who, last=True) | {"jumped": True}
    piece = _after(run.log, after, size, who)
    behind = size - piece["end"] > PIECE and asked.get("follow") is True
    return _before(run.log, size, size, who, last=True) | {"jumped": True} if behind else piece | {"jumped": False}


def _offset(value: Any, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**53:
        raise ConfigError(f"{name}={str(value)[:40]!r} is no place in a log; give a number of bytes, 0 or more")
    return value


def _who(value: Any) -> bytes | None:
    if value in (None, ""):
        return None
    text = str(value)[:40]
    if text in ("launcher", "supervisor") or (text.isascii() and text.isdigit() and len(text) <= 6):
        return text.encode()
    raise ConfigError(f"who={text!r} is no writer of a log; use launcher, or the number of a rank")


def _after(path: Path, offset: int, size: int, who: bytes | None) -> dict[str, Any]:
    """Whole lines from an offset on, until a piece is full or enough was looked through."""
    lines: list[Line] = []
    start = end = offset
    while end < size and end - start < LOOK and len(lines) < MOST_LINES:
        data, _ = read_span(path, end, PIECE)
        whole = _whole(path, data)
        if not whole:
            break
        some = _lines(whole, end, who, MOST_LINES - len(lines))
        lines += some[0]
        end = some[1]
        if who is None:
            break
    return {"lines": lines, "start": start, "end": end, "size": size}


def _whole(path: Path, data: bytes) -> bytes:
    """The lines that have an end; a full piece of a line that is longer; and what a writer left that is gone."""
    cut = data.rfind(b"\n") + 1
    if cut == len(data) or len(data) == PIECE:
        return data[: cut or PIECE]
    changed = stamp(path)
    rests = changed is not None and time.time() - changed[1] / 1e9 > RESTED
    return data if rests else data[:cut]


def _before(path: Path, end: int, size: int, who: bytes | None, last: bool = False) -> dict[str, Any]:
    """Whole lines ahead of an offset. `last`: the offset is the log's end, where a line may be half written."""
    lines: list[Line] = []
    start, stop = end, end
    while start > 0 and stop - start < (LOOK if who else 1) and len(lines) < MOST_LINES:
        begin = max(0, start - PIECE)
        data, _ = read_span(path, begin, start - begin)
        skip = 0 if begin == 0 else data.find(b"\n") + 1
        if begin > 0 and skip == len(data):
            skip = 0  # one line that is longer than a piece, or only its end
        data = data[skip:]
        if last and not lines and start == end:
            data = _whole(path, data) or data[:0]
            stop = begin + skip + len(data)
            end = stop
        if who is None and data.count(b"\n") > MOST_LINES:
            surplus = len(data.rsplit(b"\n", MOST_LINES + 1)[0]) + 1
            skip, data = skip + surplus, data[surplus:]
        some, _ = _lines(data, begin + skip, who, None)
        lines = some[-(MOST_LINES - len(lines)) :] + lines
        start = begin + skip
        if len(lines) >= MOST_LINES:
            start = lines[0].at
    return {"lines": lines, "start": start, "end": stop, "size": size}


def _lines(data: bytes, offset: int, who: bytes | None, most: int | None) -> tuple[list[Line], int]:
    """The lines of a piece that are of `who`, and the offset behind the last one that was looked at."""
    end = offset + len(data)
    if who is not None and b" [" + who + b"] " not in data and b" [rank " + who + b"]" not in data:
        return [], end
    made: list[Line] = []
    for part in data.split(b"\n"):  # and not by carriage returns, which only draw over what stands before
        if most is not None and len(made) >= most:
            return made, offset
        head = _HEAD.match(part)
        ours = who is None or (head is not None and (head[3] or head[2]) == who)
        if ours and (part or offset < end - 1):
            made.append(_line(part, head, offset))
        offset += len(part) + 1
    return made, end


def _line(raw: bytes, head: re.Match[bytes] | None, offset: int) -> Line:
    text = (raw[head.end() :] if head else raw).rstrip(b"\r")
    shown = text.rpartition(b"\r")[2]
    words = clean(shown[: 4 * LONGEST].decode("utf-8", "replace"))
    if len(words) > LONGEST or len(shown) > 4 * LONGEST:
        words = f"{words[:LONGEST]} … ({len(shown):,} bytes in this line)"
    when, who = (head[1].decode()[:19], (head[3] or head[2]).decode()) if head else ("", "")
    return Line(offset, when, who, words, is_error(shown[:LONGEST]) or bool(_FRAME.search(shown[:LONGEST])))


def is_error(text: bytes) -> bool:
    """Whether a line, without its time and rank, tells of an error."""
    return bool(_HINT.search(text) and _ERROR.search(text))


def find_in_log(run: RunFolder, asked: Any) -> dict[str, Any]:
    """The next or the previous line with an error, or with a text.

    Args:
        run: the run.
        asked: `start` (offset that the search begins at; within a line, after that one), `back` (towards the log's
            start), `who` as in `log_piece`, and `words` (a text, whatever its case; empty for errors).

    Returns:
        `at`: offset of the line, or None; `searched`: the offset that the search came to; `more`: whether to call again
        from there.

    Raises:
        ConfigError: for an offset or a rank that is none.
    """
    asked = asked if isinstance(asked, dict) else {}
    who, words = _who(asked.get("who")), str(asked.get("words") or "")[:200].lower().encode(errors="replace")
    found = stamp(run.log)
    size = found[2] if found else 0
    start = min(_offset(asked.get("start", 0), "start"), size)
    back = asked.get("back") is True
    begin, end = (max(0, start - LOOK), start) if back else (max(0, start - 1), min(size, start + LOOK))
    data, _ = read_span(run.log, begin, end - begin)
    if begin > 0 and 0 < (cut := data.find(b"\n") + 1) < len(data):
        data, begin = data[cut:], begin + cut
    if not back and end < size and (cut := data.rfind(b"\n") + 1):
        data, end = data[:cut], begin + cut
    at = _match(data, who, words, back)
    return {
        "at": None if at is None else begin + at,
        "searched": begin if back else end,
        "more": at is None and (begin > 0 if back else end < size),
    }


def _match(data: bytes, who: bytes | None, words: bytes, back: bool) -> int | None:
    """Place of the first (or last) line that is looked for."""
    found = None
    for place in _places(data, words):
        begin = data.rfind(b"\n", 0, place) + 1
        end = data.find(b"\n", place)
        raw = data[begin : end if end >= 0 else len(data)]
        head = _HEAD.match(raw)
        if who is not None and (not head or (head[3] or head[2]) != who):
            continue
        if words or is_error(raw[head.end() if head else 0 :]):
            if not back:
                return begin
            found = begin
    return found


def _places(data: bytes, words: bytes) -> Any:
    """Where a line may stand that is looked for, at most once per line."""
    low, at = data.lower() if words else data, 0
    while True:
        if words:
            place = low.find(words, at)
        else:
            hint = _HINT.search(data, at)
            place = hint.start() if hint else -1
        if place < 0:
            return
        yield place
        end = data.find(b"\n", place)
        if end < 0:
            return
        at = end + 1


def log_writers(run: RunFolder) -> list[int]:
    """Numbers of the ranks that may have written to the log."""
    return list(range(min(world_size(run) or 0, 1024)))
