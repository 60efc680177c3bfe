"""How the supervisors of a multi-machine run communicate: through small files in the shared run folder.

Machine 0's supervisor writes the state file as in any run. For each launch, it first announces the launch under
`machines`; every other machine (a member) reports in a file of its own that it is there; machine 0 then publishes which
machines take part, and all of these start their launchers. Members also report how their launcher ended.

Every supervisor, machine 0's too, rewrites its file every few seconds with a number that increases. The others compare
the numbers, by their own clocks, as those of different machines may differ.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

from app.hardware import cpu_count, find_gpus
from app.launch.layouts import Layouts, choose_participants
from app.launch.links import Links
from app.launch.network import interface_problem
from app.runs.machines import LOST_AFTER
from trainers.run.ending import Ending
from trainers.run.folder import Process, RunFolder, read_json, write_json
from trainers.strategy.strategy import Machines

FIRST_JOIN_TIMEOUT = 600.0
"""Seconds that the other machines have to join the first launch, as someone starts a command on each."""
JOIN_TIMEOUT = 60.0
"""Seconds to join a restart: the supervisors are already running, and clear the last launch within 20 seconds."""
LINGER = 30.0
"""Seconds that the nodes have to end their launchers after machine 0's has exited."""
BEAT = 2.0
"""Seconds between two signs of life of a supervisor."""

_SILENT = f"no sign of life for {LOST_AFTER:g} s"


class NodeStatus:
    """The file in which a machine's supervisor reports its status.

    Args:
        run: the run.
        machine: number of the machine.
    """

    def __init__(self, run: RunFolder, machine: int):
        self.run, self.path, self.machine = run, run.machine_file(machine), machine
        self.name, self.count = secrets.token_hex(4), 0
        self.lock = threading.Lock()
        self.status: dict[str, Any] = {"launch": "", "ended": None, "refused": None, "unreachable": None}
        gpus = [gpu.name for gpu in find_gpus()]
        self.devices = gpus or [f"{cpu_count()} CPU cores"]
        self.facts: dict[str, Any] | None = None
        """What this machine has found out for a launch (`app/launch/links.py`)."""

    def write(
        self, launch: str = "", launcher: int | None = None, ended: int | None = None, refused: str | None = None,
        unreachable: str | None = None,
    ) -> None:  # fmt: skip
        """Replaces the file.

        Args:
            launch: `launched_at` of the joined launch.
            launcher: pid of its launcher.
            ended: exit status of its launcher, once all its processes have exited.
            refused: why it does not join.
            unreachable: why its ranks cannot take part although it sees this folder.
        """
        processes = [Process.of("supervisor").as_json()]
        with contextlib.suppress(Exception):  # the launcher may have ended already
            processes += [Process.of("launcher", pid=launcher).as_json()] if launcher else []
        about = {"machine": self.machine, "host": socket.gethostname(), "devices": self.devices, "processes": processes}
        with self.lock:
            self.status = {**about, "launch": launch, "ended": ended, "refused": refused, "unreachable": unreachable,
                           "facts": self.facts}  # fmt: skip
        self._beat()

    def _beat(self) -> None:
        with self.lock, contextlib.suppress(OSError):
            self.count += 1
            if not self.run.lost():
                write_json(self.path, {**self.status, "beat": f"{self.name}-{self.count}"})

    @contextlib.contextmanager
    def beating(self) -> Iterator[None]:
        """Gives a sign of life every `BEAT` seconds until the context exits."""
        ended = threading.Event()

        def beat() -> None:
            while not ended.wait(BEAT):
                self._beat()

        self.write()
        thread = threading.Thread(target=beat, name="beat", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()


class Pulses:
    """When the supervisors of other machines last gave a sign of life, by this machine's clock.

    Args:
        run: the run.
        machines: the numbers of the machines to watch.
    """

    def __init__(self, run: RunFolder, machines: Collection[int]):
        self.run, self.beats = run, dict.fromkeys(machines, "")
        self.changed_at = dict.fromkeys(machines, time.monotonic())
        self.seen = set[int]()
        """The machines that have given a sign of life since this began; what is in a file at first may be old."""
        self.looked_at = 0.0

    def look(self) -> None:
        """Reads the files again, at most once a second."""
        clock = time.monotonic()
        if clock - self.looked_at < 1.0:
            return
        self.looked_at = clock
        for machine, last in self.beats.items():
            beat = str((read_json(self.run.machine_file(machine)) or {}).get("beat") or "")
            if beat == last:
                continue
            self.beats[machine], self.changed_at[machine] = beat, clock
            self.seen |= {machine} if last else set()

    def silent(self, machine: int) -> bool:
        """Whether a machine has given no sign of life for `LOST_AFTER` seconds."""
        return time.monotonic() - self.changed_at[machine] > LOST_AFTER


class Nodes:
    """The other machines during one launch, as machine 0's supervisor sees them.

    Args:
        run: the run.
        machines: its machines.
        source: where this launch resumes: `auto`, the path of a checkpoint, or None.
        timeout: seconds that all have to join.
        restarted: whether the run has been launched before, so that a machine without a sign of life is lost.
        layouts: the run's settings on fewer machines.
        pulses: the signs of life of the other machines.
        links: the checks of the machines against each other.
        prepare: writes the files of a launch on the given machines, and returns its command.
    """

    def __init__(
        self, run: RunFolder, machines: Machines, source: str | None, timeout: float, restarted: bool,
        layouts: Layouts, pulses: Pulses, links: Links, prepare: Callable[[list[int]], list[str]],
    ):  # fmt: skip
        self.run, self.machines, self.timeout, self.launch = run, machines, timeout, ""
        self.restarted, self.layouts, self.pulses, self.prepare = restarted, layouts, pulses, prepare
        self.links, self.broken_since = links, dict[str, float]()
        self.source = source
        if source not in (None, "auto") and "://" not in str(source):
            self.source = str(Path(str(source)).expanduser().absolute())
        self.participants: list[int] | None = None
        self.absent: dict[int, str] = {}

    def announce(self, launch: str) -> dict[str, Any]:
        """Begins to answer the members; what the state tells them about a launch that begins."""
        self.links.open(launch)
        return self.notice(launch)

    def notice(self, launch: str, over: bool = False) -> dict[str, Any]:
        """What the state tells the members about a launch.

        Args:
            launch: its `launched_at`.
            over: whether it has ended.
        """
        self.launch = launch
        return {
            "resume_from": self.source, "timeout": self.timeout, "over": over, "count": self.machines.count,
            "minimum": self.machines.minimum, "participants": self.participants,
            "absent": {str(machine): reason for machine, reason in self.absent.items()}, **self.links.notice(),
        }  # fmt: skip

    def statuses(self) -> dict[int, dict[str, Any]]:
        """The statuses of the members that have joined this launch or refused to, by machine."""
        expected = range(1, self.machines.count) if self.participants is None else self.participants[1:]
        files = {machine: read_json(self.run.machine_file(machine)) or {} for machine in expected}
        return {machine: word for machine, word in files.items() if word.get("launch") == self.launch}

    def gather(self, waited: float) -> Ending | None:
        """Decides which machines take part, once all are there or no others are to be waited for.

        Args:
            waited: seconds since the launch was announced.

        Returns:
            How the launch ended if it cannot begin; None otherwise: `participants` is then None as long as others are
            waited for.
        """
        self.pulses.look()
        count, minimum = self.machines.count, self.machines.minimum
        statuses, facts = self.statuses(), self.facts()
        if fault := interface_problem(self.machines, self.links.env):
            return Ending("failed", f"machine 0: {fault}")
        if problem := self.links.open_port():
            return Ending("failed", problem) if self._lasts("port", problem) else None
        refused = {machine: str(word["refused"]) for machine, word in statuses.items() if word.get("refused")}
        refused |= self.links.refusals(facts)
        if refused and minimum is None:
            return Ending("failed", "; ".join(f"machine {number}: {why}" for number, why in refused.items()))
        cut_off = {machine: str(word["unreachable"]) for machine, word in statuses.items() if word.get("unreachable")}
        facts = {machine: known for machine, known in facts.items() if machine not in {*cut_off, *refused}}
        self.links.look(facts)
        cut_off |= self.links.cut_off(facts)
        facts = {machine: known for machine, known in facts.items() if machine not in cut_off}
        cut_off |= self.links.blocked(facts)
        pending = self.links.pending(facts)
        absent = set(range(1, count)) - set(statuses) | set(cut_off) | pending
        present, missing = [0, *sorted(set(statuses) - set(refused) - absent)], sorted(absent)
        silent = {machine: _SILENT for machine in missing if self.restarted and self.pulses.silent(machine)}
        awaited = (absent - set(cut_off) | pending) - set(silent)
        is_broken = bool(cut_off) and absent <= set(cut_off) and minimum is None and not self.restarted
        late = waited >= self.timeout or self._lasts("links", is_broken)
        if not late and (awaited or (missing and minimum is None)):
            return None
        chosen = choose_participants(present, count if minimum is None else minimum, self.layouts.fits)
        if not chosen:
            return self._too_few(present, missing, {**refused, **cut_off}) if late else None
        self.participants = chosen
        self.absent = {
            **dict.fromkeys(missing, f"it did not join within {self.timeout:g} s"),
            **silent,
            **cut_off,
            **refused,
            **{machine: self._spare(len(chosen) + 1) for machine in present if machine not in chosen},
        }
        return None

    def facts(self) -> dict[int, dict[str, Any]]:
        """What the members of this launch have found out, by machine."""
        return {
            machine: word["facts"] for machine, word in self.statuses().items() if isinstance(word.get("facts"), dict)
        }

    def _lasts(self, name: str, fault: object) -> bool:
        """Whether a fault, which may be mended by itself, has lasted for `LOST_AFTER` seconds."""
        if not fault:
            self.broken_since.pop(name, None)
            return False
        return time.monotonic() - self.broken_since.setdefault(name, time.monotonic()) >= LOST_AFTER

    def _spare(self, count: int) -> str:
        return f"it waits, as {count} machines do not fit: {'; '.join(self.layouts.mistakes(count))}"

    def _too_few(self, present: list[int], missing: list[int], reasons: dict[int, str]) -> Ending:
        """The ending of a launch for which too few machines are there. A retry would not help."""
        minimum = self.machines.minimum
        causes = [f"machine {number}: {reason}" for number, reason in reasons.items()]
        if missing := [machine for machine in missing if machine not in reasons]:
            absent = f"machine{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}"
            remedy = "start the same command there with its --machine_rank"
            causes.append(
                f"{absent} did not join within {self.timeout:g} s; {remedy}, and check that it sees this folder"
            )
        if minimum is not None and len(present) < minimum:
            causes.append(f"{len(present)} of {self.machines.count} machines are there, fewer than {minimum=}")
        elif minimum is not None:
            reason = "; ".join(self.layouts.mistakes(len(present)))
            causes.append(f"with {len(present)} of {self.machines.count} machines: {reason}")
        return Ending("failed", "; ".join(causes).replace("minimum=", "min_machines="))

    def lines(self) -> list[str]:
        """What the log says at the start of a launch: who takes part at which address, and what is unequal."""
        facts = {machine: known for machine, known in self.facts().items() if machine in (self.participants or [])}
        own = [line] if (line := self.line()) else []
        return [*own, *self.links.lines(facts), *self.links.warnings(facts)] if facts else own

    def line(self) -> str:
        """Who takes part, and why the others do not, in one line; empty if all do."""
        if not self.absent or self.participants is None:
            return ""
        reasons = "; ".join(f"machine {machine}: {reason}" for machine, reason in sorted(self.absent.items()))
        return f"goes on with {len(self.participants)} of {self.machines.count} machines; {reasons}"

    def lost(self) -> str:
        """The machines of this launch that are silent or cannot reach this one, in words; empty if none are."""
        members = (self.participants or [])[1:]
        reasons = {machine: _SILENT for machine in members if self.pulses.silent(machine)}
        reasons |= {
            machine: word["unreachable"] for machine, word in self.statuses().items() if word.get("unreachable")
        }
        return "; ".join(f"machine {machine} was lost: {reason}" for machine, reason in sorted(reasons.items()))

    def crashed(self) -> bool:
        """Whether a member's launcher has failed, or its ranks are cut off."""
        return any(word.get("ended") or word.get("unreachable") for word in self.statuses().values())

    def ended(self) -> bool:
        """Whether all processes of the members have exited, but for machines that are lost."""
        statuses = self.statuses()
        return all(
            statuses.get(machine, {}).get("ended") is not None or self.pulses.silent(machine)
            for machine in (self.participants or [])[1:]
        )
