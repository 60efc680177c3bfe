"""Progress of long tasks on stderr: a bar on a terminal, otherwise a line every few seconds."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

_SECONDS = 5.0
_LISTENER_SECONDS = 0.3
listeners: list[Callable[[str, int, int], None]] = []
"""Called a few times a second with the task, the rows done and the total number of rows."""


class Progress:
    """Counts rows towards a total, 0 if it is unknown; without a terminal, prints nothing for tasks of few seconds."""

    def __init__(self, task: str, total: int):
        self.task = task
        self.total = total
        self.done = 0
        self._started = self._printed_at = self._notified_at = time.monotonic()
        self._bar: Any = None
        if sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(total=total or None, desc=task, unit=" rows", leave=False, delay=0.5)

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()

    def add(self, rows: int) -> None:
        """Counts `rows` more rows as done."""
        self.done += rows
        now = time.monotonic()
        if listeners and (now - self._notified_at >= _LISTENER_SECONDS or self.done == self.total):
            self._notified_at = now
            for listener in listeners:
                listener(self.task, self.done, self.total)
        if self._bar is not None:
            self._bar.update(rows)
        elif now - self._printed_at >= _SECONDS:
            self._printed_at = now
            if not self.total:
                say(f"{self.task}: {self.done:,} rows")
                return
            rate = self.done / (now - self._started)
            remaining = (self.total - self.done) / rate
            say(f"{self.task}: {self.done:,} of {self.total:,} rows, {rate:,.0f} rows/s, {remaining:.0f} s left")


def say(line: str) -> None:
    """Prints one line to stderr and flushes it."""
    print(line, file=sys.stderr, flush=True)
