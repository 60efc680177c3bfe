"""Accelerate configs are checked strictly: what Accelerate would ignore in silence is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from accelerate.commands.config.config_args import ClusterConfig, load_config_from_file

from trainers.config import ConfigError
from trainers.strategies import (
    _KEYS,
    STRATEGIES_DIR,
    check,
    default_strategy,
    from_launcher,
    load_strategy,
    resolve,
    strategy_names,
)

DDP = {"distributed_type": "MULTI_GPU", "num_processes": 2}


@pytest.mark.parametrize("path", sorted(STRATEGIES_DIR.rglob("*.yaml")), ids=lambda path: path.stem)
def test_every_strategy_is_whole_and_documented(path: Path) -> None:
    strategy = load_strategy(path.stem)
    text = path.read_text(encoding="utf-8")
    for word in ("Parameters, gradients and optimizer state", "Use it when", "Communication", "Command:"):
        assert word in text
    assert load_config_from_file(str(path)).num_processes == strategy.num_processes
    assert len(strategy.summary) > 20


def test_keys_are_accelerates_own() -> None:
    assert set(_KEYS) <= set(ClusterConfig.__dataclass_fields__)


@pytest.mark.parametrize(
    ("values", "line"),
    [
        (DDP | {"num_proceses": 2}, "num_proceses: unknown Accelerate key num_proceses; did you mean num_processes?"),
        (DDP | {"max_restarts": 3}, "max_restarts is a flag of `accelerate launch` and no key of its YAML"),
        (DDP | {"monitor_interval": 1}, "monitor_interval is a flag"),
        (DDP | {"rdzv_conf": "x"}, "rdzv_conf is a flag"),
        (DDP | {"num_processes": "two"}, "num_processes='two' is a str; write a int"),
        (DDP | {"num_processes": True}, "num_processes=True is a bool"),
        (DDP | {"num_processes": 1}, "distributed_type=MULTI_GPU with num_processes=1"),
        ({"num_processes": 2}, "distributed_type is missing"),
        ({"distributed_type": "MULTI_GPU"}, "num_processes is missing"),
        (DDP | {"distributed_type": "MULTI_CPU"}, "distributed_type=MULTI_CPU starts one process without mpirun"),
        (DDP | {"distributed_type": "NO"}, "distributed_type='NO' is one process, num_processes=2"),
        (DDP | {"distributed_type": "TPU"}, "distributed_type=TPU is not supported"),
        (DDP | {"num_processes": 3, "num_machines": 2}, "num_processes=3 does not divide by num_machines=2"),
        (DDP | {"compute_environment": "AMAZON_SAGEMAKER"}, "compute_environment=AMAZON_SAGEMAKER is not supported"),
        (DDP | {"mixed_precision": "bf61"}, "mixed_precision=bf61 is no precision"),
    ],
)
def test_a_wrong_config_is_refused(values: dict, line: str) -> None:
    assert check(values)[0].startswith(line)


def test_a_right_config_has_no_mistakes() -> None:
    assert check(DDP) == []


def test_resolve_sets_processes_and_drops_device_ids() -> None:
    strategy = resolve(load_strategy("ddp"), 4, "bf16")
    assert (strategy.num_processes, strategy.values["mixed_precision"]) == (4, "bf16")
    with pytest.raises(ConfigError, match="num_processes=1"):
        resolve(load_strategy("ddp"), 1, "no")
    with pytest.raises(ConfigError, match="num_processes=2"):
        resolve(load_strategy("single"), 2, "no")


def test_a_precision_that_differs_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("distributed_type: MULTI_GPU\nnum_processes: 2\nmixed_precision: bf16\n")
    with pytest.raises(ConfigError, match="says mixed_precision=bf16 and the config no"):
        resolve(load_strategy(str(path)), 2, "no")
    assert resolve(load_strategy(str(path)), 2, "bf16").num_processes == 2


def test_defaults() -> None:
    assert (default_strategy(1), default_strategy(2)) == ("single", "ddp")
    assert strategy_names()[0] == "single"


def launcher(*flags: str) -> list[str]:
    return ["python", "-m", "accelerate.commands.launch", *flags, "/x/trainers/train.py", "--preset", "tiny-lora"]


def test_the_launchers_own_command_line_says_the_strategy() -> None:
    ddp = str(STRATEGIES_DIR / "ddp.yaml")
    assert from_launcher(launcher("--config_file", ddp), "train.py").num_processes == 2
    assert from_launcher(launcher("--config_file", ddp, "--num_processes", "4"), "train.py").num_processes == 4
    assert from_launcher(launcher(f"--config_file={ddp}"), "train.py").name == "ddp"


@pytest.mark.parametrize("flag", [["--cpu"], ["--use_fsdp"], ["--multi_gpu"], ["--mixed_precision", "bf16"]])
def test_flags_that_change_the_strategy_are_refused(flag: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"the launcher was given .*write it there"):
        from_launcher(launcher("--config_file", str(STRATEGIES_DIR / "ddp.yaml"), *flag), "train.py")


def test_without_config_file_the_cached_default_would_decide() -> None:
    with pytest.raises(ConfigError, match="no --config_file"):
        from_launcher(launcher("--num_processes", "2"), "train.py")


def test_an_unknown_strategy_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean ddp"):
        load_strategy("dpp")
