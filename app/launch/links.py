"""Checks the machines of a run against each other before its ranks start: links both ways, versions and clocks.

While machine 0 gathers the machines, each listens on a port that the system chooses, as its ranks will, and machine 0
also on the port of the run. Whoever connects reads one line with the launch and the time. Members report in their
status files what they found; machine 0 connects back to them, and announces where each of them listens; then they
connect to each other, report again, and machine 0 decides. So every pair is tried from both sides, as ranks talk all to
all.
"""

from __future__ import annotations

import os
import platform
from collections import Counter
from collections.abc import Mapping
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
from app.launch.probes import Probes, Responder, Target, clock_of
from trainers.run.compatibility import versions
from trainers.strategy.strategy import Machines

CLOCK_BOUND = 1.0
"""Seconds by which clocks may differ. The lines of all machines stand in one log, in order of time."""
CLOCK_REMEDY = "start a time service there: `timedatectl set-ntp true`, or chrony"
DECISIVE = ("python", "torch", "transformers", "tunesmith")
"""Without equal versions of these, no promise about the result holds."""
VERSIONS_REMEDY = "install the same versions on all machines; `pip freeze` on one lists them"
_PORTS_REMEDY = "open all ports between the machines in their firewalls"
_INTERFACE_REMEDY = "and name the network to use with GLOO_SOCKET_IFNAME there"


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
        self.responder, self.probes = Responder(launch), Probes(launch)
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

    def look(self, notice: Mapping[str, Any]) -> list[str] | None:
        """Connects to the other members in the background, and sets `facts` anew.

        Args:
            notice: what machine 0 says about the launch now.

        Returns:
            None as long as there is nothing new; else what is wrong and was not before, a line for each link.
        """
        targets = {int(machine): target_of(*known) for machine, known in (notice.get("members") or {}).items()}
        self.probes.look({machine: at for machine, at in targets.items() if at and machine != self.machines.rank})
        before = self.facts.get("links") or {}
        links = {str(machine): [*at, problem] for machine, (at, problem) in self.probes.results().items()}
        if links == before:
            return None
        self.facts = {**self.facts, "links": links}
        changed = [(machine, link[-1]) for machine, link in links.items() if link != before.get(machine)]
        return [f"it cannot reach machine {machine} at {problem}" for machine, problem in changed if problem]

    def variables(self) -> dict[str, str]:
        """The variables for the ranks of this machine."""
        return interface_variables(self.interface, self.env)

    def close(self) -> None:
        """Stops answering."""
        self.responder.close()
        self.probes.close()


def target_of(address: object, port: object, *_: object) -> Target | None:
    """Where a machine answers, as it stands in a file; None if it does not."""
    return (address, port) if isinstance(address, str) and isinstance(port, int) else None


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
        self.probes: Probes | None = None
        self.members: dict[int, Target] = {}
        """Where members answer."""

    def open(self, launch: str) -> None:
        """Begins to answer the members of a launch, on a port that the system chooses."""
        self.launch, self.probes = launch, Probes(launch)
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
        if self.probes:
            self.probes.close()

    def notice(self) -> dict[str, Any]:
        """What members need to know to reach this machine, and each other, on ports that the system chose."""
        interface = own_interface(self.machines, self.env)
        port = self.responders[0].port if self.responders else None
        members = {str(machine): list(target) for machine, target in self.members.items()}
        return {"port": port, "address": interface.address if interface else None, "members": members}

    def look(self, facts: Mapping[int, Mapping[str, Any]]) -> None:
        """Connects to members in the background: to each at once, and again to those that could not be reached.

        Args:
            facts: the facts that members have reported, by machine.
        """
        self.members |= _targets(facts)
        if self.probes:
            self.probes.look({machine: self.members[machine] for machine in facts if machine in self.members})

    def pending(self, facts: Mapping[int, Mapping[str, Any]]) -> set[int]:
        """The members of which it is not known yet whether they can be reached, or whether they reach the others."""
        targets = _targets(facts)
        silent = {
            machine
            for machine, reported in facts.items()
            if any(_link(reported, other)[0] != target for other, target in targets.items() if other != machine)
        }
        return silent | (self.probes.pending() if self.probes else set())

    def cut_off(self, facts: Mapping[int, Mapping[str, Any]]) -> dict[int, str]:
        """Why members cannot be reached from here, by machine."""
        results = self.probes.results() if self.probes else {}
        reasons = {machine: problem for machine, (_, problem) in results.items() if machine in facts}
        return {machine: f"machine 0 cannot reach it at {reason}; {_PORTS_REMEDY}, {_INTERFACE_REMEDY}"
                for machine, reason in reasons.items() if reason}  # fmt: skip

    def blocked(self, facts: Mapping[int, Mapping[str, Any]]) -> dict[int, str]:
        """Why members must be left out because others do not reach them, or they others, by machine.

        Of two that do not reach each other, it is the one with more such links, or else with the higher number.
        """
        targets, faults = _targets(facts), dict[tuple[int, int], str]()
        for machine, reported in facts.items():
            links = {other: _link(reported, other) for other in targets if other != machine}
            faults |= {
                (machine, other): problem for other, (at, problem) in links.items() if problem and at == targets[other]
            }
        reasons = dict[int, str]()
        while faults:
            links_of = Counter(machine for pair in faults for machine in pair)
            worst = max(links_of, key=lambda machine: (links_of[machine], machine))
            (machine, other), problem = min(item for item in faults.items() if worst in item[0])
            fault = f"machine {machine} cannot reach it" if other == worst else f"it cannot reach machine {other}"
            reasons[worst] = f"{fault} at {problem}; {_PORTS_REMEDY}, {_INTERFACE_REMEDY}"
            faults = {pair: problem for pair, problem in faults.items() if worst not in pair}
        return reasons

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


def _targets(facts: Mapping[int, Mapping[str, Any]]) -> dict[int, Target]:
    """Where members answer, of those that say so."""
    targets = {machine: target_of(reported.get("address"), reported.get("port")) for machine, reported in facts.items()}
    return {machine: target for machine, target in targets.items() if target}


def _link(reported: Mapping[str, Any], other: int) -> tuple[Target | None, str | None]:
    """Where a member has tried to reach another one, and why it could not; None for each that it does not say."""
    links = reported.get("links")
    link = links.get(str(other)) if isinstance(links, dict) else None
    if not isinstance(link, list) or len(link) != 3:
        return None, None
    return target_of(*link), str(link[2]) if link[2] else None


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
