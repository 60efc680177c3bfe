"""The network interfaces of this machine, and the address at which its ranks wait for those of other machines.

Left to itself, gloo listens at the address that the host's name resolves to, which on Debian is 127.0.1.1, and NCCL
takes the first interface that it likes. The ranks are therefore told to use the interface that leads to machine 0.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass
from ipaddress import ip_address

import psutil

from trainers.strategy.strategy import Machines

VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
"""Name the interface for gloo, NCCL and TensorPipe."""


@dataclass(frozen=True)
class Interface:
    """A network interface and the address in use on it."""

    name: str
    address: str

    def __str__(self) -> str:
        return f"{self.address} on {self.name}"


def interfaces() -> dict[str, list[str]]:
    """The IP addresses of each network interface that is up."""
    states, families = psutil.net_if_stats(), (socket.AF_INET, socket.AF_INET6)
    return {
        name: [entry.address.partition("%")[0] for entry in entries if entry.family in families]
        for name, entries in psutil.net_if_addrs().items()
        if states.get(name) and states[name].isup
    }  # fmt: skip


def listed() -> str:
    """The interfaces that lead to other machines, with their addresses, in words."""
    pairs = [(name, [address for address in addresses if not is_loopback(address)])
             for name, addresses in interfaces().items()]  # fmt: skip
    return ", ".join(f"{name} ({', '.join(addresses)})" for name, addresses in pairs if addresses) or "none"


def addresses(name: str) -> list[str]:
    """The IP addresses that a name resolves to; empty if to none."""
    try:
        entries = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, ValueError):  # ValueError: a part that is empty, or longer than 63 characters
        return []
    return list(dict.fromkeys(str(entry[4][0]).partition("%")[0] for entry in entries))


def is_loopback(address: str) -> bool:
    """Whether an IP address means the machine itself."""
    return ip_address(address).is_loopback


def is_written_loopback(ip: str) -> bool:
    """Whether `main_process_ip` itself says that all machines of a run are one."""
    try:
        return is_loopback(ip)
    except ValueError:
        return ip == "localhost"


def is_own(host: str) -> bool:
    """Whether a name or address leads to this machine."""
    return any(is_loopback(address) or interface_of(address) is not None for address in addresses(host))


def interface_of(address: str) -> Interface | None:
    """The interface with an address."""
    address = address.partition("%")[0].removeprefix("::ffff:")  # an IPv4 address on a socket for both families
    return next((Interface(name, address) for name, known in interfaces().items() if address in known), None)


def route_to(host: str) -> Interface | None:
    """The interface from which packets to a host leave; None if there is no route. Sends nothing."""
    try:
        family, _, _, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)
            return interface_of(str(probe.getsockname()[0]))
    except (OSError, ValueError):
        return None


def own_interface(machines: Machines, env: Mapping[str, str], reached_at: str | None = None) -> Interface | None:
    """The interface that the ranks of this machine use.

    Args:
        machines: the machines of the run.
        env: the environment of the run, in which a user may have named it.
        reached_at: the address of this machine at which others have reached it, if they have.
    """
    known = interfaces()
    for variable in VARIABLES:
        for name in _matching(variable, env.get(variable, ""), list(known)):
            if known[name]:
                return Interface(name, known[name][0])
    route = route_to(machines.ip)
    if route and (is_written_loopback(machines.ip) or not is_loopback(route.address)):
        return route
    return interface_of(reached_at) if reached_at else None


def interface_variables(interface: Interface | None, env: Mapping[str, str]) -> dict[str, str]:
    """The variables that make the ranks use an interface; those that the user has set stay as they are."""
    if interface is None or is_loopback(interface.address):
        return {}
    return {variable: interface.name for variable in VARIABLES if not env.get(variable)}


def interface_problem(machines: Machines, env: Mapping[str, str]) -> str | None:
    """What is wrong with the interfaces that a user has named in variables, and the remedy; None if nothing is."""
    known = interfaces()
    for variable in VARIABLES:
        if not (value := env.get(variable, "")):
            continue
        names, setting = _matching(variable, value, list(known)), f"{variable}={value}"
        remedy = f"name one that leads to the other machines: {listed()}; or leave it unset"
        missing = [] if variable.startswith("NCCL") else [name for name in value.split(",") if name not in known]
        if missing or (not names and not value.startswith("^")):
            return f"{setting} names no network interface of this machine that is up; {remedy}"
        used = [address for name in names for address in known[name]]
        if names and all(map(is_loopback, used)) and not is_written_loopback(machines.ip):
            return f"{setting} has no address that other machines can reach; {remedy}"
    return None


def _matching(variable: str, value: str, known: list[str]) -> list[str]:
    """The interfaces that a variable names: for NCCL by their beginnings, unless it begins with `=`, or `^` (not)."""
    if not value or value.startswith("^"):
        return []
    patterns = [word for word in value.removeprefix("=").split(",") if word]
    if variable.startswith("NCCL") and not value.startswith("="):
        return [name for name in known if name.startswith(tuple(patterns))]
    return [name for name in known if name in patterns]


def why_unreachable(error: OSError, refused: str) -> str:
    """Why a connection failed, in words.

    Args:
        error: the error.
        refused: what it means if the other side refuses connections.
    """
    if isinstance(error, TimeoutError):
        return "no answer, as from a firewall or a wrong address"
    if isinstance(error, ConnectionRefusedError):
        return f"connection refused, {refused}"
    return error.strerror or str(error)
