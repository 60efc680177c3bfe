"""Terminal output: results go to stdout, progress and messages to stderr."""

from __future__ import annotations

import io
import json
import math
import os
import re
import shutil
import sys
from collections.abc import Sequence
from typing import Any

# Escape sequences and other control characters: a log or a model's answer must not control the terminal.
_CONTROL = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?|[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_BIDI = re.compile("[\u202a-\u202e\u2066-\u2069]")

_GAP = 3  # spaces between two columns of a table drawn by rich
_LEAST_CELL = 20
"""Characters below which a shortened cell is no longer useful."""


def clean(text: str) -> str:
    """The text without control characters, except for tabs and line feeds."""
    return _BIDI.sub("", _CONTROL.sub("", text))


def shortened(text: str, most: int = 100) -> str:
    """The text, cut to at most `most` characters with an ellipsis, for use in messages."""
    return text if len(text) <= most else text[: most - 3] + "..."


def say(text: str) -> None:
    """Prints a line on stderr; ignores a terminal that is gone."""
    try:
        print(text, file=sys.stderr, flush=True)
    except (OSError, ValueError):
        return


def report(text: str) -> None:
    """Prints a line on stdout."""
    print(text, flush=True)


def report_json(document: Any) -> None:
    """Prints the JSON document of a verb on stdout; non-finite numbers become null.

    Characters are escaped where stdout cannot encode one of them, such as a byte of a path that is not UTF-8.
    """
    text = json.dumps(_finite(document), indent=1, ensure_ascii=False)
    try:
        text.encode(getattr(sys.stdout, "encoding", None) or "utf-8")
    except UnicodeEncodeError:
        text = json.dumps(_finite(document), indent=1)
    print(text, flush=True)


def prepare_streams() -> None:
    """Makes the standard streams safe to use, whatever this process was started with.

    A closed one (`tunesmith presets >&-`) goes to /dev/null: the next file that is opened would otherwise take its
    number, and get the output of child processes. Characters that the encoding of stdout lacks become `\\u` escapes,
    as on stderr, instead of an error.
    """
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_RDWR)
            if null != number:
                os.dup2(null, number)
                os.close(null)
            setattr(sys, name, os.fdopen(number, mode, encoding="utf-8", closefd=False))
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def refuse(mistakes: Sequence[str]) -> None:
    """Prints the mistakes of a request on stderr, one per line."""
    for mistake in mistakes:
        say("error: " + clean(mistake).replace("\n", " "))


def show_table(headers: Sequence[str], rows: Sequence[Sequence[Any]], expendable: Sequence[str] = ()) -> None:
    """Prints a table on stdout: drawn on a terminal, plain columns elsewhere.

    Args:
        headers: names of the columns.
        rows: a cell for each column.
        expendable: columns to drop, in this order, if the terminal is too narrow for one line per row; the first is
            shortened before it is dropped. If empty, long cells are wrapped instead.
    """
    texts = [[clean("" if cell is None else str(cell)).replace("\n", " ") for cell in row] for row in rows]
    if sys.stdout.isatty():
        _drawn(*_fitting(headers, texts, expendable), one_line=bool(expendable))
        return
    widths = _widths(headers, texts)
    for row in [list(headers), *texts]:
        report("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _widths(headers: Sequence[str], texts: Sequence[Sequence[str]]) -> list[int]:
    return [max(map(len, column)) for column in zip(headers, *texts, strict=True)]


def _fitting(
    headers: Sequence[str], texts: Sequence[Sequence[str]], expendable: Sequence[str]
) -> tuple[list[str], list[list[str]]]:
    """Headers and rows with only the columns that fit into the terminal."""
    columns, cells = list(headers), [list(row) for row in texts]
    room = shutil.get_terminal_size().columns
    for name in expendable:
        excess = sum(_widths(columns, cells)) + _GAP * (len(columns) - 1) - room
        if excess <= 0:
            break
        at = columns.index(name)
        width = _widths(columns, cells)[at] - excess
        if name == expendable[0] and width >= _LEAST_CELL:
            for row in cells:
                row[at] = shortened(row[at], width)
            break
        for row in [columns, *cells]:
            del row[at]
    return columns, cells


def _drawn(headers: Sequence[str], texts: Sequence[Sequence[str]], one_line: bool) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for header in headers:
        table.add_column(header, no_wrap=one_line)
    for row in texts:
        table.add_row(*(Text(cell) for cell in row))
    # Let the terminal wrap a row that is still too wide: a shortened id would be useless as an argument.
    needed = sum(_widths(headers, texts)) + _GAP * (len(headers) - 1) if one_line else 0
    Console(width=max(needed, shutil.get_terminal_size().columns)).print(table)


def counted(count: int, singular: str, plural: str) -> str:
    """`1 process`, `2 processes`."""
    return f"{count} {singular if count == 1 else plural}"


def number(value: Any, digits: int = 4) -> str:
    """Formats a measured number; a dash for None and non-finite values."""
    return f"{value:.{digits}f}" if isinstance(value, int | float) and math.isfinite(value) else "-"
