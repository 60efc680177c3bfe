"""Checks of this machine alone: the run folder and its disk, and the names that other machines find it by."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from app.doctor.check import Check
from app.launch.network import (
    addresses,
    interface_problem,
    is_loopback,
    is_written_loopback,
    listed,
    own_interface,
)
from trainers.config.byte_text import byte_text
from trainers.strategy.strategy import Machines

GIB = 2**30
CHUNK, CHUNKS, DISK_SECONDS = 4 * 2**20, 16, 5.0
LEAST_WRITE = 10e6
"""Bytes per second. The 12 GB that a checkpoint of a 1B model takes with Adam's states would need twenty minutes."""
LEAST_FREE = GIB


def nearest_folder(folder: Path) -> Path:
    """The folder, or its nearest parent that exists."""
    return next((path for path in (folder.absolute(), *folder.absolute().parents) if path.is_dir()), Path("/"))


def disk_checks(folder: Path, quick: bool = False, least: float = LEAST_WRITE) -> list[Check]:
    """Whether the run folder's disk can be written, has room, and how fast it is.

    Args:
        folder: folder of run folders; need not exist.
        quick: write little, and leave out how fast it is.
        least: bytes per second below which it is too slow.
    """
    existing = nearest_folder(folder)
    try:
        free = shutil.disk_usage(existing).free
        rate = write_rate(existing, 1 if quick else CHUNKS)
    except OSError as error:
        problem = f"{existing} cannot be written: {error.strerror or error}"
        return [Check("run folder", False, problem, "free space or change its permissions, or name another --runs_dir")]
    room = Check("run folder", True, f"{folder.absolute()}: writable, {byte_text(free)} free")
    if free < LEAST_FREE:
        remedy = "free space, or name another --runs_dir"
        room = Check("run folder", False, f"{existing} has {byte_text(free)} free", remedy)
    if quick:
        return [room]
    value = f"{rate / 1e6:.0f} MB/s written and synced"
    if rate >= least:
        return [room, Check("disk speed", True, value)]
    remedy = f"checkpoints wait for it; name a --runs_dir on a disk with at least {least / 1e6:.0f} MB/s"
    return [room, Check("disk speed", False, f"{existing}: only {value}", remedy)]


def write_rate(folder: Path, chunks: int) -> float:
    """Bytes per second of new data, `chunks` times `CHUNK` bytes, that have reached the disk."""
    data = os.urandom(CHUNK)  # no disk can compress it
    with tempfile.TemporaryFile(dir=folder, prefix=".tunesmith-doctor-") as file:
        start, written = time.perf_counter(), 0
        for _ in range(chunks):
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
            written += CHUNK
            spent = time.perf_counter() - start
            if spent > DISK_SECONDS:
                break
        return written / max(spent, 1e-9)


# -- names -------------------------------------------------------------------------------------------------------------


def names_check(machines: Machines | None, env: Mapping[str, str]) -> Check:
    """Whether other machines can find this one by the address that its name resolves to."""
    host = socket.gethostname()
    known = addresses(host)
    value = f"{host} is {', '.join(known) or 'not known to the resolver'}"
    if machines is None:
        return Check("host name", True, f"{value}; it matters only for several machines")
    main = addresses(machines.ip)
    if not main:
        remedy = "write its IP address, or add the name to /etc/hosts on this machine"
        return Check("host name", False, f"main_process_ip={machines.ip} cannot be resolved here", remedy)
    if is_written_loopback(machines.ip):
        return Check("host name", True, f"main_process_ip={machines.ip}: all machines of this run are this one")
    if machines.rank > 0 and all(map(is_loopback, main)):
        problem = f"main_process_ip={machines.ip} resolves to {', '.join(main)} here, which is this machine itself"
        return Check("host name", False, problem, "write machine 0's IP address, or mend /etc/hosts on this machine")
    if fault := interface_problem(machines, env):
        problem, _, remedy = fault.partition("; ")
        return Check("host name", False, problem, remedy)
    if interface := own_interface(machines, env):
        return Check("host name", True, f"{value}; the ranks use {interface}")
    if machines.rank == 0:
        return Check("host name", True, f"{value}; the ranks use the address at which the others reach it")
    problem = f"no network interface leads to main_process_ip={machines.ip}"
    return Check("host name", False, problem, f"see `ip route`; the interfaces that are up: {listed()}")
