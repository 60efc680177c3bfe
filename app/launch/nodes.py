"""How the supervisors of a multi-machine run communicate: through small files in the shared run folder.

Machine 0's supervisor writes the state file as in any run, and adds under `machines` what the others need to join a
launch. Every other machine (a member) reports in a file of its own which launch it has joined and how its launcher
ended.
"""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path
from typing import Any

from trainers.run.ending import Ending
from trainers.run.folder import Process, RunFolder, read_json, write_json
from trainers.strategy.strategy import Machines

FIRST_JOIN_TIMEOUT = 600.0
"""Seconds that the other machines have to join the first launch, as someone starts a command on each."""
JOIN_TIMEOUT = 60.0
"""Seconds to join a restart: the supervisors are already running, and clear the last launch within 20 seconds."""
LINGER = 30.0
"""Seconds that the nodes have to end their launchers after machine 0's has exited."""


class NodeStatus:
    """The file in which a member reports its status.

    Args:
        run: the run.
        machine: rank of the member.
    """

    def __init__(self, run: RunFolder, machine: int):
        self.path, self.machine = run.machine_file(machine), machine

    def write(
        self, launch: str, launcher: int | None = None, ended: int | None = None, refused: str | None = None
    ) -> None:
        """Replaces the file.

        Args:
            launch: `launched_at` of the joined launch.
            launcher: pid of its launcher.
            ended: exit status of its launcher, once all its processes have exited.
            refused: why it does not join.
        """
        processes = [Process.of("supervisor").as_json()]
        with contextlib.suppress(Exception):  # the launcher may have ended already
            processes += [Process.of("launcher", pid=launcher).as_json()] if launcher else []
        about = {"machine": self.machine, "host": socket.gethostname(), "processes": processes}
        with contextlib.suppress(OSError):
            write_json(self.path, {**about, "launch": launch, "ended": ended, "refused": refused})


class Nodes:
    """The other machines during one launch, as machine 0's supervisor sees them.

    Args:
        run: the run.
        machines: its machines.
        source: where this launch resumes: `auto`, the path of a checkpoint, or None.
        timeout: seconds that all have to join.
    """

    def __init__(self, run: RunFolder, machines: Machines, source: str | None, timeout: float):
        self.run, self.machines, self.timeout, self.launch = run, machines, timeout, ""
        self.source = source
        if source not in (None, "auto") and "://" not in str(source):
            self.source = str(Path(str(source)).expanduser().absolute())

    def notice(self, launch: str, over: bool = False) -> dict[str, Any]:
        """What the state tells the members about a launch.

        Args:
            launch: its `launched_at`.
            over: whether it has ended.
        """
        self.launch = launch
        return {"resume_from": self.source, "timeout": self.timeout, "over": over}

    def statuses(self) -> dict[int, dict[str, Any]]:
        """The statuses of the members that have joined this launch or refused to, by machine."""
        files = {machine: read_json(self.run.machine_file(machine)) or {} for machine in range(1, self.machines.count)}
        return {machine: word for machine, word in files.items() if word.get("launch") == self.launch}

    def missing(self) -> list[int]:
        """The members without a status for this launch."""
        statuses = self.statuses()
        return [machine for machine in range(1, self.machines.count) if machine not in statuses]

    def crashed(self) -> bool:
        """Whether a member's launcher has failed, or a member refuses to join."""
        return any(word.get("ended") or word.get("refused") for word in self.statuses().values())

    def ended(self) -> bool:
        """Whether all processes of the members that joined have exited."""
        return all(word.get("ended") is not None or word.get("refused") for word in self.statuses().values())

    def ending(self, waited: float) -> Ending | None:
        """How the launch ended if a member refused to join or is missing; None otherwise. A retry would not help.

        Args:
            waited: seconds since the launch.
        """
        statuses = self.statuses().items()
        refused = [f"machine {number}: {status['refused']}" for number, status in statuses if status["refused"]]
        if refused:
            return Ending("failed", "; ".join(refused), retry="never")
        missing = self.missing()
        if not missing or waited < self.timeout:
            return None
        absent = f"machine{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}"
        remedy = "start the same command there with its --machine_rank"
        cause = f"{absent} did not join within {self.timeout:g} s; {remedy}, and check that it sees this folder"
        return Ending("failed", cause, retry="never")
