"""Hands a run to Ray: writes its folder on this machine, and starts its driver, which reserves the nodes."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

from app.accelerate_launch import ROOT, module_argv, module_environment
from app.command_line import Args
from app.console import shortened
from app.launch.cluster_job import cluster_job, refuse_decided
from app.launch.foreground import held, preflight, take_back, write_folder
from app.launch.job import TrainJob
from app.runs.ray_driver import read_driver
from app.runs.scheduled import submission
from app.schedulers.ray_options import RayOptions
from trainers.config.mistakes import ConfigError, Mistakes
from trainers.run.folder import RunFolder, write_json

_CONNECT_TIMEOUT = 120.0
"""Seconds that the driver has to reach the cluster, or to start a local one."""


def ray_job(args: Args, run: RunFolder | None = None) -> tuple[TrainJob, RayOptions]:
    """The job of a run that is to train on Ray.

    Args:
        args: the command line of `train` or `resume`.
        run: the run to resume; None for a new one.

    Raises:
        ConfigError: with all mistakes at once; also if the run is done or still live.
    """
    mistakes = Mistakes()
    refuse_decided(args, "Ray", mistakes)
    before = (submission(run) or {}).get("options", {}) if run else {}
    values = {name: value for name, value in {**before, **args.own}.items() if name in RayOptions.model_fields}
    options = RayOptions()
    with mistakes:
        options = RayOptions.checked(values)
    return cluster_job(args, run, options.nodes, options.gpus_per_node, mistakes), options


def node_argv(run: RunFolder, job: str, restarts: int, addresses: Sequence[str], rank: int, local: bool) -> list[str]:
    """The program that Ray starts on a node: all that goes through Ray.

    It is in a session of its own, so that it notices the end of what Ray has started, and is not killed with it.

    Args:
        run: the run.
        job: Ray's id of the job.
        restarts: how often the run was moved to other nodes.
        addresses: addresses of the nodes by rank.
        rank: rank of this node.
        local: whether the cluster is a local one, which knows nothing of the other runs on this machine.
    """
    path = f"PYTHONPATH={ROOT}"
    module = ["env", path, "PYTHONSAFEPATH=1", sys.executable, "-P", "-m", "app.launch.ray_node", str(run.path)]
    where = ["--job", job, "--restarts", str(restarts), "--rank", str(rank), "--nodes", str(len(addresses))]
    return ["setsid", "--fork", "--wait", *module, *where, "--address", addresses[rank], "--head", addresses[0],
            *(["--local"] if local else [])]  # fmt: skip


def preview(job: TrainJob, options: RayOptions) -> str:
    """What would be submitted, as text."""
    addresses = [f"NODE{rank}" for rank in range(options.nodes)]
    cluster = os.environ.get("RAY_ADDRESS") or "a local one, started for this run"
    strategy = "STRICT_SPREAD" if options.nodes > 1 else "STRICT_PACK"
    bundle = options.resources(job.devices.num_processes)
    lines = [f"cluster: {shortened(cluster)}", f"placement group: {strategy} of {options.nodes} x {bundle}"]
    for rank in range(options.nodes):
        argv = node_argv(job.run, "JOB", 0, addresses, rank, not os.environ.get("RAY_ADDRESS"))
        lines.append(f"node {rank}: {shlex.join(argv)}")
    return "\n".join(lines)


def start(job: TrainJob, options: RayOptions, quiet: bool = True) -> dict[str, Any]:
    """Checks a job, writes its folder and starts its driver, which goes on when this process ends.

    Args:
        job: the job, from `ray_job`.
        options: what it asks the cluster for.
        quiet: whether to hide the check's progress.

    Returns:
        The state, `queued` or later.

    Raises:
        ConfigError: if the pre-flight check or Ray refuses the job; a new run then leaves no folder.
        CheckBroke: if the check crashes.
    """
    preflight(job, quiet, elsewhere=True)
    run, new = job.run, job.attempt is None
    with held(job) as lock:
        try:
            write_folder(job)
            submitted = {
                "kind": "ray",
                "options": options.model_dump(exclude_none=True),
                "resume_from": job.resume_from,
            }
            write_json(run.scheduler, submitted)
            return _hand_over(run, lock.fileno(), new)
        finally:
            if new and not run.state_file.exists():
                run.scheduler.unlink(missing_ok=True)
                run.ray.unlink(missing_ok=True)
                take_back(run)


def _hand_over(run: RunFolder, lock: int, new: bool) -> dict[str, Any]:
    """Starts the driver, which inherits the lock on the run, and waits until it has reached the cluster."""
    driver = subprocess.Popen(
        module_argv("app.launch.ray_driver", [str(run.path), str(lock)]), env=module_environment(), cwd=ROOT,
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, errors="replace",
        start_new_session=True, pass_fds=[lock],
    )  # fmt: skip
    assert driver.stderr is not None
    # Reap it: this process may be a long-lived one, such as the server of the pages.
    threading.Thread(target=driver.wait, daemon=True).start()
    deadline = time.monotonic() + _CONNECT_TIMEOUT
    try:
        while time.monotonic() < deadline and driver.poll() is None:
            facts = read_driver(run)
            if facts.get("process", {}).get("pid") == driver.pid and facts.get("phase") not in (None, "connecting"):
                break
            time.sleep(0.05)
        facts = read_driver(run)
        if facts.get("phase") not in (None, "connecting") and facts.get("process", {}).get("pid") == driver.pid:
            driver.stderr.close()
            return run.read_state() or {}
    except KeyboardInterrupt:
        driver.terminate()
        raise
    driver.kill()
    lines = [line for line in driver.stderr.read().splitlines() if line.strip()]
    cause = facts.get("cause") or (lines[-1] if lines else f"its driver did not answer for {_CONNECT_TIMEOUT:g} s")
    remedy = "" if new else "; `--on local` resumes it on this machine"
    raise ConfigError(f"Ray did not take the job: {shortened(str(cause), 300)}{remedy}")
