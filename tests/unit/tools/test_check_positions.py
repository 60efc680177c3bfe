"""Documents longer than a model supports are found by the check, which follows a scaled model's length."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.families import config_for, save_small
from trainers.build import module
from trainers.config.mistakes import ConfigError
from trainers.data.prepare import prepare
from trainers.strategy.strategy import load_strategy
from trainers.tools.preflight import check

POSITIONS, LONG = 64, 100


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = save_small(tmp_path_factory.mktemp("models") / "llama", "llama", max_position_embeddings=POSITIONS)
    for name, words in (("long", 2 * LONG), ("short", 5)):
        lines = [json.dumps({"text": "word " * words})] * 16
        (made.parent / f"{name}.jsonl").write_text("\n".join(lines))
    return made


def checked(folder: Path, data: str = "long", strategy: str = "single", **changes: Any) -> str:
    options = {"dataset_name": str(folder.parent / f"{data}.jsonl"), "max_length": LONG, "packing": False, **changes}
    return "\n".join(check(config_for(folder, **options), load_strategy(strategy), has_gpu=False))


def test_a_row_beyond_the_model_is_refused_with_two_ways_out(folder: Path) -> None:
    with pytest.raises(ConfigError, match="has 100 tokens, the model supports 64; use max_length=64, or rope_scaling="
                                          "yarn with rope_factor=2"):  # fmt: skip
        checked(folder)
    assert checked(folder, max_length=POSITIONS)


def test_training_itself_refuses_it_too(folder: Path) -> None:
    """`accelerate launch` alone makes no check first."""
    options = {"dataset_name": str(folder.parent / "long.jsonl"), "packing": False}
    allowed, refused = (config_for(folder, max_length=length, **options) for length in (POSITIONS, LONG))
    assert module(allowed, False, [prepare(allowed, "train")])
    with pytest.raises(ConfigError, match="has 100 tokens, the model supports 64"):
        module(refused, False, [prepare(refused, "train")])


@pytest.mark.parametrize("scaling", ["linear", "dynamic", "yarn", "llama3"])
def test_a_row_may_reach_the_factor_times_the_original(scaling: str, folder: Path) -> None:
    assert checked(folder, rope_scaling=scaling, rope_factor=2)
    with pytest.raises(ConfigError, match="has 100 tokens, the model supports 96; use max_length=96, or rope_factor=2"):
        checked(folder, rope_scaling=scaling, rope_factor=1.5)


def test_a_model_with_dynamic_scaling_of_its_own(tmp_path: Path, folder: Path) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 1.5}
    own = save_small(tmp_path / "own", "llama", max_position_embeddings=POSITIONS, rope_parameters=rope)
    data = str(folder.parent / "long.jsonl")
    assert checked(own, dataset_name=data, max_length=96)
    with pytest.raises(ConfigError, match=r"the model supports 96; use max_length=96$"):
        checked(own, dataset_name=data)


def test_scaling_that_the_data_does_not_need_is_named(folder: Path) -> None:
    said = checked(folder, "short", rope_scaling="yarn", rope_factor=2)
    assert "tokens, which fit into the 64 positions before scaling" in said
    assert "before scaling" not in checked(folder, "short")


def test_a_model_without_rotary_embeddings_is_refused_before_the_start(tmp_path: Path, folder: Path) -> None:
    own = save_small(tmp_path / "gpt2", "gpt2")
    data = str(folder.parent / "short.jsonl")
    assert checked(own, dataset_name=data)
    with pytest.raises(ConfigError, match="rope_scaling=yarn: gpt2 models have no rotary embeddings"):
        checked(own, dataset_name=data, rope_scaling="yarn", rope_factor=2)
    with pytest.raises(ConfigError, match="chooses its rotary frequencies by the longest position"):
        checked(folder, "short", "cp", rope_scaling="dynamic", rope_factor=2)
