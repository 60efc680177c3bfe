"""`accelerate launch` without its imports: launcher and ranks are forked from a process that has made them already.

Importing torch and transformers takes a launcher and each of its ranks longer than the steps of a test. What runs is
Accelerate's and torch's launcher and the training script as they are; only where they start a Python interpreter, they
fork. `python -m tests.forked` serves requests, one JSON object a line, until its standard input closes.

Two things differ from a start by hand, so each way of launching has a test that does it by hand: ranks share the seed
of string hashes, and what a package reads of the environment while it is imported is that of this process.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import json
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

MODULES = (
    "accelerate.commands.launch",
    "torch.distributed.run",
    "torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler",
    "trainers.train",
    "trainers.build",
    "peft",
    "transformers.models.llama.modeling_llama",
)
_fork = multiprocessing.get_context("fork")
SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCHLD)


class Forked:
    """Stands for `subprocess.Popen` of a Python script: a fork of this process runs it."""

    def __init__(self, args: Sequence[str], env: dict[str, str], start_new_session: bool = False, **_: Any):
        self.args = list(args)
        sys.stdout.flush()
        sys.stderr.flush()
        self._process = _fork.Process(target=run_script, args=(self.args, env, start_new_session))
        self._process.start()
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int | None:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0)
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        if self._process.exitcode is None and self.pid:
            os.kill(self.pid, number)


def run_script(command: Sequence[str], env: dict[str, str], new_session: bool) -> None:
    """In a fork: becomes what `command`, the interpreter and a script with its arguments, would be."""
    if new_session:
        os.setsid()
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(env)
    _title().setproctitle(" ".join(command))
    script = next(number for number, word in enumerate(command) if word.endswith(".py"))
    sys.argv = list(command[script:])
    sys.path.insert(0, str(Path(command[script]).parent))  # as Python does for a script
    runpy.run_path(command[script], run_name="__main__")


def launch(args: list[str], env: dict[str, str], output: str) -> None:
    """In a fork: becomes `accelerate launch`."""
    os.setsid()
    log = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    os.environ.clear()
    os.environ.update(env)
    launcher: Any = importlib.import_module(MODULES[0])
    importlib.import_module(MODULES[2]).Popen = Forked  # type: ignore[attr-defined]
    launcher.subprocess = _SubprocessModule()
    # Ranks look for their launcher's command line.
    _title().setproctitle(" ".join([sys.executable, "-m", MODULES[0], *args]))
    launcher.launch_command(launcher.launch_command_parser().parse_args(args))


def _title() -> Any:
    """The package that gives a process another command line; who launches by hand need not have it."""
    return importlib.import_module("setproctitle")


class _SubprocessModule:
    """`subprocess` as the launcher of one process has it."""

    Popen = Forked
    CalledProcessError = subprocess.CalledProcessError


def main() -> None:
    _title().getproctitle()  # finds where the title is kept, by the environment as it is now
    for name in MODULES:
        importlib.import_module(name)
    if threading.active_count() > 1:
        raise RuntimeError(f"threads do not survive a fork: {threading.enumerate()}")
    for line in sys.stdin:
        request = json.loads(line)
        process = _fork.Process(target=launch, args=(request["args"], request["env"], request["output"]))
        process.start()
        process.join()
        print(json.dumps(process.exitcode), flush=True)


@functools.cache
def _server(threads: str) -> subprocess.Popen[str]:
    server = subprocess.Popen(
        [sys.executable, "-u", "-m", "tests.forked"],
        cwd=Path(__file__).resolve().parent.parent,
        env={**os.environ, "OMP_NUM_THREADS": threads},  # read once, when torch is imported
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    atexit.register(server.kill)
    return server


def launch_forked(args: list[str], env: dict[str, str]) -> tuple[int, str]:
    """Exit status and output of `accelerate launch` with these arguments."""
    server = _server(env["OMP_NUM_THREADS"])
    assert server.stdin is not None
    assert server.stdout is not None
    with tempfile.NamedTemporaryFile("r") as output:
        server.stdin.write(json.dumps({"args": args, "env": env, "output": output.name}) + "\n")
        server.stdin.flush()
        try:
            status = json.loads(server.stdout.readline())
        except BaseException:  # a test that took too long: what answers next would answer this request
            server.kill()
            _server.cache_clear()
            raise
        return status, output.read()


if __name__ == "__main__":
    main()
