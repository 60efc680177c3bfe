"""Runs `tunesmith doctor` for the System page: in the background, once at a time."""

from __future__ import annotations

import json
import subprocess
import threading
from pathlib import Path
from typing import Any

from app.accelerate_launch import ROOT, module_argv, module_environment
from app.console import clean

LONGEST = 900.0
"""Seconds after which an examination is ended."""


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
        done = subprocess.run(
            self._argv, cwd=ROOT, env=module_environment(), stdin=subprocess.DEVNULL, capture_output=True, text=True,
            errors="replace", timeout=LONGEST,
        )  # fmt: skip
        try:
            document = json.loads(done.stdout)
        except ValueError:
            document = {}
        if "checks" in document:
            return list(document["checks"]), ""
        reasons = document.get("mistakes") or done.stderr.strip().splitlines()[-1:] or [f"status {done.returncode}"]
        return [], clean(f"the check failed: {'; '.join(map(str, reasons))}")
