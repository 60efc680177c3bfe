"""Training under torchrun gives the numbers of `accelerate launch`, to the last bit; other words are refused."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import forked
from tests.detached import SMALL, inside
from tests.launching import ROOT, SCRIPT, Finished, flags, free_port
from trainers.run.folder import RunFolder

OPTIONS: dict[str, Any] = {**SMALL, "preset": "tiny-lora", "max_steps": 6, "save_steps": 0, "logging_steps": 1}
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
long = pytest.mark.long
Numbers = list[tuple[str, str]]


def numbers(run: RunFolder) -> Numbers:
    assert (run.read_state() or {})["state"] == "done"
    rows = Finished(run, 0, "").rows()
    return [(float(row["loss"]).hex(), float(row["grad_norm"]).hex()) for row in rows if row.get("loss") is not None]


def environment_of(home: Path) -> dict[str, str]:
    return inside(home, OMP_NUM_THREADS="1")  # torchrun sets 1 itself, Accelerate the cores by the ranks


@pytest.fixture(scope="module")
def by_accelerate(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Numbers]:
    """The numbers of a strategy on two ranks that `accelerate launch` starts."""
    home = tmp_path_factory.mktemp("accelerate")

    @functools.cache
    def train(strategy: str) -> Numbers:
        run = RunFolder(home / strategy)
        line = [sys.executable, "-m", "accelerate.commands.launch", "--config_file"]
        line += [str(ROOT / "accelerate_configs" / f"{strategy}.yaml"), "--num_processes", "2", "--main_process_port"]
        line += ["0", str(SCRIPT), *flags({**OPTIONS, "output_dir": run.path})]
        done = forked.run(line, cwd=home, env=environment_of(home), capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-3000:]
        return numbers(run)

    return train


@pytest.mark.parametrize(
    "strategy", ["ddp", *(pytest.param(name, marks=long) for name in ("fsdp2", "fsdp1", "zero3", "tp", "cp"))]
)
def test_the_same_numbers_as_accelerate_launch(
    strategy: str, home: Path, by_accelerate: Callable[[str], Numbers]
) -> None:
    run = RunFolder(home / "run")
    words = flags({**OPTIONS, "output_dir": run.path, "accelerate_config": strategy})
    line = [*TORCHRUN, "--standalone", "--nproc_per_node", "2", str(SCRIPT), *words]
    done = forked.run(line, cwd=home, env=environment_of(home), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert numbers(run) == by_accelerate(strategy)


@pytest.mark.parametrize("rendezvous", ["static", pytest.param("c10d", marks=long)])
def test_two_agents_as_on_two_machines(rendezvous: str, home: Path, by_accelerate: Callable[[str], Numbers]) -> None:
    run, port, agents = RunFolder(home / "run"), free_port(), []
    for machine in (0, 1):
        line = [*TORCHRUN, "--nnodes", "2", "--nproc_per_node", "1"]
        if rendezvous == "static":
            line += ["--node_rank", str(machine), "--master_addr", "127.0.0.1", "--master_port", str(port)]
        else:
            line += ["--rdzv_backend", "c10d", "--rdzv_id", "1", "--rdzv_endpoint", f"localhost:{port}"]
        line += [str(SCRIPT), *flags({**OPTIONS, "output_dir": run.path, "accelerate_config": "ddp"})]
        env = {**environment_of(home), "XDG_STATE_HOME": str(home / f"machine-{machine}")}
        with open(home / f"agent-{machine}.txt", "wb") as out:
            agents.append(forked.Popen(line, cwd=home, env=env, stdout=out, stderr=out))
    codes = [agent.wait(300) for agent in agents]
    assert codes == [0, 0], "\n".join((home / f"agent-{machine}.txt").read_text()[-3000:] for machine in (0, 1))
    assert numbers(run) == by_accelerate("ddp")


@pytest.mark.parametrize(
    ("strategy", "variables", "line"),
    [
        (None, {}, "add --accelerate_config with the name of a strategy or an Accelerate file"),
        pytest.param("ddp", {"ACCELERATE_USE_FSDP": "true"}, "`unset ACCELERATE_USE_FSDP`", marks=long),
    ],
)
def test_what_torchrun_does_not_say_is_not_guessed(
    strategy: str | None, variables: dict[str, str], line: str, home: Path
) -> None:
    named = {"accelerate_config": strategy} if strategy else {}
    words = [*TORCHRUN, "--standalone", "--nproc_per_node", "2", str(SCRIPT), *flags({**OPTIONS, **named})]
    env = {**environment_of(home), **variables}
    done = forked.run(words, cwd=home, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode != 0
    assert line in done.stderr
    assert not (home / "runs").exists()
