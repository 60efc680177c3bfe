"""Runs `tunesmith doctor` for the System page: in the background, once at a time."""

from __future__ import annotations

import json
import subprocess
import tempfile
import threading
from pathlib import Path
from typing import Any

from app.accelerate_launch import ROOT, module_argv, module_environment
from app.console import clean
from app.launch.process_tree import kill_tree

LONGEST = 900.0
"""Seconds after which an examination is ended."""
GRACE = 20.0
"""Seconds that it then has to end its ranks."""


class Doctor:
    """The examination of this machine, in a process of its own: its ranks must not become children of the server.

    Args:
        runs_dir: folder of run folders, whose disk is checked.
    """

    def __init__(self, runs_dir: Path):
        self._argv = module_argv("app.cli", ["doctor", "--json", "--runs_dir", str(runs_dir.absolute())])
        self._lock = threading.Lock()
        self._is_running = False
        self._checks: list[dict[str, Any]] = []
        self._error = ""

    def start(self) -> bool:
        """Starts an examination; False if one is running."""
        with self._lock:
            if self._is_running:
                return False
            self._is_running, self._checks, self._error = True, [], ""
        threading.Thread(target=self._run, daemon=True).start()
        return True

    def state(self) -> dict[str, Any]:
        """`running`, the `checks` of the last examination, and `error`, why it has none (else empty)."""
        with self._lock:
            return {"running": self._is_running, "checks": self._checks, "error": self._error}

    def _run(self) -> None:
        checks, error = list[dict[str, Any]](), ""
        try:
            checks, error = self._examine()
        except subprocess.TimeoutExpired:
            error = f"the check did not end within {LONGEST:g} s; run `tunesmith doctor` in a terminal"
        except OSError as problem:
            error = f"the check could not be started: {problem}"
        finally:
            with self._lock:
                self._is_running, self._checks, self._error = False, checks, error

    def _examine(self) -> tuple[list[dict[str, Any]], str]:
        # Temporary folders inside this one are removed even if the examination is killed.
        outer = tempfile.TemporaryDirectory(prefix="tunesmith-check-", ignore_cleanup_errors=True)
        with outer as folder, self._start(folder) as program:
            try:
                out, errors = program.communicate(timeout=LONGEST)
            except BaseException:
                end(program, GRACE)
                raise
        try:
            document = json.loads(out)
        except ValueError:
            document = {}
        if "checks" in document:
            return list(document["checks"]), ""
        reasons = document.get("mistakes") or errors.strip().splitlines()[-1:] or [f"status {program.returncode}"]
        return [], clean(f"the check failed: {'; '.join(map(str, reasons))}")

    def _start(self, folder: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self._argv, cwd=ROOT, env={**module_environment(), "TMPDIR": folder}, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace",
        )  # fmt: skip


def end(program: subprocess.Popen[str], grace: float) -> None:
    """Ends an examination with its ranks.

    Args:
        program: its process.
        grace: seconds that it has to end by itself, before all its processes are killed.
    """
    program.terminate()
    try:
        program.communicate(timeout=grace)
    except subprocess.TimeoutExpired:
        kill_tree(program.pid)
        program.wait()
