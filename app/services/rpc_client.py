"""A program of `trainers` kept running in a process of its own, which answers one request after the other.

So the server and the command line show data and chat with models without importing torch. Its child's side is
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
from trainers.config.options import ConfigError
from trainers.run.log import without_secrets
from trainers.run.process_limits import at_a_limit

_ERROR_LINES = 40
_LINE_BYTES = 2**14
_DRAIN_SECONDS = 10.0


class WorkerDied(RuntimeError):
    """The process has ended, or does not answer; the last lines of its standard error say why."""

    def __init__(self, cause: str, lines: Sequence[str] = ()):
        self.lines = list(lines)
        super().__init__("\n".join([cause, *lines]))


class Worker:
    """A running program; answers one caller at a time, the others wait."""

    def __init__(
        self,
        module: str,
        arguments: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        pass_fds: Sequence[int] = (),
    ):
        """Starts the process.

        Args:
            module: such as `trainers.tools.data_preview`; it calls `trainers.tools.rpc_server.serve`.
            arguments: its command line, which everybody on the machine can read: no secrets.
            env: variables to set besides this process's.
            pass_fds: descriptors that it inherits, such as those of GPU locks.

        Raises:
            OSError: when no process can be started.
        """
        self.module = module
        self._argv = module_argv(module, arguments)
        self._env = module_environment({**os.environ, **(env or {}), "PYTHONUNBUFFERED": "1"})
        self._fds = tuple(pass_fds)
        self._turn, self._writing = threading.Lock(), threading.Lock()
        self._errors: deque[str] = deque(maxlen=_ERROR_LINES)
        self._answers: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._number, self._present, self._closed = 0, 0, False
        started: queue.SimpleQueue[subprocess.Popen[bytes] | OSError] = queue.SimpleQueue()
        self._keeper = threading.Thread(target=self._keep, args=(started,), daemon=True)
        self._keeper.start()
        process = started.get()
        if isinstance(process, OSError):
            raise process
        self._process = process
        self.last_used = time.monotonic()
        threading.Thread(target=self._read, daemon=True).start()

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return not self._closed and self._process.poll() is None

    @property
    def busy(self) -> bool:
        """Whether an answer is under way."""
        return self._turn.locked()

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    def ask(self, request: Mapping[str, Any], timeout: float | None = None) -> Iterator[dict[str, Any]]:
        """Sends a request and gives its answer, document by document; the last has `end`, and `cancelled` if it was.

        A caller that stops reading cancels the rest.

        Args:
            request: `ask` with the handler's name, and what that needs.
            timeout: seconds to wait for each document; the process is ended when it takes longer.

        Raises:
            ConfigError: when the answer has `mistakes`.
            WorkerDied: when the process ends or takes too long.
        """
        with self._turn:
            self._number += 1
            number = self._number
            self._send({**request, "id": number})
            self._present = number
            over = False
            try:
                while not over:
                    document = self._next(number, timeout)
                    over = bool(document.get("end"))
                    if document.get("mistakes"):
                        raise ConfigError(list(document["mistakes"]))
                    yield document
            except WorkerDied:
                over = True
                raise
            finally:
                if not over:
                    self._drain(number)
                self._present = 0
                self.last_used = time.monotonic()

    def cancel(self) -> None:
        """Stops the answer under way, if there is one; it ends with `cancelled`."""
        if number := self._present:
            with contextlib.suppress(WorkerDied):
                self._send({"cancel": number})

    def close(self) -> None:
        """Ends the process and all that it started; returns when they are gone."""
        self._closed = True
        family = self._family()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        for process in family:
            with contextlib.suppress(psutil.Error):
                process.kill()
        self._process.wait()
        psutil.wait_procs(family, timeout=5.0)
        self._keeper.join(5.0)

    def _family(self) -> list[psutil.Process]:
        try:
            return psutil.Process(self._process.pid).children(recursive=True)
        except psutil.Error:
            return []

    def _send(self, request: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            with self._writing:
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
                raise WorkerDied(f"{self.module} gave no answer within {timeout:g} s", self._last_lines()) from None
            if document is None:
                self._answers.put(None)
                raise self._death()
            if document.pop("id", None) == number:
                return document

    def _drain(self, number: int) -> None:
        """Cancels an answer that nobody reads to its end; a process that goes on with it is ended."""
        with contextlib.suppress(WorkerDied):
            self._send({"cancel": number})
            deadline = time.monotonic() + _DRAIN_SECONDS
            while not self._next(number, max(0.1, deadline - time.monotonic())).get("end"):
                pass

    def _death(self) -> WorkerDied:
        self._keeper.join(5.0)
        status = self._process.poll()
        if not self._closed and status is not None and (excess := at_a_limit(status, "\n".join(self._errors))):
            return WorkerDied(f"the model's tokenizer or chat template {excess}; choose a model that you trust")
        how = "has been closed" if self._closed else f"has died (exit status {status})"
        return WorkerDied(f"{self.module} {how}", self._last_lines())

    def _last_lines(self) -> list[str]:
        return [without_secrets(clean(line)) for line in list(self._errors)]

    def _keep(self, started: queue.SimpleQueue[subprocess.Popen[bytes] | OSError]) -> None:
        """Starts the process and reads its standard error.

        The process gets a signal when the thread that started it ends, so that thread must last as long as it does.
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
            with contextlib.suppress(ValueError):  # a line cut short by the process's death
                self._answers.put(json.loads(line))
        self._answers.put(None)
