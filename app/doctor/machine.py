"""Checks of this machine alone: the run folder and its disk, and the names that other machines find it by."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
import time
from collections.abc import Mapping
from ipaddress import ip_address
from pathlib import Path

import psutil

from app.doctor.check import Check
from trainers.strategy.strategy import Machines

GIB = 2**30
CHUNK, CHUNKS, DISK_SECONDS = 4 * 2**20, 16, 5.0
LEAST_WRITE = 10e6
"""Bytes per second. The 12 GB that a checkpoint of a 1B model takes with Adam's states would need twenty minutes."""
LEAST_FREE = GIB
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


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
    room = Check("run folder", True, f"{folder.absolute()}: writable, {free / GIB:.1f} GiB free")
    if free < LEAST_FREE:
        remedy = "free space, or name another --runs_dir"
        room = Check("run folder", False, f"{existing} has {free / GIB:.2f} GiB free", remedy)
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


def addresses(name: str) -> list[str]:
    """The IP addresses that a name resolves to; empty if to none."""
    try:
        entries = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return list(dict.fromkeys(str(entry[4][0]).partition("%")[0] for entry in entries))


def is_loopback(address: str) -> bool:
    """Whether an IP address means the machine itself."""
    return ip_address(address).is_loopback


def interface_address(env: Mapping[str, str]) -> str | None:
    """The address of the network interface that a variable names for gloo or NCCL; None if none is set."""
    for variable in INTERFACES:
        if name := env.get(variable):
            for address in psutil.net_if_addrs().get(name, []):
                if address.family in (socket.AF_INET, socket.AF_INET6):
                    return str(address.address).partition("%")[0]
    return None


def own_address(machines: Machines, env: Mapping[str, str]) -> str | None:
    """The address at which the ranks of this machine wait for others: gloo takes what the host's name resolves to."""
    if chosen := interface_address(env):
        return chosen
    if _is_written_loopback(machines.ip):
        return "127.0.0.1"
    return next((address for address in addresses(socket.gethostname()) if not is_loopback(address)), None)


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
    if _is_written_loopback(machines.ip):
        return Check("host name", True, f"main_process_ip={machines.ip}: all machines of this run are this one")
    if machines.rank > 0 and all(map(is_loopback, main)):
        problem = f"main_process_ip={machines.ip} resolves to {', '.join(main)} here, which is this machine itself"
        return Check("host name", False, problem, "write machine 0's IP address, or mend /etc/hosts on this machine")
    if chosen := interface_address(env):
        return Check("host name", True, f"{value}; the ranks use {chosen}")
    if known and not all(map(is_loopback, known)):
        return Check("host name", True, value)
    remedy = (
        f"in /etc/hosts of this machine give {host} its network address, or set {INTERFACES[0]} and {INTERFACES[1]} "
        f"to its network interface ({', '.join(_interfaces()) or 'see `ip address`'})"
    )
    return Check("host name", False, f"{value}, where no other machine finds it", remedy)


def _is_written_loopback(ip: str) -> bool:
    try:
        return is_loopback(ip)
    except ValueError:
        return ip == "localhost"


def _interfaces() -> list[str]:
    """Names of the network interfaces that are up and lead elsewhere."""
    states = psutil.net_if_stats()
    return [
        name
        for name, entries in psutil.net_if_addrs().items()
        if states.get(name) and states[name].isup
        and any(entry.family == socket.AF_INET and not is_loopback(entry.address) for entry in entries)
    ]  # fmt: skip
