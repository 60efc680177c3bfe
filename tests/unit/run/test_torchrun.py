"""Ranks that torchrun starts: what their words and their environment must say, and what Accelerate would have set."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from trainers.config.mistakes import ConfigError
from trainers.config.parse import parse_request
from trainers.run import torchrun
from trainers.run.launch import _is_accelerate
from trainers.strategy.strategy import STRATEGIES_DIR, load_strategy, strategy_names

TWO = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "1", "GROUP_RANK": "0", "RANK": "1",
       "LOCAL_RANK": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500",
       "TORCHELASTIC_RUN_ID": "none"}  # fmt: skip


def test_the_environment_says_how_many_ranks_there_are() -> None:
    assert torchrun.is_torchrun(TWO)
    strategy = torchrun.strategy_of_environment("fsdp2", TWO)
    assert (strategy.name, strategy.num_processes, strategy.values["num_machines"]) == ("fsdp2", 2, 1)
    machines = {**TWO, "WORLD_SIZE": "4", "GROUP_WORLD_SIZE": "2", "GROUP_RANK": "1", "MASTER_ADDR": "10.0.0.1"}
    values = torchrun.strategy_of_environment("ddp", machines).values
    assert (values["num_processes"], values["num_machines"], values["machine_rank"]) == (4, 2, 1)
    assert (values["main_process_ip"], values["main_process_port"]) == ("10.0.0.1", 29500)


@pytest.mark.parametrize(
    ("name", "changes", "line"),
    [
        (None, {}, "torchrun starts 2 ranks, and does not say how .* `torchrun --nproc_per_node 2 trainers/train.py "
                   "--accelerate_config ddp ...`, or start with `accelerate launch --config_file "),
        ("dpp", {}, "strategy='dpp' is unknown; did you mean"),
        ("single", {}, "distributed_type='NO' is one process, num_processes=2"),
        ("ddp", {"WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}, "a single rank.*accelerate_configs/single.yaml"),
        ("ddp", {"WORLD_SIZE": "3", "GROUP_WORLD_SIZE": "2"}, "2 ranks here and 3 in all on 2 machines"),
        ("ddp", {"MASTER_ADDR": ""}, "torchrun has not set MASTER_ADDR; start with `accelerate launch"),
        ("ddp", {"WORLD_SIZE": "two"}, "torchrun has not set all ranks to numbers"),
        ("ddp", {"WORLD_SIZE": "9" * 5000}, "torchrun has not set all ranks to numbers"),
    ],
)  # fmt: skip
def test_other_words_are_refused_with_the_line_to_type(name: str | None, changes: dict[str, str], line: str) -> None:
    with pytest.raises(ConfigError, match=line):
        torchrun.strategy_of_environment(name, {**TWO, **changes})


def test_ranks_that_are_started_again_resume() -> None:
    again = {**TWO, "TORCHELASTIC_RESTART_COUNT": "1"}
    torchrun.refuse_fresh_restart(None, {**TWO, "TORCHELASTIC_RESTART_COUNT": "0"})
    torchrun.refuse_fresh_restart("auto", again)
    with pytest.raises(ConfigError, match="begin at the first step; add --resume_from_checkpoint auto"):
        torchrun.refuse_fresh_restart(None, again)


def launched_by_accelerate(monkeypatch: pytest.MonkeyPatch, file: str, ranks: int) -> dict[str, str]:
    """The variables that `accelerate launch` adds to the environment of its ranks."""
    from accelerate.commands import launch

    seen: dict[str, str] = {}
    monkeypatch.setattr("torch.distributed.run.run", lambda args: seen.update(os.environ))
    words = ["--config_file", file, "--num_processes", str(ranks), "--main_process_port", "0", "train.py"]
    launch.launch_command(launch.launch_command_parser().parse_args(words))
    return about_strategy(seen)


def about_strategy(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if torchrun._SET_BY_ACCELERATE.match(name)}


@pytest.fixture
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment without the variables of Accelerate, to which it is restored."""
    for name in list(os.environ):
        if torchrun._SET_BY_ACCELERATE.match(name) or name.startswith("ACCELERATE_"):
            monkeypatch.delenv(name)
    monkeypatch.setattr(os, "environ", os.environ.copy())


@pytest.mark.parametrize("name", [name for name in strategy_names() if name != "single"])
def test_every_strategy_gets_the_variables_of_accelerate_launch(
    name: str, monkeypatch: pytest.MonkeyPatch, clean: None
) -> None:
    ranks = load_strategy(name).num_processes
    expected = launched_by_accelerate(monkeypatch, str(STRATEGIES_DIR / f"{name}.yaml"), ranks)
    torchrun.set_environment(name, ranks)
    assert about_strategy(os.environ) == expected
    assert expected["ACCELERATE_MIXED_PRECISION"] == "no"


def test_a_variable_that_says_otherwise_is_refused(clean: None) -> None:
    os.environ.update(ACCELERATE_USE_FSDP="true", FSDP_VERSION="2")
    torchrun.set_environment("fsdp2", 2)
    with pytest.raises(ConfigError, match=r"ACCELERATE_USE_FSDP=true .* is not what ddp says; .*`unset ACCEL"):
        torchrun.set_environment("ddp", 2)


def test_a_file_of_ones_own(tmp_path: Path, clean: None) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text((STRATEGIES_DIR / "fsdp2.yaml").read_text())
    torchrun.set_environment(str(file), 2)
    assert os.environ["ACCELERATE_USE_FSDP"] == "true"


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["python", "/bin/accelerate", "launch", "--config_file"], True),
        (["python", "-P", "-m", "accelerate.commands.launch"], True),
        (["python", "/bin/accelerate-launch"], True),
        (["python", "/bin/torchrun", "--nproc_per_node", "2"], False),
        (["python", "-m", "torch.distributed.launch", "train.py"], False),
        (["python", "/home/a/launch/bin/torchrun", "--nproc_per_node", "2", "trainers/train.py"], False),
        (["python", "/usr/lib/accelerate/commands/launch.py", "trainers/train.py"], True),
    ],
)
def test_the_launcher_is_known_by_its_words(argv: list[str], expected: bool) -> None:
    assert _is_accelerate(argv) is expected


@pytest.mark.parametrize("words", [[], ["--accelerate_config", "ddp"], ["--accelerate_config=ddp"]])
def test_the_option_is_no_training_option(words: list[str]) -> None:
    request = parse_request(["--preset", "tiny-lora", *words])
    assert request.accelerate_config == ("ddp" if words else None)
    values: dict[str, Any] = request.options
    assert "accelerate_config" not in values
