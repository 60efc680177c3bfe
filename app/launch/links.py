"""Checks the machines of a run against each other before its ranks start: links both ways, versions and clocks.

While machine 0 gathers the machines, each listens on a port that the system chooses, as its ranks will, and machine 0
also on the port of the run. Whoever connects reads one line with the launch and the time. Members report in their
status files what they found; machine 0 connects back to them, and decides.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import selectors
import socket
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from app.launch.network import (
    Interface,
    addresses,
    interface_variables,
    is_loopback,
    is_written_loopback,
    own_interface,
    why_unreachable,
)
from trainers.run.compatibility import versions
from trainers.strategy.strategy import Machines

PROBE_TIMEOUT = 5.0
"""Seconds that a machine tries to reach another."""
PROBE_AFTER = 5.0
"""Seconds without progress after which a machine looks whether it still reaches machine 0."""
PROBE_AGAIN = 2.0
"""Seconds until it tries again."""
CLOCK_BOUND = 1.0
"""Seconds by which clocks may differ. The lines of all machines stand in one log, in order of time."""
CLOCK_REMEDY = "start a time service there: `timedatectl set-ntp true`, or chrony"
DECISIVE = ("python", "torch", "transformers", "tunesmith")
"""Without equal versions of these, no promise about the result holds."""
VERSIONS_REMEDY = "install the same versions on all machines; `pip freeze` on one lists them"
_PORTS_REMEDY = "open all ports between the machines in their firewalls"
_INTERFACE_REMEDY = "and name the network to use with GLOO_SOCKET_IFNAME there"
_MAX_LINE = 1024


# -- connections -------------------------------------------------------------------------------------------------------


class Responder:
    """Answers on a port until it is closed.

    Args:
        launch: the launch to tell about.
        port: the port; 0 for one that the system chooses.

    Raises:
        OSError: if the port cannot be opened.
    """

    def __init__(self, launch: str, port: int = 0):
        self.launch = launch
        self.reached_at: str | None = None
        """The address of this machine to which another has connected."""
        family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
        self.server = socket.create_server(
            ("", port), family=family, dualstack_ipv6=family == socket.AF_INET6, backlog=128
        )
        self.port = int(self.server.getsockname()[1])
        self.waker, self.woken = socket.socketpair()
        self.thread = threading.Thread(target=self._answer, name="responder", daemon=True)
        self.thread.start()

    def _answer(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self.server, selectors.EVENT_READ)
            selector.register(self.woken, selectors.EVENT_READ)
            while all(key.fileobj is self.server for key, _ in selector.select()):
                with contextlib.suppress(OSError):
                    connection, _ = self.server.accept()
                    with connection:
                        connection.settimeout(PROBE_TIMEOUT)
                        answer = {"launch": self.launch, "time": time.time()}
                        connection.sendall(json.dumps(answer).encode() + b"\n")
                        self.reached_at = str(connection.getsockname()[0])

    def close(self) -> None:
        """Gives the port up."""
        self.waker.close()
        self.thread.join()
        self.server.close()
        self.woken.close()


def clock_of(host: str, port: int, launch: str) -> tuple[float, float]:
    """How far the clock of another machine is ahead of this one's, and the uncertainty, in seconds.

    Args:
        host: its address or name.
        port: the port on which it answers.
        launch: the launch that it must be in.

    Raises:
        OSError: if it does not answer.
    """
    start = time.perf_counter()
    with socket.create_connection((host, port), PROBE_TIMEOUT) as connection, connection.makefile("rb") as stream:
        line = stream.readline(_MAX_LINE)
    spent = time.perf_counter() - start
    with contextlib.suppress(ValueError, TypeError, KeyError):
        answer = json.loads(line)
        if answer["launch"] == launch:
            return float(answer["time"]) - (time.time() - spent / 2), spent / 2
    raise OSError("another program answers there")


def unreachable(machines: Machines) -> str | None:
    """Why machine 0 cannot be reached from here; None if it can, even if nothing listens on its port any more."""
    try:
        socket.create_connection((machines.ip, machines.port), PROBE_TIMEOUT).close()
    except ConnectionRefusedError:
        return None
    except OSError as error:
        return f"it cannot reach machine 0 at {machines.ip}:{machines.port} ({why_unreachable(error, '')})"
    return None


# -- a member's side ---------------------------------------------------------------------------------------------------


class Arrival:
    """A member's part of the checks, during one launch.

    Args:
        machines: the machines of the run.
        env: its environment on this machine.
        launch: the launch.
        notice: what machine 0 says about it.
    """

    def __init__(self, machines: Machines, env: Mapping[str, str], launch: str, notice: Mapping[str, Any]):
        self.machines, self.env, self.launch, self.notice = machines, env, launch, notice
        self.interface = own_interface(machines, env)
        self.responder = Responder(launch)
        self.problem: str | None = None
        self.facts: dict[str, Any] = {}

    def check(self) -> None:
        """Connects to machine 0, and sets `facts` and `problem`."""
        machines, clock = self.machines, None
        try:
            clock = clock_of(machines.ip, machines.port, self.launch)
        except OSError as error:
            self.problem = self._unreached(machines.ip, machines.port, error)
        else:
            self.problem = self._check_other_port()
        self.facts = {
            "interface": self.interface.name if self.interface else None,
            "address": self.interface.address if self.interface else None,
            "port": self.responder.port, "clock": clock, "set": set_by_user(self.env),
            "versions": {"python": platform.python_version(), **versions()},
        }  # fmt: skip

    def _check_other_port(self) -> str | None:
        port, host = self.notice.get("port"), str(self.notice.get("address") or self.machines.ip)
        if not isinstance(port, int):
            return None
        try:
            clock_of(host, port, self.launch)
        except OSError as error:
            return self._unreached(host, port, error)
        return None

    def _unreached(self, host: str, port: int, error: OSError) -> str:
        known = addresses(host)
        if not known:
            remedy = "write its IP address, or add the name to /etc/hosts on this machine"
            return f"main_process_ip={host} cannot be resolved here; {remedy}"
        if all(map(is_loopback, known)) and not is_written_loopback(self.machines.ip):
            problem = f"main_process_ip={host} resolves to {', '.join(known)} here, which is this machine itself"
            return f"{problem}; write machine 0's IP address, or mend /etc/hosts on this machine"
        why = why_unreachable(error, "as by a firewall")
        return f"it cannot reach machine 0 at {host}:{port} from {self.interface or 'any address'} ({why}); " + (
            f"open port {port} of machine 0 in its firewall"
            if port == self.machines.port
            else f"{_PORTS_REMEDY}, {_INTERFACE_REMEDY}"
        )

    def variables(self) -> dict[str, str]:
        """The variables for the ranks of this machine."""
        return interface_variables(self.interface, self.env)

    def close(self) -> None:
        """Stops answering."""
        self.responder.close()


def set_by_user(env: Mapping[str, str]) -> str:
    """The variable with which a user has named the interface, as `NAME=VALUE`; empty if none is set."""
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    return next((f"{name}={env[name]}" for name in names if env.get(name)), "")


# -- machine 0's side --------------------------------------------------------------------------------------------------


class Links:
    """Machine 0's part of the checks, during one launch.

    Args:
        machines: the machines of the run.
        env: its environment on this machine.
    """

    def __init__(self, machines: Machines, env: Mapping[str, str]):
        self.machines, self.env, self.launch = machines, env, ""
        self.responders: list[Responder] = []
        self.own = {"python": platform.python_version(), **versions()}
        self.probes: dict[int, _Probe] = {}
        self.pool: ThreadPoolExecutor | None = None

    def open(self, launch: str) -> None:
        """Begins to answer the members of a launch, on a port that the system chooses."""
        self.launch, self.pool = launch, ThreadPoolExecutor(16, "links")
        self.responders = [Responder(launch)]

    def open_port(self) -> str | None:
        """Opens the port of the run too, unless it is open; returns why that cannot be done."""
        if len(self.responders) != 1:
            return None
        try:
            self.responders.append(Responder(self.launch, self.machines.port))
        except OSError as error:
            problem = f"port {self.machines.port} cannot be opened on machine 0: {os.strerror(error.errno or 0)}"
            return f"{problem}; name a free one with --main_process_port, on every machine"
        return None

    def close(self) -> None:
        """Gives the ports up, before the ranks need them."""
        for responder in self.responders:
            responder.close()
        if self.pool:
            self.pool.shutdown(wait=False, cancel_futures=True)

    def notice(self) -> dict[str, Any]:
        """What members need to know to reach this machine on a port that the system chose."""
        interface = own_interface(self.machines, self.env)
        port = self.responders[0].port if self.responders else None
        return {"port": port, "address": interface.address if interface else None}

    def look(self, facts: Mapping[int, Mapping[str, Any]]) -> None:
        """Connects to members in the background: to each at once, and again to those that could not be reached.

        Args:
            facts: the facts that members have reported, by machine.
        """
        for machine, reported in facts.items():
            address, port, probe = reported.get("address"), reported.get("port"), self.probes.get(machine)
            if not self.pool or not isinstance(address, str) or not isinstance(port, int):
                continue
            target = (address, port)
            if probe is None or probe.target != target or probe.is_due():
                last = probe.problem() if probe and probe.target == target else None
                self.probes[machine] = _Probe(self.pool.submit(clock_of, *target, self.launch), target, last)

    def pending(self) -> set[int]:
        """The members of which it is not known yet whether they can be reached."""
        return {machine for machine, probe in self.probes.items() if not probe.future.done() and probe.last is None}

    def cut_off(self, facts: Mapping[int, Mapping[str, Any]]) -> dict[int, str]:
        """Why members cannot be reached from here, by machine."""
        reasons = {machine: probe.problem() for machine, probe in self.probes.items() if machine in facts}
        return {machine: f"machine 0 cannot reach it at {reason}; {_PORTS_REMEDY}, {_INTERFACE_REMEDY}"
                for machine, reason in reasons.items() if reason}  # fmt: skip

    def refusals(self, facts: Mapping[int, Mapping[str, Any]]) -> dict[int, str]:
        """Why members must not take part, by machine: they have other versions of what decides the result."""
        reasons = {
            machine: [fault for name, fault in self._unequal(machine, reported) if name in DECISIVE]
            for machine, reported in facts.items()
        }
        return {machine: f"{'; '.join(faults)}; {VERSIONS_REMEDY}" for machine, faults in reasons.items() if faults}

    def _unequal(self, machine: int, reported: Mapping[str, Any]) -> list[tuple[str, str]]:
        """Package and words for each version in which a member differs from this machine."""
        theirs = reported.get("versions") or self.own
        faults = []
        for name in sorted({*theirs, *self.own}):
            pair = [theirs.get(name, "not installed"), self.own.get(name, "not installed")]
            label = name
            if name == "python" and pair[0].rpartition(".")[0] == pair[1].rpartition(".")[0]:
                label = "python's last digit"
            if pair[0] != pair[1]:
                faults.append((label, f"it has {name} {pair[0]}, and machine 0 {pair[1]}"))
        return faults

    def warnings(self, facts: Mapping[int, Mapping[str, Any]]) -> list[str]:
        """What is unequal and harmless to the result."""
        clocks = {machine: reported["clock"] for machine, reported in facts.items() if reported.get("clock")}
        lines = [f"{fault}, so the lines of the log are out of order; {CLOCK_REMEDY}" for fault in clock_faults(clocks)]
        for machine, reported in facts.items():
            faults = [fault for name, fault in self._unequal(machine, reported) if name not in DECISIVE]
            lines += [f"machine {machine}: {'; '.join(faults)}; {VERSIONS_REMEDY}"] if faults else []
        return [f"warning: {line}" for line in lines]

    def lines(self, facts: Mapping[int, Mapping[str, Any]]) -> list[str]:
        """The interface and address of each machine, in a line each."""
        interface = self.interface()
        where = f"{interface or self.machines.ip}, port {self.machines.port}"
        pairs = [(f"machine 0: {where}", set_by_user(self.env))]
        at = interface.address if interface else self.machines.ip
        for machine, reported in facts.items():
            if reported.get("address"):
                where = f"{reported['address']} on {reported['interface']}"
                pairs.append((f"machine {machine}: {where} to machine 0 at {at}", str(reported.get("set") or "")))
        return [f"{line} ({setting})" if setting else line for line, setting in pairs]

    def interface(self) -> Interface | None:
        """The interface that the ranks of this machine use."""
        reached = [responder.reached_at for responder in reversed(self.responders) if responder.reached_at]
        return own_interface(self.machines, self.env, reached[0] if reached else None)

    def variables(self) -> dict[str, str]:
        """The variables for the ranks of this machine."""
        return interface_variables(self.interface(), self.env)


@dataclass
class _Probe:
    """An attempt to reach a member.

    Args:
        future: its result.
        target: the address and port.
        last: why the attempt before it failed; None without one.
    """

    future: Future[tuple[float, float]]
    target: tuple[str, int]
    last: str | None
    began: float = 0.0

    def __post_init__(self) -> None:
        self.began = time.monotonic()

    def problem(self) -> str | None:
        """Why the member cannot be reached: of the attempt before as long as this one runs."""
        if not self.future.done():
            return self.last
        if self.future.cancelled() or (error := self.future.exception()) is None:
            return None
        if not isinstance(error, OSError):
            raise error
        return f"{self.target[0]}:{self.target[1]} ({why_unreachable(error, 'as by a firewall')})"

    def is_due(self) -> bool:
        """Whether to try again, as it has failed a while ago."""
        return self.future.done() and bool(self.problem()) and time.monotonic() - self.began > PROBE_AGAIN


def clock_faults(samples: Mapping[int, tuple[float, float]]) -> list[str]:
    """Which clocks differ from machine 0's by more than `CLOCK_BOUND`, uncertainty in the user's favour.

    Args:
        samples: by machine, how far machine 0's clock is ahead of its own, and the uncertainty.
    """
    return [
        f"machine {rank} is {abs(offset):.1f} s {'behind' if offset > 0 else 'ahead of'} machine 0"
        for rank, (offset, uncertainty) in samples.items()
        if abs(offset) - uncertainty > CLOCK_BOUND
    ]
