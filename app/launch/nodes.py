"""What the supervisors of a run over several machines tell each other, through small files in the run folder.

Machine 0's supervisor writes the state as in every run; with each launch it notes there what the others must know
(`machines`). Each of the others, a member, leaves word in a file of its own of the launch that it has joined, and of
how its launcher ended.
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
"""Seconds for the other machines to join a start; somebody types a command on each."""
JOIN_TIMEOUT = 60.0
"""The same for a restart: their supervisors are there, and end what is left within 20 seconds."""
LINGER = 30.0
"""Seconds for the nodes to end their launchers once machine 0's is gone."""


class NodeStatus:
    """The file in which a member tells what it does.

    Args:
        run: the run.
        machine: the member's number.
    """

    def __init__(self, run: RunFolder, machine: int):
        self.path, self.machine = run.machine_file(machine), machine

    def write(
        self, launch: str, launcher: int | None = None, ended: int | None = None, refused: str | None = None
    ) -> None:
        """Replaces the file.

        Args:
            launch: `launched_at` of the launch that it has joined.
            launcher: process id.
            ended: exit status of its launcher once nothing of it lives.
            refused: why it does not join.
        """
        processes = [Process.of("supervisor").as_json()]
        with contextlib.suppress(Exception):  # the launcher may have ended already
            processes += [Process.of("launcher", pid=launcher).as_json()] if launcher else []
        about = {"machine": self.machine, "host": socket.gethostname(), "processes": processes}
        with contextlib.suppress(OSError):
            write_json(self.path, {**about, "launch": launch, "ended": ended, "refused": refused})


class Nodes:
    """The other machines, as machine 0's supervisor sees them during one launch.

    Args:
        run: the run.
        machines: its machines.
        source: from where this launch resumes: `auto`, a checkpoint's path, or None.
        timeout: seconds for all to join.
    """

    def __init__(self, run: RunFolder, machines: Machines, source: str | None, timeout: float):
        self.run, self.machines, self.timeout, self.launch = run, machines, timeout, ""
        self.source = source
        if source not in (None, "auto") and "://" not in str(source):
            self.source = str(Path(str(source)).expanduser().absolute())

    def notice(self, launch: str, over: bool = False) -> dict[str, Any]:
        """What the state tells them of a launch."""
        self.launch = launch
        return {"resume_from": self.source, "timeout": self.timeout, "over": over}

    def statuses(self) -> dict[int, dict[str, Any]]:
        """What those who have joined this launch left word of, by machine."""
        files = {machine: read_json(self.run.machine_file(machine)) or {} for machine in range(1, self.machines.count)}
        return {machine: word for machine, word in files.items() if word.get("launch") == self.launch}

    def missing(self) -> list[int]:
        """Those who have not joined."""
        statuses = self.statuses()
        return [machine for machine in range(1, self.machines.count) if machine not in statuses]

    def crashed(self) -> bool:
        """Whether a launcher of theirs has failed, or a machine refuses to join."""
        return any(word.get("ended") or word.get("refused") for word in self.statuses().values())

    def ended(self) -> bool:
        """Whether nothing lives any more on those who had joined."""
        return all(word.get("ended") is not None or word.get("refused") for word in self.statuses().values())

    def ending(self, waited: float) -> Ending | None:
        """How the launch ended, where they are the reason: a start again would end alike.

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
