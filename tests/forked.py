"""Our programs without their imports: forked from a process that has torch, transformers and peft imported already.

The imports take a launcher and each of its ranks longer than the steps of a test. `Popen` and `run` stand for those of
`subprocess`: they ask a server (`python -m tests.forked`, one for each process that tests) for a program of ours, and
what that program starts is forked in turn, from the supervisor to the last rank. What runs is the program as it is;
parents, process groups, signals, pipes and exit statuses are real. Other programs are started as ever.

What differs from a start by hand, so that each way of launching has a test that does it by hand:
- what a package reads of the environment while it is imported is the server's,
- a launcher with a space in its command line is started by hand: a fork has one text as its command line,
- hash seeds are shared, and a process counts the memory of all that was imported.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import gc
import importlib
import inspect
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parent.parent
IMPORTED = (
    "accelerate.commands.launch",
    "torch.distributed.run",
    "torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler",
    "trainers.train",
    "trainers.build",
    "trainers.tools.preflight",
    "app.cli",
    "peft",
    "transformers.models.llama.modeling_llama",
)
SCRIPTS = tuple(str(ROOT / name) for name in ("trainers/train.py", "tests/unit/parallel/skipped_step_ranks.py"))
LAUNCHERS = ("accelerate.commands.launch", "torch.distributed.run")
MODULES = (
    *LAUNCHERS,
    *("app.cli", "app.launch.", "trainers.tools.", "trainers.checkpoint.export"),
    *("ui.server", "tests.unit.parallel.tensor_parallel_ranks", "tests.unit.parallel.tensor_parallel_families"),
    *("pytest", "benchmarks.gpu", "benchmarks.gpu_memory", "benchmarks.gpu_proof"),
)
"""Programs that are forked, beside those scripts; a name that ends in a dot stands for all below it."""
BOUND = str(ROOT / "app/launch/bound_program.py")
BY_HAND = "BY_HAND"
"""A variable that, when it is set, has everything started as ever."""


def program_in(argv: Sequence[str]) -> int | None:
    """Index of the script, or of the `-m` of the module, that a command runs; None unless it is one of ours."""
    words = [] if isinstance(argv, str | bytes) else _unbound([os.fspath(word) for word in argv])
    if words[:1] != [sys.executable] or BY_HAND in os.environ:
        return None
    index = next((number for number, word in enumerate(words) if number and word not in ("-P", "-u")), len(words))
    if index < len(words) and words[index] in SCRIPTS:
        return index
    module = words[index + 1] if words[index : index + 1] == ["-m"] and len(words) > index + 1 else ""
    ours = any(module == name or (name.endswith(".") and module.startswith(name)) for name in MODULES)
    # A rank reads its launcher's command line, which in a fork is one text: its words are told apart by spaces.
    is_readable = module not in LAUNCHERS or not any(" " in word for word in words)
    return index if ours and is_readable else None


def _unbound(words: list[str]) -> list[str]:
    """The command that `app/launch/bound_program.py` becomes, or the command itself."""
    return words[4:] if words[1:3] == ["-IS", BOUND] else words


# -- in a fork ---------------------------------------------------------------------------------------------------------


def become(request: dict[str, Any], files: Sequence[int], keep: Sequence[int] = ()) -> NoReturn:
    """Turns a fresh fork into the process that `exec` would have made of it, runs the program, and ends.

    Args:
        request: `argv`, `cwd`, `env` and `new_session`, as `subprocess.Popen` takes them.
        files: descriptors of standard input, output and error; -1 leaves one as it is.
        keep: descriptors that are passed on under their numbers.
    """
    status = 1
    try:
        for number, file in enumerate([os.dup(file) if 0 <= file < 3 else file for file in files]):
            if file >= 0:
                os.dup2(file, number)
        first = 3
        for descriptor in sorted(keep):
            os.set_inheritable(descriptor, True)
            os.closerange(first, descriptor)
            first = descriptor + 1
        os.closerange(first, os.sysconf("SC_OPEN_MAX"))
        if request["new_session"]:
            os.setsid()
        if request["cwd"]:
            os.chdir(request["cwd"])
        argv = _unbound(request["argv"])
        _as_a_new_process(argv, request["env"])
        if argv != request["argv"]:
            ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG; what is started in a fork has its parent
        status = _exit_status(functools.partial(_run, argv))
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def _as_a_new_process(argv: Sequence[str], env: dict[str, str] | None) -> None:
    """Signals, environment, title, import path, caches and threads as a new interpreter has them."""
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, signal.SIGPIPE}:
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.set_wakeup_fd(-1)
    atexit._clear()
    gc.freeze()
    if env is not None:
        os.environ.clear()
        os.environ.update(env)
    tempfile.tempdir = None  # TMPDIR is another's
    _title().setproctitle(" ".join(argv))
    buffered = "PYTHONUNBUFFERED" not in os.environ
    for number, mode in ((0, "r"), (1, "w"), (2, "w")):
        lines = number == 2 or not buffered or os.isatty(number)
        stream = open(number, mode, 1 if lines else -1, "utf-8", "replace", closefd=False)  # noqa: SIM115
        setattr(sys, ("stdin", "stdout", "stderr")[number], stream)
    for module in [module for name, module in sys.modules.items() if name.startswith(("app.", "trainers."))]:
        for value in vars(module).values():
            if callable(clear := getattr(value, "cache_clear", None)) and not isinstance(value, type):
                clear()
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:] = [*paths, *(path for path in sys.path if path not in paths)]
    importlib.import_module("torch").set_num_threads(
        int(os.environ.get("OMP_NUM_THREADS", len(os.sched_getaffinity(0))))
    )
    if any((Path(path) / "sitecustomize.py").is_file() for path in paths):
        sys.modules.pop("sitecustomize", None)
        importlib.import_module("sitecustomize")


def _run(argv: Sequence[str]) -> None:
    index = program_in(argv)
    assert index is not None
    if argv[index] == "-m":
        sys.argv = list(argv[index + 1 :])
        sys.modules.pop(argv[index + 1], None)  # runpy would warn of it
        runpy.run_module(argv[index + 1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(argv[index:])
        sys.path.insert(0, str(Path(argv[index]).parent))  # as Python does for a script; it takes it out again
        runpy.run_path(argv[index], run_name="__main__")


def _exit_status(program: Callable[[], None]) -> int:
    """Runs it to its end, as the interpreter would: waits for threads, calls what is to be called at exit."""
    status = 0
    try:
        program()
    except SystemExit as ending:
        if ending.code is not None and not isinstance(ending.code, int):
            print(ending.code, file=sys.stderr)
        status = ending.code if isinstance(ending.code, int) else int(ending.code is not None)
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        traceback.print_exc()
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        traceback.print_exc()
        status = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    return status & 0xFF


def _title() -> Any:
    """The package that gives a process another command line; who launches by hand need not have it."""
    return importlib.import_module("setproctitle")


class _Forking(subprocess.Popen[Any]):
    """`subprocess.Popen` in all that descends from the server: a program of ours is forked, others are started."""

    def _execute_child(self, *values: Any) -> None:
        asked = inspect.signature(super()._execute_child).bind(*values).arguments  # type: ignore[misc]
        if program_in(asked["args"]) is None:
            super()._execute_child(*values)  # type: ignore[misc]
            return
        files = [asked["p2cread"], asked["c2pwrite"], asked["errwrite"]]
        self.pid = self._fork(_request(asked), files, sorted(asked["pass_fds"]))
        self._child_created = True
        self._close_pipe_fds(*(asked[name] for name in _PIPES))  # type: ignore[attr-defined]

    def _fork(self, request: dict[str, Any], files: list[int], keep: list[int]) -> int:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        if pid := os.fork():
            return pid
        become(request, files, keep)


def _exec(path: str, argv: Sequence[str], env: dict[str, str]) -> NoReturn:
    """`os.execve` in all that descends from the server: this process becomes the program of ours."""
    if program_in(argv) is None:
        _REAL_EXEC(path, argv, env)
    keep = [int(name) for name in os.listdir("/proc/self/fd")]
    request = {"argv": list(argv), "cwd": None, "env": env, "new_session": False}
    become(request, [-1, -1, -1], sorted(one for one in keep if one > 2 and _inherited(one)))


def _inherited(descriptor: int) -> bool:
    try:
        return os.get_inheritable(descriptor)
    except OSError:  # the one that listed them
        return False


_REAL_EXEC = os.execve
_PIPES = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")


def _request(asked: dict[str, Any]) -> dict[str, Any]:
    env = asked["env"]
    return {
        "argv": [os.fspath(word) for word in asked["args"]],
        "cwd": os.fspath(asked["cwd"]) if asked["cwd"] else None,
        "env": {os.fspath(name): os.fspath(value) for name, value in (os.environ if env is None else env).items()},
        "new_session": asked["start_new_session"],
    }


# -- the server --------------------------------------------------------------------------------------------------------


def main(descriptor: int) -> None:
    """Forks what is asked for on a socket: a JSON object with four descriptors, the last of which gets pid and status.

    Ends when nobody can ask any more.
    """
    asked = socket.socket(fileno=descriptor)
    subprocess.Popen = _Forking  # type: ignore[misc]
    os.execve = _exec  # type: ignore[assignment]
    _title().getproctitle()  # finds where the title is kept, by the environment as it is now
    for name in IMPORTED:
        importlib.import_module(name)
    if threading.active_count() > 1:
        raise RuntimeError(f"threads do not survive a fork: {threading.enumerate()}")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in the terminal of the tests
    while True:
        message, descriptors, _, _ = socket.recv_fds(asked, 4_000_000, 4)
        if not message:
            return
        if not (pid := os.fork()):
            if os.fork():
                os._exit(0)
            _serve(json.loads(message), descriptors)
        os.waitpid(pid, 0)
        for one in descriptors:
            os.close(one)


def _serve(request: dict[str, Any], descriptors: list[int]) -> NoReturn:
    """In a process of its own: forks the program, says its pid, waits for its end, says its status."""
    *files, answer = descriptors
    with socket.socket(fileno=answer) as link:
        pid = os.fork()
        if not pid:
            become(request, files)
        for file in files:
            os.close(file)
        link.sendall(f"{pid}\n".encode())
        _, status = os.waitpid(pid, 0)
        with contextlib.suppress(OSError):
            link.sendall(f"{status}\n".encode())
    os._exit(0)


# -- in the process that tests -----------------------------------------------------------------------------------------


@functools.cache
def _server(process: int) -> socket.socket:
    """The socket of this process's server, which is started when it is first asked for."""
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in (ours, its):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4_000_000)
    server = _REAL_POPEN(
        [sys.executable, "-P", "-m", "tests.forked", str(its.fileno())],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        pass_fds=[its.fileno()],
    )
    its.close()
    atexit.register(server.wait)
    atexit.register(ours.close)
    return ours


_REAL_POPEN = subprocess.Popen


class Popen(subprocess.Popen[Any]):
    """`subprocess.Popen` that asks the server for a program of ours; who is its parent is not seen."""

    _link: socket.socket | None = None

    def _execute_child(self, *values: Any) -> None:
        asked = inspect.signature(super()._execute_child).bind(*values).arguments  # type: ignore[misc]
        if program_in(asked["args"]) is None or asked["pass_fds"]:
            super()._execute_child(*values)  # type: ignore[misc]
            return
        self._link, its = socket.socketpair()
        files = [file if file >= 0 else number for number, file in
                 enumerate([asked["p2cread"], asked["c2pwrite"], asked["errwrite"]])]  # fmt: skip
        request = _request(asked)
        request["cwd"] = request["cwd"] or os.getcwd()
        socket.send_fds(_server(os.getpid()), [json.dumps(request).encode()], [*files, its.fileno()])
        its.close()
        self._answers = self._link.makefile("r")
        self.pid = int(self._answers.readline())
        self._child_created = True
        self._close_pipe_fds(*(asked[name] for name in _PIPES))  # type: ignore[attr-defined]

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        if self._link is None:
            return super()._try_wait(wait_flags)  # type: ignore[misc,no-any-return]
        if wait_flags & os.WNOHANG:
            try:
                self._link.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
            except BlockingIOError:
                return 0, 0
        line = self._answers.readline()
        self._answers.close()
        self._link.close()
        return self.pid, int(line) if line else signal.SIGKILL

    def _internal_poll(self, *values: Any, **more: Any) -> int | None:
        if self._link is None or self.returncode is not None:
            return super()._internal_poll(*values, **more)  # type: ignore[misc,no-any-return]
        with self._waitpid_lock:  # type: ignore[attr-defined]
            if self.returncode is None:
                pid, status = self._try_wait(os.WNOHANG)
                if pid:
                    self._handle_exitstatus(status)  # type: ignore[attr-defined]
        return self.returncode


def run(
    argv: Sequence[str], capture_output: bool = False, timeout: float | None = None, check: bool = False, **more: Any
) -> subprocess.CompletedProcess[Any]:
    """`subprocess.run` by way of `Popen` above."""
    if capture_output:
        more |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with Popen(argv, **more) as process:
        try:
            output, errors = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    ended = subprocess.CompletedProcess(argv, process.returncode, output, errors)
    if check:
        ended.check_returncode()
    return ended


if __name__ == "__main__":
    main(int(sys.argv[1]))
