"""Starts verbs of `tunesmith` that work in the background, in a session of their own, and ends them."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from app.accelerate_launch import module_argv, module_environment
from app.console import shortened
from app.runs.run_work import RunWork, Work
from app.runs.work_folder import WorkFolder
from trainers.config.mistakes import ConfigError
from trainers.run.folder import Process, RunFolder, now


def start_work(folder: WorkFolder, argv: Sequence[str], note: Mapping[str, Any], pass_fds: Sequence[int] = ()) -> None:
    """Starts a verb, whose output and process are in the folder.

    Args:
        folder: an existing folder without output.
        argv: the verb and its arguments.
        note: what the note says besides.
        pass_fds: open files that the process inherits, such as locks.

    Raises:
        OSError: if the folder cannot be written; nothing runs then.
    """
    begun = {**note, "started_at": now(), "host": socket.gethostname()}
    folder.write_note(begun)
    with open(folder.output, "xb") as output:
        child = subprocess.Popen(
            module_argv("app.cli", argv), env=module_environment(), stdin=subprocess.DEVNULL,
            stdout=output, stderr=subprocess.STDOUT, start_new_session=True, pass_fds=pass_fds,
        )  # fmt: skip
    try:
        folder.write_note({**begun, "processes": [Process.of(argv[0], pid=child.pid).as_json()]})
    except OSError:
        child.terminate()  # without a note nobody could stop it
        raise
    finally:
        # Reap the child: the starter may be a long-lived process, such as the server of the pages.
        threading.Thread(target=child.wait, daemon=True).start()


def start_run_work(
    kind: RunWork[Work], run: RunFolder, argv: Callable[[Work], Sequence[str]], note: Mapping[str, Any], done: str
) -> Work:
    """Starts a verb on a run, in the next folder of its kind; its process holds the lock of that.

    Args:
        kind: the kind of work.
        run: the run.
        argv: the verb and its arguments, for the folder.
        note: what the note says besides.
        done: what happens to the run, such as `exported`, for the message.

    Raises:
        ConfigError: if such work is running, or the folder cannot be written.
    """
    try:
        if kind.running(run) is None:
            run.own_folder(kind.folder)
        (run.path / kind.folder).mkdir(exist_ok=True)
        with kind.lock(run) as lock:
            folder = kind.following(run)
            folder.path.mkdir()
            start_work(folder, argv(folder), note, [lock.fileno()])
    except OSError as error:
        problem = f"{error.filename or run.path} cannot be written: {error.strerror}"
        raise ConfigError(f"run {run.id} cannot be {done}: {problem}; check its permissions") from None
    return folder


def stop_work(folder: WorkFolder, name: str, to_group: bool) -> None:
    """Asks the process of a folder to end, and returns immediately.

    Args:
        folder: the folder of work that is running.
        name: what it is, for the message.
        to_group: whether to ask all processes of its group.

    Raises:
        ConfigError: if its process is unknown on this machine.
    """
    process, note = folder.process(), folder.note()
    if process is None:
        where = shortened(str(note.get("host") or "its machine"))
        raise ConfigError(f"the process of this {name} is unknown here; stop it on {where}")
    with contextlib.suppress(OSError):
        folder.write_note({**note, "stopped_at": now()})
    with contextlib.suppress(ProcessLookupError):
        (os.killpg if to_group else os.kill)(process.pid, signal.SIGTERM)
