"""Which weights a pass only casts to the compute dtype, and so may be sent in it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from trainers.config.validation import build
from trainers.model.casts import cast_before_gather, only_cast
from trainers.model.mixers import split_mixers
from trainers.model.small_model import small_config
from trainers.objectives.loss_module import LossModule

MATRICES = 7
"""Of a layer of Llama."""


def loss_of(family: str, compute: torch.dtype = torch.bfloat16) -> LossModule:
    model_config = small_config(AutoConfig.for_model(family))
    return LossModule(AutoModelForCausalLM.from_config(model_config, attn_implementation="eager"), compute)


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2", "phi3", "gpt2", "lfm2"])
def test_the_matrices_of_dense_layers_are_only_cast(family: str) -> None:
    loss = loss_of(family)
    before = {name: id(weight) for name, weight in loss.model.named_parameters()}
    inside = {name for name, part in loss.base.get_decoder().named_modules() if ".layers." in f".{name}"}
    linear = {
        name
        for name, part in loss.model.named_modules()
        if isinstance(part, nn.Linear) and part is not loss.base.lm_head
    }
    assert inside or family == "gpt2"
    names = only_cast(loss)
    assert {f"{name}.weight" for name in linear} <= names
    assert {name for name in names if "norm" in name or "embed" in name or "ln_" in name} == set()
    assert {name: id(weight) for name, weight in loss.model.named_parameters()} == before, "the weights are back"
    assert not any(weight.is_meta or type(weight) is not nn.Parameter for weight in loss.parameters())


def test_only_layers_that_run_once_on_each_rank_are_gathered_so() -> None:
    """LFM2's convolutions run once for each group of documents."""
    data = {"model_name_or_path": "embedded", "dataset_name": "embedded"}
    options = {**data, "method": "full", "mixed_precision": "bf16"}
    hybrid = small_config(AutoConfig.for_model("lfm2"))
    hybrid.layer_types = ["conv", "full_attention"]
    model = AutoModelForCausalLM.from_config(hybrid, attn_implementation="eager")
    split_mixers(model)
    assert not cast_before_gather(build(options), LossModule(model, torch.bfloat16))
    assert cast_before_gather(build(options), loss_of("llama")), "control"


def test_in_fp32_nothing_is_cast() -> None:
    assert only_cast(loss_of("llama", torch.float32)) == set()


def test_a_model_that_cannot_be_followed_without_values_gives_none() -> None:
    assert only_cast(loss_of("mixtral")) == set()


def _reads_in_fp32(layer: Any) -> Callable[..., Any]:
    return lambda hidden: hidden @ layer.weight.float().t()


def _follows_its_dtype(layer: Any) -> Callable[..., Any]:
    plain = layer.forward
    return lambda hidden: plain(torch.sin(hidden.to(layer.weight.dtype)))


def _is_used_twice(layer: Any) -> Callable[..., Any]:
    plain = layer.forward
    return lambda hidden: plain(hidden) + plain(2 * hidden)


@pytest.mark.parametrize(
    ("change", "left"),
    [(_reads_in_fp32, 2 * MATRICES - 1), (_is_used_twice, 2 * MATRICES - 1), (_follows_its_dtype, 0)],
)
def test_a_weight_that_is_used_in_another_way_is_not(change: Callable[..., Any], left: int) -> None:
    """What depends on a dtype might change anything, so then there are none."""
    loss = loss_of("llama")
    assert len(only_cast(loss)) == 2 * MATRICES, "control"
    layer = loss.base.model.layers[0].mlp.gate_proj
    layer.forward = change(layer)
    names = only_cast(loss)
    assert len(names) == left
    assert "model.layers.0.mlp.gate_proj.weight" not in names
