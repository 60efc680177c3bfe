"""Quantization-aware training, as far as it needs no torchao, which is an extra; the rest is in tests/integrations."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from tests.families import config_for, save_small
from trainers.config.mistakes import ConfigError
from trainers.config.options import TrainConfig
from trainers.config.validation import build, ignored_choices
from trainers.model.load import build_model
from trainers.model.qat import prepare, rounded_layers, rounding_layers, without_rounding
from trainers.tools.preflight import machine_mistakes


def config(**changes: Any) -> TrainConfig:
    values = {"model_name_or_path": "embedded", "dataset_name": "embedded", "method": "full", "qat": "int4"}
    return build(values | changes)


def test_the_layers_of_the_decoder_round_and_no_others() -> None:
    base: Any = build_model(config(qat="none"))
    layers = rounded_layers(base)
    assert len(layers) == 4 * 7
    assert base.get_output_embeddings() not in layers.values()
    assert rounding_layers(base) == []


def test_a_group_that_divides_no_layer_is_named(tmp_path: Path) -> None:
    sizes = {"hidden_size": 24, "num_attention_heads": 2, "head_dim": 12, "intermediate_size": 40}
    folder = save_small(tmp_path / "odd", **sizes, num_key_value_heads=2)
    settings = config_for(folder, qat="int4", qat_group_size=16)
    message = r"qat_group_size=16 does not divide the 24 inputs of \d+ linear layers \(layers.0.self_attn.q_proj"
    with pytest.raises(ConfigError, match=message):
        prepare(settings, build_model(config_for(folder)))


class Scaled(nn.Linear):
    """A linear layer that does something else too."""


def test_a_layer_of_another_kind_is_refused() -> None:
    base: Any = build_model(config(qat="none"))
    base.get_decoder().layers[1].mlp.up_proj.__class__ = Scaled
    with pytest.raises(ConfigError, match=r"qat=int4: llama has linear layers of kind Scaled \(layers.1.mlp.up_proj"):
        prepare(config(), base)


def test_it_leaves_the_promise_and_needs_torchao(monkeypatch: pytest.MonkeyPatch) -> None:
    assert config().outside_parity() == ["qat=int4 (rounding turns a difference in the last bit into a step)"]
    assert config(qat="none").outside_parity() == []
    for installed in (True, False):
        monkeypatch.setattr(
            "importlib.util.find_spec", lambda name, installed=installed: object() if installed else None
        )
        lines = [str(mistake) for mistake in machine_mistakes(config(), has_gpu=False)]
        assert any("qat=int4 needs torchao" in line for line in lines) is not installed


def test_a_group_size_without_rounding_is_a_warning() -> None:
    lines = [str(mistake) for mistake in ignored_choices(config(qat="none", qat_group_size=64))]
    assert any("qat_group_size is ignored: qat=none rounds nothing" in line for line in lines)
    assert ignored_choices(config(qat_group_size=64)) == []


def test_rounding_is_off_only_inside() -> None:
    layer, rounds = nn.Linear(2, 2), SimpleNamespace(enabled=True)
    layer.weight_fake_quantizer, layer.activation_fake_quantizer = rounds, None  # type: ignore[assignment]
    with without_rounding(nn.Sequential(layer)):
        assert not rounds.enabled
    assert rounds.enabled
