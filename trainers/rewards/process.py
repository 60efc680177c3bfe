"""Starts the process that computes rewards, and asks it."""

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


class RewardProcess:
    """Computes rewards in a process of its own, which starts with the first request.

    Args:
        names: rewards that ship with Tunesmith, or `path.py:function`.
        timeout: seconds that the answers of a step may take.
        schema: file of the JSON Schema, for the reward `json_schema`.
    """

    def __init__(self, names: Sequence[str], timeout: float, schema: str | None = None):
        self.names, self.timeout, self.schema = names, timeout, schema
        self._process: subprocess.Popen[bytes] | None = None
        self._errors: Any = None

    def compute(
        self, prompts: Sequence[str], answers: Sequence[str], columns: Mapping[str, Sequence[Any]]
    ) -> dict[str, list[float]]:
        """The rewards of each function.

        Args:
            prompts: the text that each answer follows.
            answers: the answers.
            columns: columns of the data that the functions read, such as `answer`: for each answer the JSON value of
                its row.

        Raises:
            TrainingError: if a function fails, gives no numbers, takes too long or too much memory.
        """
        process = self._process = self._process or self._start()
        request = {"prompts": list(prompts), "completions": list(answers), **columns}
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it died: there is no answer, which is reported below
            process.stdin.write(json.dumps(request).encode() + b"\n")
            process.stdin.flush()
        values = json.loads(self._answer(process))
        if "failed" in values:
            raise TrainingError(f"the reward {values['failed']} failed: {values['error']}")
        rewards: dict[str, list[float]] = values
        return rewards

    def close(self) -> None:
        """Ends the process."""
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)  # with what a reward has started
            self._process.wait()
            self._process = None

    def _start(self) -> subprocess.Popen[bytes]:
        environment = child_environment(
            {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}, str(ROOT)
        )
        command = [sys.executable, "-P", "-m", "trainers.rewards.worker", str(MEMORY_GIB), self.schema or "",
                   *self.names]  # fmt: skip
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
                    raise TrainingError(
                        f"the rewards {', '.join(self.names)} took more than reward_timeout={self.timeout:g} s for the "
                        "answers of a step; make them faster, or raise it"
                    )
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
        return f"the process of the rewards {', '.join(self.names)} {why_it_died(status, errors)}"
