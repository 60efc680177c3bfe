"""What the driver of a run on Ray starts on each node: `python -m app.launch.ray_node RUN --rank K …`.

It supervises the node's ranks. When what Ray has started on the node ends before it, the driver has died, and it saves
and stops; or the driver has given up this node or this start of the job, and it ends at once.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import psutil

from app.launch.cluster_node import Node, take_over
from app.launch.foreground import EXIT_CODES
from app.runs.ray_driver import BEAT, read_driver
from app.runs.runs import world_size
from app.runs.scheduled import submission
from app.schedulers.ray_options import RayOptions
from trainers.config.mistakes import ConfigError
from trainers.run.folder import LIVE_STATES, RunFolder, log_line
from trainers.run.log import start_tee
from trainers.strategy.strategy import Machines

_KILLED = 137


def leave_ray(options: RayOptions, processes: int) -> None:
    """Takes out of the environment what Ray has put there for the functions that it runs itself."""
    for name in [name for name in os.environ if name.startswith("RAY_")]:
        del os.environ[name]
    if os.environ.get("PYTHONBREAKPOINT", "").startswith("ray."):
        del os.environ["PYTHONBREAKPOINT"]
    cpus = options.resources(processes)["CPU"]
    if os.environ.get("OMP_NUM_THREADS") == str(cpus):  # Ray's default: all that is reserved, for one process
        os.environ["OMP_NUM_THREADS"] = str(max(1, cpus // max(1, processes // options.nodes)))
    if not options.gpus_per_node:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


class Watch(threading.Thread):
    """Ends this process when it is not wanted any more.

    Args:
        run: the run.
        job: Ray's id of the job.
        restarts: the start of the job that this process belongs to.
    """

    def __init__(self, run: RunFolder, job: str, restarts: int):
        super().__init__(daemon=True)
        self.watched, self.start_of_job, self.parent = run, (job, restarts), os.getppid()

    def run(self) -> None:
        """Watches until this process ends."""
        while os.getppid() == self.parent:
            if self._is_over():
                _end_now()
            time.sleep(1.0)
        seen = read_driver(self.watched).get("time")
        deadline = time.monotonic() + 3 * BEAT
        while time.monotonic() < deadline:
            if self._is_over() or read_driver(self.watched).get("time") != seen:
                _end_now()  # the driver lives: it has lost this node, or the program that it started here
            time.sleep(1.0)
        _log(self.watched, "the Ray driver is gone: the run saves and stops")
        with contextlib.suppress(OSError):
            if (self.watched.read_state() or {}).get("state") in LIVE_STATES:
                self.watched.ask_stop(source="the death of its Ray driver")
        os.kill(os.getpid(), signal.SIGTERM)

    def _is_over(self) -> bool:
        """Whether the driver has gone on to another start of the job, or the run is to end by force."""
        if (submission(self.watched) or {}).get("killed"):
            return True
        driver = read_driver(self.watched)
        return bool(driver.get("job")) and (driver["job"], driver.get("restarts")) != self.start_of_job


def _end_now() -> None:
    """Kills all that this process has started, and itself."""
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            process.kill()
    os._exit(_KILLED)


def _log(run: RunFolder, *lines: str) -> None:
    with contextlib.suppress(OSError), open(run.log, "a", encoding="utf-8") as log:
        log.writelines(log_line("supervisor", line) for line in lines)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("", 0))
        return int(listener.getsockname()[1])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m app.launch.ray_node")
    parser.add_argument("run_dir", type=Path)
    for name in ("--job", "--address", "--head"):
        parser.add_argument(name, required=True)
    for name in ("--restarts", "--rank", "--nodes"):
        parser.add_argument(name, type=int, required=True)
    parser.add_argument("--local", action="store_true")
    return parser


def supervise_node(run: RunFolder, args: argparse.Namespace) -> int:
    """Trains this node's part of a run; returns the exit status."""
    scheduler = {"kind": "ray", "job": args.job, "restarts": args.restarts}
    port = _free_port()
    machines = Machines(args.nodes, args.rank, args.head, port) if args.nodes > 1 else None
    remedy = "check what `ray status` says of it"
    node = Node(args.address, args.nodes, machines, scheduler, remedy)
    if args.rank == 0:
        with take_over(run):
            start_tee(run.log, "supervisor", echo=False)
            node = replace(node, scheduler={**scheduler, "port": port})
            return EXIT_CODES.get(str(node.lead(run, reserved=not args.local)["state"]), 0)
    start_tee(run.log, "supervisor", echo=False)
    state = node.wait_for_head(run)
    if machines is None or state is None:
        return 1
    head_port = int((state.get("scheduler") or {}).get("port", port))  # a head that refused the run has none
    return replace(node, machines=replace(machines, port=head_port)).follow(run)


def main(argv: list[str]) -> int:
    """Entry point."""
    args = _parser().parse_args(argv)
    run = RunFolder(args.run_dir)
    Watch(run, args.job, args.restarts).start()
    leave_ray(RayOptions.checked((submission(run) or {}).get("options", {})), world_size(run) or 1)
    try:
        return supervise_node(run, args)
    except ConfigError as error:
        _log(run, *error.lines)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
