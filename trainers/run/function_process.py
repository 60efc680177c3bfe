"""A process of its own for functions of the user: with few environment variables and a time limit. Imports no torch.

Rewards are computed in one (`trainers/rewards/process.py`), and metrics of one's own (`app/eval/own_metrics.py`). The
limits guard against accidents; it is no sandbox.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainers.run.errors import TrainingError
from trainers.run.import_path import child_environment
from trainers.run.process_limits import why_it_died

ROOT = Path(__file__).resolve().parents[2]
MEMORY_GIB = 8.0
"""Address space of the process."""
_WORKER = "trainers.rewards.worker"
_ENVIRONMENT = (
    "PATH",
    "HOME",
    "LANG",
    "LC_ALL",
    "LC_CTYPE",
    "TMPDIR",
    "TZ",
    "VIRTUAL_ENV",
    "LD_LIBRARY_PATH",
    "PYTHONPATH",
)
"""Environment variables that it gets; others may hold secrets."""
_ERRORS = 2000


class FunctionProcess:
    """Calls functions in a process of its own, which starts with the first request.

    Args:
        names: functions that ship with Tunesmith, or `path.py:function`.
        label: what the functions are, in the plural, for messages.
        timeout: seconds that an answer may take.
        too_slow: what an error says of more time than that, after the names.
        schema: file of the JSON Schema, for the function `json_schema`.
    """

    def __init__(self, names: Sequence[str], label: str, timeout: float, too_slow: str, schema: str | None = None):
        self.names, self.timeout, self.schema = names, timeout, schema
        self.too_slow, self.subject = too_slow, f"the {label} {', '.join(names)}"
        self._process: subprocess.Popen[bytes] | None = None
        self._errors: Any = None

    def ask(self, request: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
        """The values of each function by its name; or `failed`, the name of a function, and its `error`.

        Args:
            request: what the functions get by the names of their parameters: lists of one length, `prompts` among them.

        Raises:
            TrainingError: if the process takes too long or dies.
        """
        process = self._process = self._process or self._start()
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it died: there is no answer, which is reported below
            process.stdin.write(json.dumps(request).encode() + b"\n")
            process.stdin.flush()
        values: dict[str, Any] = json.loads(self._answer(process))
        return values

    def close(self) -> None:
        """Ends the process."""
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)  # with what a function has started
            self._process.wait()
            self._process = None

    def _start(self) -> subprocess.Popen[bytes]:
        environment = child_environment(
            {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}, str(ROOT)
        )
        command = [sys.executable, "-P", "-m", _WORKER, str(MEMORY_GIB), self.schema or "", *self.names]
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        pipe = subprocess.PIPE
        return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=self._errors, env=environment,
                                start_new_session=True)  # fmt: skip

    def _answer(self, process: subprocess.Popen[bytes]) -> bytes:
        """A line of the process."""
        assert process.stdout is not None
        received, deadline = b"", time.monotonic() + self.timeout
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            while not received.endswith(b"\n"):
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    self.close()
                    raise TrainingError(f"{self.subject} {self.too_slow}")
                part = os.read(process.stdout.fileno(), 1 << 20)
                if not part:
                    raise TrainingError(self._death(process))
                received += part
        return received

    def _death(self, process: subprocess.Popen[bytes]) -> str:
        status = process.wait()
        self._errors.seek(0)
        errors = self._errors.read().decode(errors="replace")[-_ERRORS:]
        self._process = None
        return f"the process of {self.subject} {why_it_died(status, errors)}"
