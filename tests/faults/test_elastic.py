"""Three machines with addresses of their own: one is lost, the run goes on with the others, and takes it back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.detached import TUNESMITH, inside, saved, step_of, until
from tests.faults.oracle import OPTIONS, replayed, rows
from tests.forked import Popen
from tests.launching import flags
from tests.network import Network, set_up
from trainers.run.folder import RunFolder
from trainers.run.manifest import verify

STEPS = 60
LOSS, GRAD_NORM = 2e-4, 2e-3
ELASTIC: dict[str, Any] = {**OPTIONS, "global_batch_size": 12, "per_device_train_batch_size": 4, "max_steps": STEPS}


class Machines(Network):
    """The commands typed on machines that share a folder."""

    def __init__(self, home: Path, count: int):
        super().__init__(home, count)
        self.run = RunFolder(home / "runs" / "mine")
        self.typed: dict[int, Popen] = {}

    def start(self, machine: int, *words: str, **options: Any) -> None:
        """Types a command on a machine, with the words that each of them needs; `train` or `resume` comes first."""
        place = self.home / f"machine-{machine}"
        place.mkdir(exist_ok=True)
        env = inside(self.home, XDG_STATE_HOME=str(place), GLOO_SOCKET_IFNAME="eth0")
        line = self.inside(machine, *TUNESMITH, *words, *flags(options))
        with open(self.home / f"machine-{machine}.txt", "ab") as out:
            self.typed[machine] = Popen(line, cwd=self.home, env=env, stdout=out, stderr=out)

    def train(self, machine: int, **options: Any) -> None:
        network = {"num_machines": self.count, "main_process_ip": self.address(0), "main_process_port": 29500}
        asked = {**network, "num_processes": self.count, "strategy": "ddp", "output_dir": self.run.path, **ELASTIC}
        self.start(machine, "train", "tiny-lora", machine_rank=machine, **{**asked, **options})

    def until_saved(self, above: int = 0) -> None:
        """Waits until the run has gone on beyond a new checkpoint."""
        run = self.run
        until(lambda: state_of_file(run) == "running" and saved(run) > above and step_of(run) > saved(run), 120)

    def participants(self) -> list[int]:
        return (self.run.read_state() or {})["machines"]["participants"]

    def printed(self) -> str:
        """What the commands have printed, and the log, for messages."""
        texts = [path.read_text() for path in sorted(self.home.glob("machine-*.txt"))]
        return "\n".join([*texts, self.run.log.read_text()])


def state_of_file(run: RunFolder) -> str:
    """The state as written: its processes are on other machines."""
    return str((run.read_state() or {}).get("state"))


@pytest.fixture
def machines(home: Path) -> Iterator[Machines]:
    net = Machines(home, 3)
    with set_up(net):
        yield net


def same_training(run: RunFolder, uncut: RunFolder, replays: int) -> None:
    """The run is done, and its numbers are those of the uncut one within what another number of ranks changes."""
    mine, theirs = rows(run), rows(uncut)
    assert [row["step"] for row in mine] == list(range(1, STEPS + 1))
    for name, limit in (("loss", LOSS), ("grad_norm", GRAD_NORM)):
        assert [row[name] for row in mine] == pytest.approx([row[name] for row in theirs], rel=limit, abs=limit)
    assert [row["tokens"] for row in mine] == [row["tokens"] for row in theirs]
    assert replayed(run) <= replays
    for path in run.checkpoints.glob("step-*"):
        verify(path)


def test_a_run_goes_on_without_a_machine_and_takes_it_back(machines: Machines) -> None:
    for machine in (2, 1, 0):
        machines.train(machine, min_machines=2)
    machines.until_saved()
    assert machines.participants() == [0, 1, 2]
    machines.power_off(2)
    until(lambda: machines.participants() == [0, 1], 120)
    machines.until_saved(saved(machines.run))
    assert [machines.typed[machine].wait(300) for machine in (0, 1)] == [0, 0], machines.printed()
