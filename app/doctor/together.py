"""Checks that several machines make together, before any rank starts: port, versions, clocks, folder, connections."""

from __future__ import annotations

import os
import platform
import secrets
import shutil
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from app.doctor.check import Check, judged
from app.doctor.exchange import Exchange
from app.doctor.machine import nearest_folder
from app.launch.links import CLOCK_BOUND, CLOCK_REMEDY, VERSIONS_REMEDY, clock_faults
from app.launch.network import Interface, own_interface
from trainers.run.compatibility import versions

VISIBLE_SECONDS = 5.0
"""How long a file may take to be seen by another machine: network file systems cache for some seconds."""
CONNECT_SECONDS = 5.0


def together(exchange: Exchange, runs_dir: Path, env: Mapping[str, str]) -> list[Check]:
    """Makes the checks; every machine returns the same ones.

    Args:
        exchange: the connection of the machines.
        runs_dir: folder of run folders.
        env: the environment of the run.

    Raises:
        Unreachable: if a machine is lost.
    """
    machines = exchange.machines
    hosts = exchange.gather(socket.gethostname())
    reached = f"{machines.ip}:{machines.port} of machine 0 ({hosts[0]}) is open to the other {machines.count - 1}"
    port = Check("port", True, reached)
    local = {"python": platform.python_version(), **versions()}
    return [
        port,
        same_versions(exchange.gather(local)),
        clocks(exchange),
        shared_folder(exchange, runs_dir),
        connections(exchange, own_interface(machines, env, exchange.own_address())),
    ]


def same_versions(by_machine: Sequence[Mapping[str, str]]) -> Check:
    """Whether all machines have the same code and packages.

    Args:
        by_machine: version by package, for each machine.
    """
    faults = []
    for name in sorted({name for known in by_machine for name in known}):
        values = [known.get(name, "not installed") for known in by_machine]
        usual = max(values, key=values.count) if len(values) > 2 else values[0]
        faults += [
            f"machine {rank} has {name} {value}, and the others {usual}"
            if len(values) > 2
            else f"machine {rank} has {name} {value}, and machine 0 {usual}"
            for rank, value in enumerate(values)
            if value != usual
        ]
    value = ", ".join(f"{name} {version}" for name, version in by_machine[0].items())
    return judged("equal versions", faults, f"on all {len(by_machine)}: {value}", VERSIONS_REMEDY)


def clocks(exchange: Exchange) -> Check:
    """Whether the wall clocks agree within `CLOCK_BOUND`, uncertainty in the user's favour."""
    samples = exchange.gather(exchange.clock_offset())
    faults = clock_faults(dict(enumerate(samples)))
    largest = max(samples, key=lambda sample: abs(sample[0]))
    value = f"within {abs(largest[0]) * 1000:.0f} ms (+- {largest[1] * 1000:.1f}); at most {CLOCK_BOUND:g} s"
    return judged("clocks", faults, value, CLOCK_REMEDY)


# -- the shared folder -------------------------------------------------------------------------------------------------


def shared_folder(exchange: Exchange, runs_dir: Path) -> Check:
    """Whether all machines see and can write one folder under one path: each reads what another wrote."""
    name, rank = "shared folder", exchange.machines.rank
    remedy = "mount one network folder at the same path on all machines, and name it with --runs_dir"
    folder, problem = Path(), ""
    if rank == 0:
        folder = nearest_folder(runs_dir) / f".tunesmith-doctor-{secrets.token_hex(4)}"
        problem = _error_of(lambda: folder.mkdir()) or _error_of(lambda: (folder / "0").write_text(folder.name))
    try:
        announced = exchange.gather([str(runs_dir.absolute()), str(folder), problem])
        paths = [entry[0] for entry in announced]
        folder, problem = Path(announced[0][1]), str(announced[0][2])
        if problem:
            return Check(name, False, f"machine 0 cannot write {folder.parent}: {problem}", remedy)
        others = [f"machine {number} has {path}" for number, path in enumerate(paths) if path != paths[0]]
        if others:
            return Check(name, False, f"machine 0 has {paths[0]}, {', '.join(others)}", remedy)
        faults = exchange.gather(_read_and_write(folder, rank) if rank else None)
        unseen = {}
        if rank == 0:
            wrote = [number for number, fault in enumerate(faults) if number and not fault]
            unseen = {number: f"machine 0 does not see what machine {number} wrote in {folder.parent}"
                      for number in wrote if not _appears(folder / str(number), folder.name)}  # fmt: skip
        back = exchange.gather(list(unseen.values()))
        problems = [f"machine {number} {fault}" for number, fault in enumerate(faults) if fault] + back[0]
        return judged(name, problems, f"{folder.parent}: seen and writable by all {len(paths)}", remedy)
    finally:
        if rank == 0:
            shutil.rmtree(folder, ignore_errors=True)


def _read_and_write(folder: Path, rank: int) -> str | None:
    """Reads machine 0's file and writes one; returns what went wrong."""
    if not _appears(folder / "0", folder.name):
        return f"does not see what machine 0 wrote in {folder.parent}"
    problem = _error_of(lambda: (folder / str(rank)).write_text(folder.name))
    return f"cannot write {folder.parent}: {problem}" if problem else None


def _appears(path: Path, text: str) -> bool:
    """Whether a file with this text appears in time."""
    deadline = time.monotonic() + VISIBLE_SECONDS
    while True:
        try:
            os.listdir(path.parent)  # makes a network file system look again
            if path.read_text(encoding="utf-8") == text:
                return True
        except OSError:
            pass
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)


def _error_of(action: Any) -> str:
    try:
        action()
    except OSError as error:
        return error.strerror or str(error)
    return ""


# -- connections -------------------------------------------------------------------------------------------------------


def connections(exchange: Exchange, interface: Interface | None) -> Check:
    """Whether every machine can connect to every other on a port that the system chooses, as the ranks do.

    Args:
        exchange: the connection of the machines.
        interface: where this machine waits for others; None if it has no address that they can use.
    """
    rank, address = exchange.machines.rank, interface.address if interface else None
    family = socket.AF_INET6 if address and ":" in address else socket.AF_INET
    with socket.create_server(("", 0), backlog=64, family=family) as server:
        places = exchange.gather([address, server.getsockname()[1]])
        faults = []
        for number, (host, port) in enumerate(places):
            if number == rank or host is None:
                continue
            try:
                socket.create_connection((host, port), timeout=CONNECT_SECONDS).close()
            except OSError as error:
                faults.append(f"machine {rank} cannot reach machine {number} at {host}:{port} ({error})")
        limit = exchange.timeout + CONNECT_SECONDS * exchange.machines.count
        problems = [fault for each in exchange.gather(faults, limit) for fault in each]
    nameless = [
        f"machine {number} has no address for the others" for number, (host, _) in enumerate(places) if not host
    ]
    value = ", ".join(f"machine {number} at {host}" for number, (host, _) in enumerate(places))
    remedy = (
        "open all ports between the machines in their firewalls, and name the network to use with GLOO_SOCKET_IFNAME "
        "and NCCL_SOCKET_IFNAME"
    )
    return judged("connections", problems + nameless, f"each reaches each: {value}", remedy)
