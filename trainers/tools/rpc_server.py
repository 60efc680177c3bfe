"""The server side of `app/services/rpc_client.py`: answers requests, one JSON document per line of standard input.

A request is `{"id": N, "ask": NAME, ...}` or `{"cancel": N}`. Each answer document carries the request's `id`; the last
one has `"end": true`. Imports no torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import queue
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TextIO

from trainers.config.mistakes import ConfigError

Handler = Callable[[dict[str, Any]], Iterator[dict[str, Any]]]
_PR_SET_PDEATHSIG = 1
_servers: list[_Server] = []


class Cancelled(BaseException):
    """Raised in the main thread, wherever it is, if the current answer is no longer wanted."""


def serve(handlers: Mapping[str, Handler]) -> None:
    """Answers requests in the main thread, one after another, until standard input closes.

    Output of libraries goes to standard error. If a handler raises `ConfigError`, the answer has its `mistakes`; any
    other error ends the process, so that no answer comes from a broken state.

    Args:
        handlers: by the `ask` of a request; each yields the documents of its answer.
    """
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    _servers.append(_Server(handlers, answers))
    _servers[-1].run()


def send(document: dict[str, Any]) -> None:
    """Sends a document of the current answer, from code called by the handler that cannot yield it."""
    _servers[-1].write(document)


class _Server:
    def __init__(self, handlers: Mapping[str, Handler], answers: TextIO):
        self.handlers = handlers
        self.answers = answers
        self.requests: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self.number = 0
        self.cancelled = 0
        self.current = 0  # id of the current request, while it can be cancelled
        self.writing = False

    def run(self) -> None:
        signal.signal(signal.SIGINT, self._stop)
        threading.Thread(target=self._read, daemon=True).start()
        while True:
            self._answer(self.requests.get())

    def _read(self) -> None:
        """Reads requests in a thread of its own, so that a cancel is seen while an answer is computed."""
        for line in sys.stdin:
            request = json.loads(line)
            if "cancel" in request:
                self.cancelled = request["cancel"]
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            else:
                self.requests.put(request)
        if os.getsid(0) == os.getpid():
            os.killpg(0, signal.SIGKILL)  # this process and its children
        os._exit(0)

    def _stop(self, *signalled: Any) -> None:
        """Ends the current answer if it was cancelled: once, and not in the middle of a line."""
        if self.current and self.current == self.cancelled and not self.writing:
            self.current = 0
            raise Cancelled

    def _answer(self, request: dict[str, Any]) -> None:
        last: dict[str, Any] = {"end": True}
        try:
            try:
                self.current = self.number = request["id"]
                self._stop()
                # Closed immediately: its `finally` must not wait for the garbage collector.
                with contextlib.closing(self.handlers[request["ask"]](request)) as documents:  # type: ignore[type-var]
                    for document in documents:
                        self.write(document)
            except ConfigError as error:
                last["mistakes"] = error.as_json()
            self.current = 0
        except Cancelled:
            last["cancelled"] = True
        self.write(last)

    def write(self, document: dict[str, Any]) -> None:
        """Writes a document of the current answer."""
        self.writing = True  # a line must not be interrupted
        self.answers.write(json.dumps({"id": self.number, **document}) + "\n")
        self.answers.flush()
        self.writing = False
        self._stop()
