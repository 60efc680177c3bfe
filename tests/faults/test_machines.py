"""Two machines on loopback, each with its own supervisor and queue: what is killed on one brings both back."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from subprocess import DEVNULL
from typing import Any

import pytest

from tests.detached import TUNESMITH, inside, pid_of, processes, saved, state_of, step_of, until
from tests.faults.conftest import Note, Undisturbed
from tests.faults.oracle import INTERVAL, OPTIONS, STEPS, clean, exact, replayed, told
from tests.forked import Popen
from tests.launching import ROOT, SCRIPT, flags, free_port
from trainers.run.folder import RunFolder, read_json

long = pytest.mark.long


class Machines:
    """The commands typed on two machines that share a folder."""

    def __init__(self, home: Path):
        self.home, self.run, self.port = home, RunFolder(home / "runs" / "mine"), free_port()
        self.typed: list[Popen] = []

    def place(self, machine: int) -> dict[str, str]:
        (self.home / f"machine-{machine}").mkdir(exist_ok=True)
        return inside(self.home, XDG_STATE_HOME=str(self.home / f"machine-{machine}"))

    def start(self, *words: str, **options: Any) -> None:
        """The same words on both; `train` or `resume` comes first."""
        self.typed = []
        for machine in (1, 0):
            line = [*TUNESMITH, *words, "--machine_rank", str(machine), *flags(options)]
            with open(self.home / f"machine-{machine}.txt", "ab") as out:
                made = Popen(line, cwd=self.home, env=self.place(machine), stdout=out, stderr=out)
            self.typed.insert(0, made)

    def train(self, strategy: str = "ddp", **options: Any) -> None:
        network = {"num_machines": 2, "main_process_ip": "127.0.0.1", "main_process_port": self.port}
        asked = {**network, "num_processes": 2, "strategy": strategy, "output_dir": self.run.path, **OPTIONS, **options}
        self.start("train", "tiny-lora", **asked)

    def codes(self) -> list[int]:
        return [one.wait(300) for one in self.typed]

    def pid(self, role: str) -> int:
        """A process of machine 1, by the word that it has left."""
        word = read_json(self.run.machine_file(1)) or {}
        return next(int(one["pid"]) for one in word["processes"] if one["role"] == role)

    def until_saved(self) -> None:
        run = self.run
        until(lambda: state_of(run) == "running" and saved(run) >= INTERVAL and step_of(run) > saved(run))


@pytest.fixture
def machines(home: Path) -> Machines:
    return Machines(home)


def restarts(run: RunFolder) -> list[str]:
    """What each restart was for."""
    lines = [line for line in run.log.read_text().splitlines() if "[supervisor] restart " in line]
    return [line.partition(", after: ")[2] for line in lines]


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp2", marks=long), pytest.param("zero3", marks=long)])
def test_a_rank_of_another_machine_is_killed(
    strategy: str, machines: Machines, undisturbed: Undisturbed, noted: Note
) -> None:
    whole, fault = undisturbed(strategy), noted("a rank of another machine is killed", strategy)
    machines.train(strategy)
    machines.until_saved()
    os.kill(pid_of(machines.run, "rank", 1), signal.SIGKILL)
    fault.at()
    assert machines.codes() == [0, 0]
    exact(machines.run, whole, replays=INTERVAL)
    fault.harmless(machines.run)
    (cause,) = restarts(machines.run)
    assert cause.startswith("local rank 0 of machine 1 was killed by SIGKILL")
    assert (machines.run.read_state() or {})["attempt"] == 1


@long
@pytest.mark.parametrize("who", ["rank 0", "launcher 0", "launcher 1"])
def test_another_process_is_killed(who: str, machines: Machines, undisturbed: Undisturbed) -> None:
    whole, run = undisturbed("ddp"), machines.run
    machines.train()
    machines.until_saved()
    pids = {"rank 0": lambda: pid_of(run, "rank", 0), "launcher 0": lambda: pid_of(run, "launcher")}
    os.kill(pids.get(who, lambda: machines.pid("launcher"))(), signal.SIGKILL)
    assert machines.codes() == [0, 0]
    exact(run, whole, replays=INTERVAL)
    assert ("rank 0 was killed" if who == "rank 0" else "the launcher was killed") in restarts(run)[0]


@long
@pytest.mark.parametrize("machine", [0, 1])
def test_a_signal_to_either_supervisor_stops_all_at_one_step(
    machine: int, machines: Machines, undisturbed: Undisturbed
) -> None:
    whole, run = undisturbed("ddp"), machines.run
    machines.train()
    until(lambda: state_of(run) == "running" and step_of(run) >= INTERVAL + 1)
    machines.typed[machine].terminate()
    assert machines.codes() == [130, 130]
    state = run.read_state() or {}
    assert (state["state"], replayed(run)) == ("stopped", 0)
    assert f"at step {state['step']} of {STEPS}; its checkpoint is saved" in told(run)
    assert (run.checkpoints / f"step-{state['step']:08d}").is_dir()
    clean(run)
    machines.start("resume", str(run.path))
    assert machines.codes() == [0, 0]
    exact(run, whole, replays=0)


@long
def test_a_run_outlives_the_supervisor_of_another_machine(machines: Machines, undisturbed: Undisturbed) -> None:
    whole = undisturbed("ddp")
    machines.train()
    machines.until_saved()
    os.kill(machines.pid("supervisor"), signal.SIGKILL)
    assert machines.codes() == [0, -signal.SIGKILL]
    exact(machines.run, whole, replays=0)


@long
def test_a_machine_that_does_not_come_back_ends_the_run_with_its_name(machines: Machines) -> None:
    machines.train(max_steps=5000)
    machines.until_saved()
    os.kill(machines.pid("supervisor"), signal.SIGKILL)
    os.kill(pid_of(machines.run, "rank", 0), signal.SIGKILL)
    assert machines.codes() == [1, -signal.SIGKILL]
    cause = told(machines.run)
    assert cause.startswith("machine 1 did not join within 60 s; start the same command there with its --machine_rank")
    assert (machines.run.read_state() or {})["attempt"] == 1
    assert saved(machines.run) >= INTERVAL
    clean(machines.run)


@long
def test_two_plain_launchers(machines: Machines, undisturbed: Undisturbed) -> None:
    whole, made = undisturbed("ddp"), []
    for machine in (0, 1):
        line = [sys.executable, "-m", "accelerate.commands.launch", "--config_file"]
        line += [str(ROOT / "accelerate_configs" / "ddp.yaml"), "--num_processes", "2", "--num_machines", "2"]
        line += ["--machine_rank", str(machine), "--main_process_ip", "127.0.0.1", "--main_process_port"]
        line += [
            str(machines.port),
            str(SCRIPT),
            *flags({"preset": "tiny-lora", "output_dir": machines.run.path, **OPTIONS}),
        ]
        made.append(Popen(line, env=machines.place(machine), stdout=DEVNULL))
    assert [one.wait(300) for one in made] == [0, 0]
    exact(machines.run, whole, replays=0)
    assert processes(machines.run.path) == []
