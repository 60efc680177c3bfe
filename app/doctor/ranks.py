"""Starts the ranks of `trainers/tools/collectives.py` on this machine, watches them, and collects what they wrote."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from app.accelerate_launch import ROOT, launch_environment, module_argv, module_environment
from app.console import clean
from app.hardware import Devices
from app.launch.process_tree import Descendants
from trainers.strategy.mesh import MeshSizes

LAUNCHER, PROGRAM = "trainers.tools.bound_launcher", "trainers.tools.collectives"
GRACE = 10.0
"""Seconds for the other ranks to end after one has reported an error."""
POLL = 0.1
_TAIL = 2000
"""Characters of the launcher's output that are kept."""


def rank_argv(devices: Devices, sizes: MeshSizes, out: Path, timeout: float, quick: bool) -> list[str]:
    """The command that starts this machine's ranks.

    Args:
        devices: devices of the run.
        sizes: its mesh.
        out: folder for what the ranks write.
        timeout: seconds that a step may take.
        quick: leave out all measurements.
    """
    machines = devices.machines
    launcher = module_argv(LAUNCHER, [str(os.getpid()), str(out), "--nproc_per_node", str(devices.local_processes)])
    if machines:
        launcher += ["--nnodes", str(machines.count), "--node_rank", str(machines.rank), "--master_addr", machines.ip]
        launcher += ["--master_port", str(machines.port), "--rdzv_conf", f"timeout={timeout:.0f}"]
    else:
        launcher += ["--rdzv_backend", "c10d", "--rdzv_endpoint", "127.0.0.1:0", "--local_addr", "127.0.0.1"]
    # The watch below ends a step that hangs; the ranks' own limit only matters if this process is gone.
    mesh = json.dumps({**sizes.by_axis, "ep": sizes.ep})
    program = ["-m", PROGRAM, "--out", str(out), "--sizes", mesh, "--timeout", str(4 * timeout)]
    return [*launcher, *program, *(["--quick"] if quick else [])]


def run_ranks(
    devices: Devices, sizes: MeshSizes, timeout: float, quick: bool, outer: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Runs this machine's ranks to their end, or until none of them makes progress.

    Args:
        devices: devices of the run.
        sizes: its mesh.
        timeout: seconds that a step may take.
        quick: leave out all measurements.
        outer: environment to extend; default: this process's.

    Returns:
        `ranks`, a list with `rank`, `lines` (what it wrote) and `state` (`ended`, `alive` or `stopped`) of each, and
        `output`, the end of what the launcher printed.
    """
    env = launch_environment(devices, module_environment(outer))
    first = devices.machine_rank * devices.local_processes
    numbers = range(first, first + devices.local_processes)
    with tempfile.TemporaryDirectory(prefix="tunesmith-doctor-", ignore_cleanup_errors=True) as name:
        folder, descendants = Path(name), Descendants()
        log = folder / "log.txt"
        env["TMPDIR"] = name  # what the launcher leaves when it is killed is removed with the folder
        with open(log, "wb") as output:
            launcher = subprocess.Popen(rank_argv(devices, sizes, folder, timeout, quick), cwd=ROOT, env=env,
                                        stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                                        start_new_session=True)  # fmt: skip
        descendants.waited_for = launcher.pid
        try:
            _watch(launcher, folder, descendants, timeout)
            ranks = [{"rank": rank, **_report(folder / f"rank-{rank}.jsonl")} for rank in numbers]
        finally:
            descendants.end(2.0)
            launcher.kill()
            launcher.wait()
        text = clean(log.read_text(encoding="utf-8", errors="replace"))
    return {"ranks": ranks, "output": text[-_TAIL:]}


def _watch(launcher: subprocess.Popen[bytes], folder: Path, descendants: Descendants, timeout: float) -> None:
    """Waits until the launcher has ended, or the ranks have been silent for `timeout` seconds."""
    seen, deadline = -1, time.monotonic() + timeout
    while launcher.poll() is None and time.monotonic() < deadline:
        descendants.collect()
        files = sorted(folder.glob("rank-*.jsonl"))
        size = sum(file.stat().st_size for file in files)
        if size != seen:
            failed = any(b'"kind": "error"' in _end_of(file) for file in files)
            seen, deadline = size, time.monotonic() + (min(GRACE, timeout) if failed else timeout)
        time.sleep(POLL)
    descendants.collect()


def _end_of(file: Path) -> bytes:
    with open(file, "rb") as data:
        data.seek(max(0, os.fstat(data.fileno()).st_size - 4096))
        return data.read()


def _report(file: Path) -> dict[str, Any]:
    lines = []
    if file.exists():
        for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
            with suppress(ValueError):  # the last one of a rank that was killed may be cut
                lines.append(json.loads(line))
    start = next((line for line in lines if line["kind"] == "start"), None)
    return {"lines": lines, "state": _state(start["pid"]) if start else "ended"}


def _state(pid: int) -> str:
    try:
        status = psutil.Process(pid).status()
    except psutil.Error:
        return "ended"
    if status in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP):
        return "stopped"
    return "ended" if status == psutil.STATUS_ZOMBIE else "alive"
