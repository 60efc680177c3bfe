"""Three machines with addresses of their own: one is lost, the run goes on with the others, and takes it back."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from app.runs.detail import run_view
from app.runs.machines import lost_machine_0
from app.runs.metrics import Curves
from tests.detached import detached, ended, inside, pid_of, saved, until
from tests.faults.machines import Machines
from tests.faults.oracle import INTERVAL, OPTIONS, replayed, rows, told
from tests.network import set_up
from trainers.config.yaml_file import read_yaml
from trainers.run.folder import RunFolder, read_json
from trainers.run.manifest import verify
from trainers.strategy.strategy import load_strategy

STEPS = 60
LOSS, GRAD_NORM = 1e-5, 1e-4  # as P2 and P3 of docs/parity.md promise
long = pytest.mark.long
ELASTIC: dict[str, Any] = {**OPTIONS, "global_batch_size": 12, "per_device_train_batch_size": 4, "max_steps": STEPS}


@pytest.fixture
def machines(home: Path) -> Iterator[Machines]:
    net = Machines(home, 3, **ELASTIC)
    with set_up(net):
        yield net


def same_training(run: RunFolder, uncut: RunFolder, replays: int) -> None:
    """The run is done, and its numbers are those of the uncut one within what another number of ranks changes."""
    mine, theirs = rows(run), rows(uncut)
    assert [row["step"] for row in mine] == list(range(1, STEPS + 1))
    assert [row["loss"] for row in mine] == pytest.approx([row["loss"] for row in theirs], rel=0, abs=LOSS)
    assert [row["grad_norm"] for row in mine] == pytest.approx([row["grad_norm"] for row in theirs], rel=GRAD_NORM)
    assert [row["tokens"] for row in mine] == [row["tokens"] for row in theirs]
    assert replayed(run) <= replays
    for path in run.checkpoints.glob("step-*"):
        verify(path)


@pytest.fixture(scope="module")
def uncut(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """The run on three ranks that loses none. By P2 it is the measure of every strategy."""
    home = tmp_path_factory.mktemp("uncut")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", inside(home)["XDG_STATE_HOME"])
        run = detached(home, "uncut", 3, strategy="ddp", share_gpus=True, **ELASTIC)
        assert ended(run)["state"] == "done"
    return run


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp2", marks=long)])
def test_a_run_goes_on_without_a_machine_and_takes_it_back(strategy: str, machines: Machines, uncut: RunFolder) -> None:
    """A node goes down in mid-run, comes back as a spare, and takes part after the next restart."""
    run = machines.run
    for machine in (2, 1, 0):
        machines.train(machine, strategy=strategy, min_machines=2)
    machines.until_saved()
    assert machines.participants() == [0, 1, 2]
    machines.power_off(2)
    until(lambda: machines.participants() == [0, 1], 300)
    machines.until_saved(saved(run))
    assert read_yaml(run.accelerate)["num_processes"] == 2
    assert run_view(run, Curves())["machines"].startswith("2 of 3 machines; machine 2: no sign of life for 20 s")
    machines.train(2, strategy=strategy, min_machines=2)
    status = run.machine_file(2)
    before = read_json(status) or {}
    until(lambda: (read_json(status) or {}).get("processes") != before.get("processes"), 300)
    assert machines.participants() == [0, 1], "a machine that comes back waits"
    os.kill(pid_of(run, "rank", 0), signal.SIGKILL)
    until(lambda: machines.participants() == [0, 1, 2], 300)
    machines.codes(0, 1, 2)
    same_training(run, uncut, replays=2 * INTERVAL)
    assert read_yaml(run.accelerate)["num_processes"] == 3
    first, second = [line for line in run.log.read_text().splitlines() if "[supervisor] restart " in line]
    assert "restart with the machines that are left, from step-000000" in first
    assert "after: machine 2 was lost: no sign of life for 20 s" in first
    assert "restart 1 of 3, from step-" in second, "a lost machine is not counted"
    assert "goes on with 2 of 3 machines; machine 2: no sign of life" in run.log.read_text()


@long
def test_shards_of_three_machines_go_on_in_one_and_in_three_again(machines: Machines, uncut: RunFolder) -> None:
    """Two nodes go down one after the other; all three are back when the run is stopped and resumed."""
    run = machines.run
    for machine in (2, 1, 0):
        machines.train(machine, strategy="fsdp2", min_machines=1)
    machines.until_saved()
    machines.power_off(2)
    until(lambda: machines.participants() == [0, 1], 300)
    assert load_strategy(str(run.accelerate)).name == "fsdp2"
    machines.until_saved(saved(run))
    machines.power_off(1)
    until(lambda: machines.participants() == [0], 300)
    machines.until_saved(saved(run))
    run.ask_stop()
    machines.codes(0, expected=130)
    for machine in (2, 1, 0):
        machines.start(machine, "resume", str(run.path), machine_rank=machine)
    until(lambda: machines.participants() == [0, 1, 2], 300)
    machines.codes(0, 1, 2)
    same_training(run, uncut, replays=3 * INTERVAL)
    file = read_yaml(run.accelerate)
    assert (file["num_processes"], file["num_machines"], load_strategy(str(run.accelerate)).name) == (3, 3, "fsdp2")


@long
def test_without_min_machines_the_run_ends_with_the_name_of_the_lost_one(machines: Machines) -> None:
    for machine in (2, 1, 0):
        machines.train(machine)
    machines.until_saved()
    machines.power_off(2)
    machines.codes(0, 1, expected=1)
    assert told(machines.run).startswith("machine 2 did not join within 60 s; start the same command there")
    assert "after: machine 2 was lost: no sign of life" in machines.run.log.read_text()


@long
def test_too_few_machines_end_the_run(machines: Machines) -> None:
    for machine in (2, 1, 0):
        machines.train(machine, min_machines=2)
    machines.until_saved()
    machines.power_off(1)
    machines.power_off(2)
    machines.codes(0, expected=1)
    assert "machines 1, 2 did not join within 60 s" in told(machines.run)
    assert told(machines.run).endswith("1 of 3 machines are there, fewer than min_machines=2")


@long
def test_the_others_resume_a_run_whose_machine_0_is_lost(machines: Machines, uncut: RunFolder) -> None:
    run = machines.run
    for machine in (2, 1, 0):
        machines.train(machine, min_machines=2)
    machines.until_saved()
    machines.power_off(0)
    machines.codes(1, 2, expected=1)
    advice = f"`tunesmith resume {run.path} --num_machines 2 --num_processes 2 --main_process_ip ADDRESS "
    assert advice in (machines.home / "machine-1.txt").read_text()
    until(lambda: lost_machine_0(run, run.read_state() or {}), 300)
    for machine in (2, 1):
        machines.start(
            machine, "resume", str(run.path), num_machines=2, machine_rank=machine - 1, num_processes=2,
            main_process_ip=machines.address(1), main_process_port=29500,
        )  # fmt: skip
    machines.codes(1, 2)
    same_training(run, uncut, replays=INTERVAL)


@long
def test_a_machine_without_a_network_is_left_out(machines: Machines, uncut: RunFolder) -> None:
    """It still sees the folder, but the ranks no longer reach each other."""
    run = machines.run
    for machine in (2, 1, 0):
        machines.train(machine, min_machines=2)
    machines.until_saved()
    machines.on(2, "ip", "link", "set", "eth0", "down")
    until(lambda: machines.participants() == [0, 1], 300)
    machines.until_saved(saved(run))
    machines.on(2, "ip", "link", "set", "eth0", "up")
    machines.codes(0, 1, 2)
    same_training(run, uncut, replays=INTERVAL)
