"""Limits on the CPU time that a chat template may take for one conversation, and for all. Imports no torch."""

from __future__ import annotations

import signal
import threading
from functools import cache
from typing import Any

from trainers.config.mistakes import ConfigError
from trainers.data.formats import Document

_GRACE_SECONDS = 5.0
_SECONDS_PER_MESSAGE = 0.05
_SECONDS_PER_CHARACTER = 1e-6


class RenderBudget:
    """CPU time allowed for rendering: far more than a template needs for this many messages and characters."""

    def __init__(self) -> None:
        self._allowed = _GRACE_SECONDS
        self._spent = 0.0
        self._documents = 0

    def charge(self, document: Document, seconds: float) -> None:
        """Charges the seconds of CPU time that rendering a document took.

        Raises:
            ConfigError: if the documents so far took too long.
        """
        self._spent += seconds
        self._documents += 1
        self._allowed += _SECONDS_PER_MESSAGE * len(document.messages) + _SECONDS_PER_CHARACTER * document.size
        if self._spent > self._allowed:
            raise ConfigError(
                f"the chat template takes {self._spent / self._documents:.1f} s for each conversation "
                f"({self._documents:,} of them rendered); give another with --chat_template FILE"
            )


class TooLong(BaseException):  # not an Exception, which code around the template might catch
    """A template that is still rendering one conversation."""


class cpu_time_limit:
    """Ends the block after `seconds` of CPU time; only in the main thread, as signals cannot interrupt others.

    A class, as the generator of a `contextmanager` would take longer, and every row of data is rendered within one.
    """

    def __init__(self, seconds: float):
        self._seconds = seconds
        self._can_interrupt = threading.current_thread() is threading.main_thread()

    def __enter__(self) -> None:
        if self._can_interrupt:
            _handle_timer()
            signal.setitimer(signal.ITIMER_VIRTUAL, self._seconds)

    def __exit__(self, *error: object) -> None:
        if self._can_interrupt:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)


@cache
def _handle_timer() -> None:
    """Has the timer's signal raise `TooLong` in this process, from now on: setting it for each row would be slow."""

    def stop(number: int, frame: Any) -> None:
        raise TooLong

    signal.signal(signal.SIGVTALRM, stop)
