"""Starts a run in the background: its supervisor is a small process in its own session that outlives the starter."""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from app.accelerate_launch import launch_environment, module_argv, module_environment
from app.hardware import Devices
from app.launch.foreground import held, preflight, take_back, write_folder
from app.launch.job import TrainJob
from app.launch.machines import choose_machines
from app.launch.restarts import run_to_end
from app.runs.runs import gpu_ids, world_size
from trainers.config.mistakes import ConfigError
from trainers.config.parse import Request
from trainers.config.yaml_file import read_yaml
from trainers.run.folder import Process, RunFolder
from trainers.run.log import start_tee

START_TIMEOUT = 60.0
"""Seconds that the supervisor has to take over the run; its imports take a second or two."""


def start(job: TrainJob, quiet: bool = True) -> dict[str, Any]:
    """Checks a job, writes its folder and starts its supervisor.

    Args:
        job: the job.
        quiet: whether to hide the check's progress.

    Returns:
        The state, `queued` or later. The run continues when this process ends.

    Raises:
        ConfigError: if the pre-flight check refuses the job, or another command has started the run meanwhile.
        CheckBroke: if the check crashes.
    """
    if job.devices.machine_rank:
        remedy = "leave --detach out there, and keep the command from its terminal with nohup, tmux or your scheduler"
        raise ConfigError(f"--detach with machine_rank={job.devices.machine_rank}: only machine 0 detaches; {remedy}")
    preflight(job, quiet)
    with held(job) as lock:
        try:
            write_folder(job)
            machines = job.devices.machines
            counts = {"count": machines.count, "minimum": machines.minimum} if machines else None
            processes = [Process.of("starter").as_json()]
            job.run.write_state(state="queued", cause=None, ending=None, processes=processes, machines=counts)
            return _hand_over(job, lock.fileno())
        finally:
            if not job.run.state_file.exists():
                take_back(job.run)


def _hand_over(job: TrainJob, lock: int) -> dict[str, Any]:
    """Starts the supervisor, which inherits the lock on the run, and waits until it appears in the state."""
    args = [str(job.run.path), str(lock), *(["--resume_from", job.resume_from] if job.resume_from else [])]
    if job.devices.machines and job.devices.machines.minimum:
        args += ["--min_machines", str(job.devices.machines.minimum)]
    child = subprocess.Popen(
        module_argv("app.launch.background", args), env=module_environment(), stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True, pass_fds=[lock],
    )  # fmt: skip
    assert child.stderr is not None
    # Reap the child: the starter may be a long-lived process, such as the server of the pages.
    threading.Thread(target=child.wait, daemon=True).start()
    deadline = time.monotonic() + START_TIMEOUT
    try:
        while time.monotonic() < deadline and child.poll() is None:
            state = job.run.read_state() or {}
            if any(process.pid == child.pid for process in job.run.processes()):
                child.stderr.close()
                return state
            time.sleep(0.05)
    except KeyboardInterrupt:
        job.run.ask_stop(save=False)  # interrupting the start cancels the run
        raise
    # The supervisor has exited or timed out: either the run is already over, or it could not be started.
    final = job.run.read_state() or {}
    if final.get("state") not in (None, "queued"):
        return final
    child.kill()
    last_line = child.stderr.read().decode("utf-8", "replace").strip().splitlines()[-1:]
    cause = f"the supervisor could not be started: {last_line[0] if last_line else f'exit status {child.wait()}'}"
    return job.run.write_state(state="failed", cause=cause)


def main(argv: list[str]) -> int:
    """Entry point of the supervisor: takes over the lock on a written run folder, and trains the run to its end."""
    parser = argparse.ArgumentParser(prog="python -m app.launch.background")
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("lock", type=int, help="open descriptor of the run's lock, kept to the end")
    parser.add_argument("--resume_from")
    parser.add_argument("--min_machines")
    args = parser.parse_args(argv)
    os.set_inheritable(args.lock, False)  # only the supervisor holds the run, not its children
    run = RunFolder(args.run_dir)
    start_tee(run.log, "supervisor", echo=False)
    try:
        config = Request(config=str(run.config)).resolve()
        options = {"min_machines": args.min_machines} if args.min_machines else {}
        machines = choose_machines(options, {**read_yaml(run.accelerate), "machine_rank": 0})
        devices = Devices(gpu_ids(run), world_size(run) or 1, machines)
        environment = launch_environment(devices)
        run_to_end(run, devices, environment, _unheard, args.resume_from, config.max_restarts, config.share_gpus)
    except ConfigError as error:
        run.write_state(state="failed", cause="; ".join(error.lines), ending=None)
        return 2
    except BaseException as error:
        with contextlib.suppress(OSError):
            run.write_state(
                state="failed",
                cause=f"its supervisor failed: {error!r}; see the log; resume continues from the last checkpoint",
                ending=None,
            )
        raise
    return 0


def _unheard(kind: str, text: str) -> None:
    """Ignores events: nobody watches a detached run, and its notes are in the log."""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
