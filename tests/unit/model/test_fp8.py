"""`mixed_precision=fp8` is refused wherever it would not be float8. The kernels need a GPU: tests/gpu."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.families import config_for, save_small
from trainers.config.mistakes import ConfigError
from trainers.config.options import TrainConfig
from trainers.config.validation import build
from trainers.model.fp8 import convert, fitting_layers
from trainers.model.load import build_model
from trainers.strategy.strategy import load_strategy
from trainers.tools.preflight import check, machine_mistakes


def config(**changes: Any) -> TrainConfig:
    values = {"model_name_or_path": "embedded", "dataset_name": "embedded", "method": "full", "mixed_precision": "fp8"}
    return build(values | changes)


def test_adapters_are_no_float8() -> None:
    with pytest.raises(ConfigError, match="mixed_precision=fp8 with method=lora"):
        config(method="lora")


def test_it_leaves_the_promise() -> None:
    assert config().outside_parity() == ["mixed_precision=fp8 (its own measured band)"]


@pytest.mark.parametrize(
    ("capability", "installed", "lines"),
    [
        ((0, 0), True, ["needs GPUs of compute capability 8.9, this one has 0.0"]),
        ((8, 0), True, ["needs GPUs of compute capability 8.9, this one has 8.0"]),
        ((9, 0), False, ["needs torchao"]),
        ((9, 0), True, []),
    ],
)
def test_the_machine_must_have_it(
    capability: tuple[int, int], installed: bool, lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainers.tools.preflight.capability", lambda: capability)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object() if installed else None)
    found = machine_mistakes(config(), has_gpu=True)
    assert len(found) == len(lines)
    assert all(part in str(mistake) for part, mistake in zip(lines, found, strict=True))


def test_a_model_without_such_layers_is_refused_by_the_check_and_by_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would train in bf16 under the name of fp8."""
    converted: list[Any] = []
    float8 = SimpleNamespace(
        Float8LinearConfig=dict, convert_to_float8_training=lambda decoder, **_: converted.append(decoder)
    )
    monkeypatch.setitem(sys.modules, "torchao.float8", float8)
    monkeypatch.setattr("trainers.tools.preflight._float8_mistakes", list)
    sizes = {"hidden_size": 24, "num_attention_heads": 2, "head_dim": 12, "intermediate_size": 40}
    folder = save_small(tmp_path / "odd", **sizes, num_key_value_heads=2)
    message = "mixed_precision=fp8: llama has no linear layer with both sizes divisible by 16; use bf16"
    with pytest.raises(ConfigError, match=message):
        check(config_for(folder, mixed_precision="fp8"), load_strategy("single"), has_gpu=True)
    with pytest.raises(ConfigError, match=message):
        convert(build_model(config_for(folder)))
    assert check(config_for(Path("embedded"), mixed_precision="fp8"), load_strategy("single"), has_gpu=True), "control"
    assert len(converted) == 1


def test_only_layers_that_the_kernels_take_are_converted() -> None:
    base: Any = build_model(config(mixed_precision="no"))
    assert len(fitting_layers(base)) == 4 * 7
    base.get_decoder().layers[0].mlp.up_proj.in_features = 120
    assert len(fitting_layers(base)) == 4 * 7 - 1
