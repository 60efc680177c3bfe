"""What `accelerate config` writes when its questions are answered with its own defaults passes as it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from accelerate.commands.config import cluster
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.config.default import write_basic_config
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_multi_gpu_env

from trainers.config.mistakes import ConfigError
from trainers.config.yaml_file import read_yaml
from trainers.strategy.strategy import load_strategy, resolve

GPUS = {"Which type of machine": 4, "How many GPU(s)": 2, "comma-separated list of transformer": "LlamaDecoderLayer"}
FSDP = GPUS | {"Do you want to use FullyShardedDataParallel": True}
DEEPSPEED = GPUS | {"Do you want to use DeepSpeed": True}
NO_GPUS = {"Which type of machine": 0}


def questionnaire(answers: dict[str, Any], folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The file of `accelerate config`: a menu is answered with a place, a field with a value, the rest by default."""

    def answer(text: str, default: Any) -> Any:
        return next((value for part, value in answers.items() if part in text), default)

    def options(text: str, _: list[Any], convert: Any = None, default: int = 0) -> Any:
        place = answer(text, default)
        return place if convert is None else convert(place)

    def field(text: str, convert: Any = None, default: Any = None, error_message: str | None = None) -> Any:
        return answer(text, default)

    monkeypatch.setattr(cluster, "_ask_options", options)
    monkeypatch.setattr(cluster, "_ask_field", field)
    path = folder / "default_config.yaml"
    cluster.get_cluster_input().to_yaml_file(path)
    return str(path)


@pytest.mark.parametrize(
    ("answers", "kind", "version", "stage"),
    [
        pytest.param(NO_GPUS, "NO", 0, 0, id="one process"),
        pytest.param(GPUS, "MULTI_GPU", 0, 0, id="ddp"),
        pytest.param(FSDP, "FSDP", 2, 0, id="fsdp2"),
        pytest.param(FSDP | {"FSDP version": 0}, "FSDP", 1, 0, id="fsdp1"),
        pytest.param(DEEPSPEED, "DEEPSPEED", 0, 2, id="zero2"),
        pytest.param(DEEPSPEED | {"ZeRO optimization stage": 3}, "DEEPSPEED", 0, 3, id="zero3"),
        pytest.param(DEEPSPEED | {"deepspeed.zero.Init": True}, "DEEPSPEED", 0, 2, id="zero2, init"),
    ],
)
def test_the_defaults_pass(
    answers: dict[str, Any], kind: str, version: int, stage: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    strategy = load_strategy(questionnaire(answers, tmp_path, monkeypatch))
    assert (strategy.distributed_type, strategy.fsdp_version, strategy.zero_stage) == (kind, version, stage)
    copy = tmp_path / "accelerate.yaml"
    copy.write_text(resolve(strategy, strategy.num_processes, "bf16").dump())
    assert load_strategy(str(copy)).sharded == strategy.sharded == (kind == "FSDP" or stage == 3)
    assert load_config_from_file(str(copy)).num_processes == strategy.num_processes


def test_the_file_of_fsdp1_says_its_sharding_where_nobody_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = questionnaire(FSDP | {"FSDP version": 0}, tmp_path, monkeypatch)
    written = read_yaml(Path(path))["fsdp_config"]
    assert (written["fsdp_reshard_after_forward"], written["fsdp_state_dict_type"]) == ("FULL_SHARD", "FULL_STATE_DICT")
    words = ["--config_file", path, "--main_process_port", "0", "train.py"]
    arguments, _, _ = _validate_launch_command(launch_command_parser().parse_args(words))
    assert prepare_multi_gpu_env(arguments)["FSDP_SHARDING_STRATEGY"] == "FULL_SHARD"
    other = questionnaire(FSDP | {"FSDP version": 0, "sharding strategy": 1}, tmp_path, monkeypatch)
    with pytest.raises(ConfigError, match="under fsdp_version=1; write fsdp_sharding_strategy: SHARD_GRAD_OP"):
        load_strategy(other)


def test_accelerate_config_default_passes(tmp_path: Path) -> None:
    path = tmp_path / "default.yaml"  # it writes JSON, which is YAML too
    assert write_basic_config(save_location=str(path))
    assert load_strategy(str(path)).num_processes >= 1


def test_a_port_in_quotes_is_a_number_in_the_runs_copy(tmp_path: Path) -> None:
    """Accelerate's look at whether the port is free stops at a text."""
    path = tmp_path / "mine.yaml"
    path.write_text("distributed_type: MULTI_GPU\nnum_processes: 2\nmain_process_port: '29501'\n")
    assert resolve(load_strategy(str(path)), 2, "no").values["main_process_port"] == 29501
