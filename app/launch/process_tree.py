"""Tracks the process tree of a launch while it runs, and terminates every process in it."""

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
    """Makes this process the parent of orphaned descendants (a subreaper), so that none escapes; only on Linux."""
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
    """All processes started by a launcher, in any session.

    The launcher starts each rank in a session of its own, so that the ranks are found neither by process group nor by
    parent once the launcher has exited: they are collected while it runs. Children that this process already had are
    left alone.
    """

    def __init__(self) -> None:
        self.before = set(psutil.Process().children())
        self.since = time.time() - 1.0
        self.known: set[psutil.Process] = set()
        self.waited_for: int | None = None
        """Pid that its owner (a `Popen`) waits for; not reaped here, which would discard its exit status."""

    def collect(self, roots: Iterable[Process] = ()) -> None:
        """Adds new descendants.

        Args:
            roots: processes listed in the run's files; added if they started after this object was created.
        """
        # Children of this process from before, and their descendants, belong to someone else.
        foreign = set(self.before).union(*(_below(process) for process in self.before))
        self.known |= _below(psutil.Process()) - foreign
        # Without a subreaper, orphans leave this process's tree: look below every known process too.
        if not sys.platform.startswith("linux"):
            self.known.update(*(_below(process) for process in self.known))
        for entry in roots:
            with contextlib.suppress(psutil.Error):
                if entry.started >= self.since and entry.pid != os.getpid() and entry.alive():
                    self.known.add(psutil.Process(entry.pid))

    def alive(self) -> list[psutil.Process]:
        """The processes that are still running, by pid; exited ones are reaped and forgotten."""
        living = {process for process in self.known if self._lives(process)}
        self.known = living
        return sorted(living, key=lambda process: process.pid)

    def _lives(self, process: psutil.Process) -> bool:
        try:
            if not process.is_running():
                return False
            # A zombie whose main thread has exited may have other threads, which keep its memory and GPU in use.
            if process.status() != psutil.STATUS_ZOMBIE or process.num_threads() > 1:
                return True
            if process.ppid() == os.getpid() and process.pid != self.waited_for:
                _reap(process.pid)
        except psutil.Error:
            pass
        return False

    def end(self, timeout: float) -> None:
        """Sends SIGTERM to all, and SIGKILL to those still running after `timeout` seconds.

        Returns when none is alive, or 30 seconds after the first SIGKILL.
        """
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


def kill_tree(pid: int) -> None:
    """Kills a process and everything below it, in any session."""
    with contextlib.suppress(psutil.Error):
        root = psutil.Process(pid)
        for process in [root, *_below(root)]:
            with contextlib.suppress(psutil.Error):
                process.kill()


def _below(process: psutil.Process) -> set[psutil.Process]:
    try:
        return set(process.children(recursive=True))
    except psutil.Error:
        return set()


def _reap(pid: int) -> None:
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)
