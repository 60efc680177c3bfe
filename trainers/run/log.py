"""Copies the output of a rank to the run's `log.txt`, prefixing each line with time and rank. Standard library only.

The copying is done in a separate process, so that the last output of a crashing rank is not lost.
Run as `python log.py LOG SOURCE ECHO`; reads standard input until it closes.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO, TextIO
from urllib.parse import unquote

LONGEST_LINE = 2**16  # bytes; longer lines are split, to bound memory
_USER_INFO = re.compile(r"://([^/?#@\s]*:[^/?#@\s]+)@")
_QUERY = re.compile(r"[?&][^=&#\s]*(?:token|key|sig|secret|password|credential)[^=&#\s]*=([^&#\s]+)", re.IGNORECASE)
_SECRET_NAME = re.compile(r"(TOKEN|SECRET|PASSWORD|PASSWD|API_?KEY|CREDENTIAL|ACCESS_KEY)", re.IGNORECASE)


def secrets_in(environment: Mapping[str, str]) -> list[str]:
    """Returns what must not be shown, longest first: of less than 8 characters only a user and password before an @.

    Values of variables whose names suggest a secret, and users, passwords and tokens in URLs of any variable, such as
    `MLFLOW_TRACKING_URI`.
    """
    users = {user for value in environment.values() for user in _USER_INFO.findall(value)}
    tokens = {token for value in environment.values() for token in _QUERY.findall(value)}
    names = {value for name, value in environment.items() if _SECRET_NAME.search(name)}
    passwords = {user.partition(":")[2] for user in users}
    values = {value for text in names | tokens | passwords for value in (text, unquote(text)) if len(value) >= 8}
    return sorted(values | {f"{user}@" for user in users}, key=len, reverse=True)


def without_secrets(text: str) -> str:
    """Redacts the values of this environment's secrets in a text."""
    for value in secrets_in(os.environ):
        text = text.replace(value, "***")
    return text


def log_line(source: str, text: str, hidden: Sequence[str] = ()) -> str:
    """Formats a line of `log.txt`: time, source, and text with secrets redacted.

    Args:
        source: Process that printed it, such as `rank 0` or `launcher`.
        text: One line; of parts separated by carriage returns, as in progress bars, only the last is kept.
        hidden: Values to redact, from `secrets_in`.
    """
    text = text.rstrip("\r\n").rpartition("\r")[2]
    for value in hidden:
        text = text.replace(value, "***")
    return f"{datetime.now(UTC).isoformat(timespec='milliseconds')} [{source}] {text}\n"


def start_tee(log: Path, source: str, echo: bool) -> TextIO:
    """Copies everything that this process prints from now on to `log`.

    Args:
        log: The file; lines are appended atomically, so that ranks can share it.
        source: Label of the lines, such as `rank 0`.
        echo: Whether to keep printing to the original standard output.

    Returns:
        The original standard error, for progress bars, which do not belong in a log.
    """
    before = os.fdopen(os.dup(2), "w", buffering=1, encoding="utf-8", errors="replace")
    command = [sys.executable, "-I", "-S", str(Path(__file__).resolve()), str(log), source, "echo" if echo else "quiet"]
    # In its own session, so that a signal to the rank's process group does not end the copying first.
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


def pieces(stream: BinaryIO, hidden: Sequence[str]) -> Iterator[bytes]:
    """Splits a stream into lines, and longer lines into pieces of at most about `LONGEST_LINE` bytes.

    No piece ends inside a character or a secret, so that each can be redacted on its own.

    Args:
        stream: Read to its end.
        hidden: The secrets, from `secrets_in`.
    """
    secrets = [secret.encode() for secret in hidden]
    overlap = min(max([4, *map(len, secrets)]), LONGEST_LINE // 2)
    line = b""
    while part := stream.readline(LONGEST_LINE):
        line += part
        if line.endswith(b"\n") or len(part) < LONGEST_LINE:
            yield line
            line = b""
            continue
        # The end may be the beginning of a secret: keep it for the next piece.
        cut = len(line) - overlap
        starts = [line.find(secret, max(0, cut - len(secret) + 1), cut + len(secret) - 1) for secret in secrets]
        cut = min([cut, *(start for start in starts if start > 0)])
        while cut > 1 and line[cut] & 0xC0 == 0x80:  # inside a character
            cut -= 1
        yield line[:cut]
        line = line[cut:]
    if line:
        yield line


def main(log: str, source: str, echo: str) -> None:
    """Copies standard input until it closes; ignores signals, which are meant for the rank."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    hidden = secrets_in(os.environ)
    handle = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    for line in pieces(sys.stdin.buffer, hidden):
        text = log_line(source, line.decode("utf-8", "replace"), hidden)
        with contextlib.suppress(OSError):  # a full disk must not end the run
            os.write(handle, text.encode())
        if echo == "echo":
            try:
                os.write(1, text.partition("] ")[2].encode())
            except OSError:
                echo = "quiet"  # the terminal is closed; keep logging


if __name__ == "__main__":
    main(*sys.argv[1:])
