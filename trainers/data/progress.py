"""Progress of long work on stderr: a bar on a terminal, a line every few seconds elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

_SECONDS = 5.0
_LISTENER_SECONDS = 0.3
listeners: list[Callable[[str, int, int], None]] = []
"""Called with what is being done, rows done and rows in all, a few times a second."""


class Progress:
    """Counts rows towards a total; silent for work that takes less than a few seconds without a terminal."""

    def __init__(self, what: str, total: int):
        self.what, self.total, self.done = what, total, 0
        self._started = self._said = self._told = time.monotonic()
        self._bar: Any = None
        if sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(total=total, desc=what, unit=" rows", leave=False, delay=0.5)

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()

    def add(self, rows: int) -> None:
        """So many rows more are done."""
        self.done += rows
        now = time.monotonic()
        if listeners and (now - self._told >= _LISTENER_SECONDS or self.done == self.total):
            self._told = now
            for listener in listeners:
                listener(self.what, self.done, self.total)
        if self._bar is not None:
            self._bar.update(rows)
        elif now - self._said >= _SECONDS:
            self._said = now
            rate = self.done / (now - self._started)
            left = (self.total - self.done) / rate
            say(f"{self.what}: {self.done:,} of {self.total:,} rows, {rate:,.0f} rows/s, {left:.0f} s left")


def say(line: str) -> None:
    """One line on stderr, at once."""
    print(line, file=sys.stderr, flush=True)
