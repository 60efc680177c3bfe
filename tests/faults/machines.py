"""Commands that are typed on machines with addresses of their own (`tests/network.py`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.detached import TUNESMITH, inside, saved, step_of, until
from tests.forked import Popen
from tests.launching import flags
from tests.network import Network
from trainers.run.folder import RunFolder


class Machines(Network):
    """The commands typed on machines that share a folder.

    Args:
        home: the folder.
        count: number of machines.
        options: of the run.
    """

    def __init__(self, home: Path, count: int, **options: Any):
        super().__init__(home, count)
        self.options = options
        self.odd: dict[int, str] = {}
        """A shell line that a machine runs before a command, in mount and host name spaces of its own."""
        self.variables: dict[int, dict[str, str]] = {}
        """Environment of a machine."""
        self.run = RunFolder(home / "runs" / "mine")
        self.typed: dict[int, Popen] = {}

    def start(self, machine: int, *words: str, **options: Any) -> None:
        """Types a command on a machine, with the words that each of them needs; `train` or `resume` comes first."""
        place = self.home / f"machine-{machine}"
        place.mkdir(exist_ok=True)
        env = inside(self.home, **{"XDG_STATE_HOME": str(place), **self.variables.get(machine, {})})
        line = [*TUNESMITH, *words, *flags(options)]
        if odd := self.odd.get(machine):
            line = ["unshare", "--mount", "sh", "-c", f'{odd}; exec "$@"', "sh", *line]
        line = self.inside(machine, *line)
        with open(self.home / f"machine-{machine}.txt", "ab") as out:
            self.typed[machine] = Popen(line, cwd=self.home, env=env, stdout=out, stderr=out)

    def train(self, machine: int, **options: Any) -> None:
        network = {"num_machines": self.count, "main_process_ip": self.address(0), "main_process_port": 29500}
        asked = {**network, "num_processes": self.count, "strategy": "ddp", "output_dir": self.run.path}
        self.start(machine, "train", "tiny-lora", machine_rank=machine, **{**asked, **self.options, **options})

    def until_saved(self, above: int = 0) -> None:
        """Waits until the run has gone on beyond a new checkpoint."""
        run = self.run
        until(lambda: state_of_file(run) == "running" and saved(run) > above and step_of(run) > saved(run), 400)

    def participants(self) -> list[int]:
        return (self.run.read_state() or {})["machines"]["participants"]

    def codes(self, *machines: int, expected: int = 0) -> None:
        """Waits for the commands on these machines, and checks their exit statuses."""
        codes = {machine: self.typed[machine].wait(600) for machine in machines}
        assert codes == dict.fromkeys(machines, expected), self.printed()

    def printed(self) -> str:
        """What the commands have printed, and the log, for messages."""
        texts = [path.read_text() for path in sorted(self.home.glob("machine-*.txt"))]
        return "\n".join([*texts, self.run.log.read_text()])


def state_of_file(run: RunFolder) -> str:
    """The state as written: its processes are on other machines."""
    return str((run.read_state() or {}).get("state"))
