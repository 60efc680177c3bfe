"""Copies what a rank prints into the run's `log.txt`, each line with time and rank. Standard library only.

A process of its own does the copying, so that the last words of a rank that crashes are not lost with it.
Run as `python log.py LOG WHO ECHO`; reads standard input until it ends.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TextIO

LONGEST_LINE = 2**16  # bytes; what is longer is cut into several lines, so that memory is bounded
_SECRET_NAME = re.compile(r"(TOKEN|SECRET|PASSWORD|PASSWD|API_?KEY|CREDENTIAL|ACCESS_KEY)", re.IGNORECASE)


def secrets_in(environment: Mapping[str, str]) -> list[str]:
    """Values of the variables whose names say that they are secret, longest first; short values are no secrets."""
    values = {value for name, value in environment.items() if _SECRET_NAME.search(name) and len(value) >= 8}
    return sorted(values, key=len, reverse=True)


def without_secrets(text: str) -> str:
    """The text with the values of this environment's secrets taken out."""
    for value in secrets_in(os.environ):
        text = text.replace(value, "***")
    return text


def log_line(source: str, text: str, hidden: Sequence[str] = ()) -> str:
    """One line of `log.txt`: time, who printed it (`rank 0`, `launcher`), text with secrets taken out.

    Args:
        source: the printer.
        text: one line; of several drawn over each other with carriage returns the last is kept.
        hidden: values that must not appear, from `secrets_in`.
    """
    text = text.rstrip("\r\n").rpartition("\r")[2]
    for value in hidden:
        text = text.replace(value, "***")
    return f"{datetime.now(UTC).isoformat(timespec='milliseconds')} [{source}] {text}\n"


def start_tee(log: Path, source: str, echo: bool) -> TextIO:
    """From now on everything that this process prints goes to `log` too.

    Args:
        log: the file; lines are appended whole, so that several ranks share it.
        source: how the lines are marked, e.g. `rank 0`.
        echo: whether it is still printed where it went before.

    Returns:
        The standard error from before, for progress bars, which have no place in a log.
    """
    before = os.fdopen(os.dup(2), "w", buffering=1, encoding="utf-8", errors="replace")
    command = [sys.executable, "-I", "-S", str(Path(__file__).resolve()), str(log), source, "echo" if echo else "quiet"]
    # A session of its own: a signal to the rank's process group must not end the copying first.
    tee = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    assert tee.stdin is not None
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(tee.stdin.fileno(), 1)
    os.dup2(tee.stdin.fileno(), 2)
    tee.stdin.close()
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    return before


def main(log: str, source: str, echo: str) -> None:
    """Copies standard input until it ends; signals are for the rank, not for its log."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    hidden = secrets_in(os.environ)
    handle = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    while line := sys.stdin.buffer.readline(LONGEST_LINE):
        text = log_line(source, line.decode("utf-8", "replace"), hidden)
        with contextlib.suppress(OSError):  # a full disk must not end the run through its log
            os.write(handle, text.encode())
        if echo == "echo":
            try:
                os.write(1, text.partition("] ")[2].encode())
            except OSError:
                echo = "quiet"  # the terminal is gone; the log goes on


if __name__ == "__main__":
    main(*sys.argv[1:])
