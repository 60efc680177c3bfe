"""The process tree of a run: found while it lives, and ended to the last process."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import time
from collections.abc import Iterable, Iterator

import psutil

from trainers.run.folder import Process

_PR_SET_CHILD_SUBREAPER = 36


@contextlib.contextmanager
def adopting_orphans() -> Iterator[None]:
    """Makes this process the parent of orphaned descendants, so that none escapes (Linux; elsewhere nothing)."""
    if not sys.platform.startswith("linux"):
        yield
        return
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


class Descendants:
    """Every process that comes from a launcher, whatever session it moved to.

    The launcher puts each rank into a session of its own, so neither a process group nor a look after its death
    finds them: they are collected while it lives. Children that this process had before are left alone.
    """

    def __init__(self) -> None:
        self.before = set(psutil.Process().children())
        self.since = time.time() - 1.0
        self.known: set[psutil.Process] = set()
        self.waited_for: int | None = None
        """Pid that another owner (a `Popen`) waits for, so that its exit status is left alone."""

    def collect(self, roots: Iterable[Process] = ()) -> None:
        """Looks for new ones.

        Args:
            roots: processes that the run's files name; taken in when they started after this object.
        """
        foreign = set(self.before).union(*(_below(process) for process in self.before))
        self.known |= _below(psutil.Process()) - foreign
        if not sys.platform.startswith("linux"):
            self.known.update(*(_below(process) for process in self.known))
        for entry in roots:
            with contextlib.suppress(psutil.Error):
                if entry.started >= self.since and entry.pid != os.getpid() and entry.alive():
                    self.known.add(psutil.Process(entry.pid))

    def alive(self) -> list[psutil.Process]:
        """Those that still run; ended ones are reaped and forgotten."""
        living = {process for process in self.known if self._lives(process)}
        self.known = living
        return sorted(living, key=lambda process: process.pid)

    def _lives(self, process: psutil.Process) -> bool:
        try:
            if not process.is_running():
                return False
            # Threads may outlive the main one, with all that the process holds.
            if process.status() != psutil.STATUS_ZOMBIE or process.num_threads() > 1:
                return True
            if process.ppid() == os.getpid() and process.pid != self.waited_for:
                _reap(process.pid)
        except psutil.Error:
            pass
        return False

    def end(self, timeout: float) -> None:
        """SIGTERM to all of them, and SIGKILL after `timeout` seconds; returns when none lives."""
        self.collect()
        for process in self.alive():
            with contextlib.suppress(psutil.Error):
                process.terminate()
        deadline = time.monotonic() + timeout
        while self.alive() and time.monotonic() < deadline:
            time.sleep(0.05)
            self.collect()
        deadline = time.monotonic() + 30.0
        while (living := self.alive()) and time.monotonic() < deadline:
            for process in living:
                with contextlib.suppress(psutil.Error):
                    process.kill()
            time.sleep(0.05)
            self.collect()


def _below(process: psutil.Process) -> set[psutil.Process]:
    try:
        return set(process.children(recursive=True))
    except psutil.Error:
        return set()


def _reap(pid: int) -> None:
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)
