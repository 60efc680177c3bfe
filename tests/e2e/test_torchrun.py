"""Training under torchrun gives the numbers of `accelerate launch`, to the last bit; other words are refused."""

from __future__ import annotations

import functools
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import forked
from tests.detached import SMALL, inside, pid_of, saved, step_of, until
from tests.launching import ROOT, SCRIPT, Finished, flags, free_port
from trainers.run.folder import RunFolder

OPTIONS: dict[str, Any] = {**SMALL, "preset": "tiny-lora", "max_steps": 6, "save_steps": 0, "logging_steps": 1}
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
long = pytest.mark.long
Numbers = list[tuple[str, str]]


def numbers(run: RunFolder) -> Numbers:
    assert (run.read_state() or {})["state"] == "done"
    rows = [row for row in Finished(run, 0, "").rows() if row.get("loss") is not None]
    newest = {row["step"]: row for row in sorted(rows, key=lambda row: row["attempt"])}
    assert sorted(newest) == list(range(1, len(newest) + 1))
    return [(float(newest[step]["loss"]).hex(), float(newest[step]["grad_norm"]).hex()) for step in sorted(newest)]


def environment_of(home: Path) -> dict[str, str]:
    return inside(home, OMP_NUM_THREADS="1")  # torchrun sets 1 itself, Accelerate the cores by the ranks


@pytest.fixture(scope="module")
def by_accelerate(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Numbers]:
    """The numbers of a strategy on two ranks that `accelerate launch` starts."""
    home = tmp_path_factory.mktemp("accelerate")

    @functools.cache
    def train(strategy: str, max_steps: int = OPTIONS["max_steps"]) -> Numbers:
        run = RunFolder(home / f"{strategy}-{max_steps}")
        line = [sys.executable, "-m", "accelerate.commands.launch", "--config_file"]
        line += [str(ROOT / "accelerate_configs" / f"{strategy}.yaml"), "--num_processes", "2", "--main_process_port"]
        line += ["0", str(SCRIPT), *flags({**OPTIONS, "max_steps": max_steps, "output_dir": run.path})]
        done = forked.run(line, cwd=home, env=environment_of(home), capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-3000:]
        return numbers(run)

    return train


@pytest.mark.parametrize(
    "strategy", ["ddp", *(pytest.param(name, marks=long) for name in ("fsdp2", "fsdp1", "zero3", "tp", "cp"))]
)
def test_the_same_numbers_as_accelerate_launch(
    strategy: str, home: Path, by_accelerate: Callable[..., Numbers]
) -> None:
    run = RunFolder(home / "run")
    words = flags({**OPTIONS, "output_dir": run.path, "accelerate_config": strategy})
    line = [*TORCHRUN, "--standalone", "--nproc_per_node", "2", str(SCRIPT), *words]
    done = forked.run(line, cwd=home, env=environment_of(home), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert numbers(run) == by_accelerate(strategy)


@pytest.mark.parametrize("rendezvous", ["static", pytest.param("c10d", marks=long)])
def test_two_agents_as_on_two_machines(rendezvous: str, home: Path, by_accelerate: Callable[..., Numbers]) -> None:
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


@long
def test_torchruns_own_restarts_go_on_from_the_newest_checkpoint(
    home: Path, by_accelerate: Callable[..., Numbers]
) -> None:
    run = RunFolder(home / "run")
    options = {**OPTIONS, "max_steps": 40, "save_steps": 5, "resume_from_checkpoint": "auto"}
    words = flags({**options, "output_dir": run.path, "accelerate_config": "ddp"})
    line = [*TORCHRUN, "--standalone", "--nproc_per_node", "2", "--max_restarts", "2", str(SCRIPT), *words]
    env = {**environment_of(home), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}  # else gloo finds the old addresses
    with open(home / "torchrun.txt", "wb") as out:
        agent = forked.Popen(line, cwd=home, env=env, stdout=out, stderr=out)
    until(lambda: saved(run) >= 5 and step_of(run) > saved(run), 120)
    os.kill(pid_of(run, "rank", 1), signal.SIGKILL)
    assert agent.wait(300) == 0, (home / "torchrun.txt").read_text()[-3000:]
    state = run.read_state() or {}
    assert (state["state"], state["attempt"]) == ("done", 1)
    assert numbers(run) == by_accelerate("ddp", 40)


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
