"""The part of the Train page's form for several machines that are started by hand: its fields, and its checks."""

from __future__ import annotations

import os
import socket
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path

from app.console import shortened
from app.hardware import find_gpus
from app.launch.network import interfaces, is_loopback, is_own
from app.runs.machines import MOST_MACHINES, machine_counts
from app.runs.runs import list_runs, true_state
from trainers.config.mistakes import ConfigError, Mistake
from trainers.config.options import MACHINE_OPTIONS
from trainers.config.parse import whole_number
from trainers.config.yaml_file import read_yaml
from trainers.run.folder import LIVE_STATES
from trainers.strategy.strategy import Machines

SHARED = "shared_folder"
MACHINES_FIELDS = {
    "num_machines": ("Machines", "How many train together, this one included."),
    "main_process_ip": ("Address of this machine", "At which the others reach it."),
    "main_process_port": ("Port", "Must be open on this machine; between all of them, the ranks use others too."),
    "min_machines": ("Fewest machines", "The run goes on with as few when others are lost; empty: it needs all."),
    SHARED: ("Shared folder", "Whether all machines see the run folder, the data and the model under the same paths."),
}
"""Label and help of the options."""
_FIRST_PORT = 29500
_FAR_TOO_MANY = 99_999


def own_addresses() -> list[tuple[str, str]]:
    """The addresses of this machine for the others: label and address. A loopback address only if there is no other."""
    pairs = [(f"{address} on {name}", address) for name, known in interfaces().items() for address in known
             if ":" not in address]  # fmt: skip
    return [pair for pair in pairs if not is_loopback(pair[1])] or pairs


def free_port(first: int = _FIRST_PORT, reserved: Collection[int] = ()) -> int:
    """The first port from `first` on that nothing on this machine listens on and that is not reserved, else `first`."""
    ports = (port for port in range(first, min(first + 100, 65536)) if port not in reserved)
    return next((port for port in ports if port_problem(port) is None), first)


def reserved_ports(runs_dir: Path) -> dict[int, str]:
    """The ports of runs on several machines that have not ended, and their ids; one that waits does not listen yet.

    Args:
        runs_dir: folder of run folders.
    """
    ports = dict[int, str]()
    for run in list_runs(runs_dir):
        state = run.read_state() or {}
        if state.get("state") in LIVE_STATES and machine_counts(state) and true_state(run)["state"] in LIVE_STATES:
            with suppress(ConfigError):
                ports[int(read_yaml(run.accelerate).get("main_process_port") or 0)] = run.id
    return ports


def port_problem(port: int) -> str | None:
    """Why this machine cannot listen on a port; None if it can."""
    try:
        with socket.socket(socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("", port))
            probe.listen()
    except OSError as error:
        return os.strerror(error.errno or 0)
    return None


def machines_texts(runs_dir: Path) -> dict[str, str]:
    """The texts that the fields start with.

    Args:
        runs_dir: folder of run folders.
    """
    addresses = own_addresses()
    address = addresses[0][1] if addresses else ""
    port = str(free_port(reserved=reserved_ports(runs_dir)))
    return {"num_machines": "2", "main_process_ip": address, "main_process_port": port, "min_machines": "",
            SHARED: "yes"}  # fmt: skip


def machine_options(
    texts: Mapping[str, str], launch: Mapping[str, str], mistakes: list[Mistake], runs_dir: Path
) -> dict[str, str]:
    """The options of `tunesmith train` that start machine 0 of several here.

    Args:
        texts: text by field out of `MACHINES_FIELDS`.
        launch: the other options of the launch; its processes are those of each machine.
        mistakes: mistakes found so far; those are added that only the machine itself can find.
        runs_dir: folder of run folders.
    """
    values = {name: texts.get(name, "").strip() for name in MACHINES_FIELDS}
    if values.pop(SHARED) != "yes":
        problem = "all machines must see the run folder under the same path: it is where they meet and save"
        remedy = "mount one there, such as NFS; without one, use a single machine"
        mistakes.append(Mistake(SHARED, "no", f": {problem}", remedy))
    options = {name: value for name, value in values.items() if value}
    for name in MACHINE_OPTIONS:
        if name != "machine_rank" and not values.get(name):
            mistakes.append(Mistake(name, None, "is missing", "fill it in"))
            return {}
    count = whole_number(values["num_machines"], 2, MOST_MACHINES)
    if count is None:
        problem = f"is not a whole number from 2 to {MOST_MACHINES}"
        mistakes.append(Mistake("num_machines", shortened(values["num_machines"]), problem, "write one"))
        return {}
    host, port = values["main_process_ip"], whole_number(values["main_process_port"], 1, 65535)
    if not is_own(host):
        known = ", ".join(address for _, address in own_addresses())
        mistakes.append(
            Mistake("main_process_ip", repr(shortened(host)), "is no address of this machine", f"use {known}")
        )
        return {}
    reserved = reserved_ports(runs_dir)
    why = f"is that of run {reserved[port]}, which has not ended" if port in reserved else ""
    if not why and port is not None and (cause := port_problem(port)):
        why = f"cannot be opened on this machine: {cause}"
    if why:
        problem, remedy = why, f"use another, such as {free_port(reserved=reserved)}"
        mistakes.append(Mistake("main_process_port", port, problem, remedy))
        return {}
    processes = launch.get("num_processes", "")
    if not processes and "gpus" not in launch and not find_gpus():
        mistakes.append(Mistake("num_processes", None, "is missing", "write how many each machine runs"))
        return {}
    each = whole_number(processes, 1, _FAR_TOO_MANY)  # too many are refused by their number on each machine
    total = {"num_processes": str(each * count)} if each is not None else {}
    return {**options, **total, "machine_rank": "0"}


def machine_args(machines: Machines) -> list[str]:
    """The machines of a run as arguments of `tunesmith train`."""
    values = {"num_machines": machines.count, "machine_rank": machines.rank, "main_process_ip": machines.ip,
              "main_process_port": machines.port, "min_machines": machines.minimum}  # fmt: skip
    return [word for name, value in values.items() if value is not None for word in (f"--{name}", str(value))]
