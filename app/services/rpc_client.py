"""Runs a program of `trainers` in a child process that answers requests one at a time.

This lets the server and the command line show data and chat with models without importing torch. The child's side is
`trainers/tools/rpc_server.py`.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import psutil

from app.accelerate_launch import ROOT, module_argv, module_environment
from app.console import clean
from trainers.config.mistakes import ConfigError
from trainers.run.log import without_secrets
from trainers.run.process_limits import at_a_limit

_ERROR_LINES = 40
_LINE_BYTES = 2**14
_DRAIN_SECONDS = 10.0


class WorkerDied(RuntimeError):
    """The process ended or did not answer; carries the last lines of its standard error."""

    def __init__(self, cause: str, lines: Sequence[str] = ()):
        self.lines = list(lines)
        super().__init__("\n".join([cause, *lines]))


class Worker:
    """A running program; serves one caller at a time while others wait."""

    def __init__(
        self,
        module: str,
        arguments: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        pass_fds: Sequence[int] = (),
    ):
        """Starts the process.

        Args:
            module: such as `trainers.tools.data_preview`; must call `trainers.tools.rpc_server.serve`.
            arguments: its command line; no secrets, as every user of the machine can read it.
            env: variables to set in addition to this process's.
            pass_fds: descriptors it inherits, such as those of GPU locks.

        Raises:
            OSError: when the process cannot be started.
        """
        self.module = module
        self._argv = module_argv(module, arguments)
        self._env = module_environment({**os.environ, **(env or {}), "PYTHONUNBUFFERED": "1"})
        self._fds = tuple(pass_fds)
        self._request_lock = threading.Lock()
        self._write_lock = threading.Lock()
        self._errors: deque[str] = deque(maxlen=_ERROR_LINES)
        self._answers: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._number = 0
        self._current = 0  # number of the request being answered; 0 for none
        self._closed = False
        started: queue.SimpleQueue[subprocess.Popen[bytes] | OSError] = queue.SimpleQueue()
        self._starter = threading.Thread(target=self._start, args=(started,), daemon=True)
        self._starter.start()
        process = started.get()
        if isinstance(process, OSError):
            raise process
        self._process = process
        self.last_used = time.monotonic()
        threading.Thread(target=self._read, daemon=True).start()

    @property
    def alive(self) -> bool:
        """Whether the process is running."""
        return not self._closed and self._process.poll() is None

    @property
    def busy(self) -> bool:
        """Whether a request is being answered."""
        return self._request_lock.locked()

    @property
    def pid(self) -> int:
        """Pid of the process."""
        return self._process.pid

    def ask(self, request: Mapping[str, Any], timeout: float | None = None) -> Iterator[dict[str, Any]]:
        """Sends a request and yields the documents of its answer; the last has `end`, and `cancelled` if cancelled.

        If the caller stops iterating, the rest of the answer is cancelled.

        Args:
            request: `ask` with the handler's name, and its arguments.
            timeout: seconds to wait for each document before the process is killed.

        Raises:
            ConfigError: when the answer contains `mistakes`.
            WorkerDied: when the process ends or takes too long.
        """
        with self._request_lock:
            self._number += 1
            number = self._number
            self._send({**request, "id": number})
            self._current = number
            over = False
            try:
                while not over:
                    document = self._next(number, timeout)
                    over = bool(document.get("end"))
                    if document.get("mistakes"):
                        raise ConfigError.from_json(document["mistakes"])
                    yield document
            except WorkerDied:
                over = True
                raise
            finally:
                if not over:
                    self._drain(number)
                self._current = 0
                self.last_used = time.monotonic()

    def cancel(self) -> None:
        """Cancels the current answer, if any; it then ends with `cancelled`."""
        if number := self._current:
            with contextlib.suppress(WorkerDied):
                self._send({"cancel": number})

    def close(self) -> None:
        """Kills the process and all its children; returns when they are gone."""
        self._closed = True
        children = self._children()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        for process in children:
            with contextlib.suppress(psutil.Error):
                process.kill()
        self._process.wait()
        psutil.wait_procs(children, timeout=5.0)
        self._starter.join(5.0)

    def _children(self) -> list[psutil.Process]:
        try:
            return psutil.Process(self._process.pid).children(recursive=True)
        except psutil.Error:
            return []

    def _send(self, request: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            with self._write_lock:
                self._process.stdin.write(json.dumps(request).encode() + b"\n")
                self._process.stdin.flush()
        except (OSError, ValueError):
            raise self._death() from None

    def _next(self, number: int, timeout: float | None) -> dict[str, Any]:
        while True:
            try:
                document = self._answers.get(timeout=timeout)
            except queue.Empty:
                self.close()
                raise WorkerDied(f"{self.module} did not answer within {timeout:g} s", self._last_lines()) from None
            if document is None:
                self._answers.put(None)
                raise self._death()
            if document.pop("id", None) == number:
                return document

    def _drain(self, number: int) -> None:
        """Cancels an abandoned answer and reads to its end; a process that does not stop in time is killed."""
        with contextlib.suppress(WorkerDied):
            self._send({"cancel": number})
            deadline = time.monotonic() + _DRAIN_SECONDS
            while not self._next(number, max(0.1, deadline - time.monotonic())).get("end"):
                pass

    def _death(self) -> WorkerDied:
        self._starter.join(5.0)
        status = self._process.poll()
        if not self._closed and status is not None and (excess := at_a_limit(status, "\n".join(self._errors))):
            return WorkerDied(f"the model's tokenizer or chat template {excess}; choose a model that you trust")
        outcome = "has been closed" if self._closed else f"has died (exit status {status})"
        return WorkerDied(f"{self.module} {outcome}", self._last_lines())

    def _last_lines(self) -> list[str]:
        return [without_secrets(clean(line)) for line in list(self._errors)]

    def _start(self, started: queue.SimpleQueue[subprocess.Popen[bytes] | OSError]) -> None:
        """Starts the process and reads its standard error until it ends.

        The process is signalled when the thread that started it ends, so this thread must outlive it.
        """
        try:
            process = subprocess.Popen(
                self._argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT,
                env=self._env, pass_fds=self._fds, start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            started.put(error)
            return
        started.put(process)
        assert process.stderr is not None
        while line := process.stderr.readline(_LINE_BYTES):
            self._errors.append(line.decode("utf-8", "replace").rstrip())
        process.wait()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with contextlib.suppress(ValueError):  # a line truncated by the death of the process
                self._answers.put(json.loads(line))
        self._answers.put(None)
