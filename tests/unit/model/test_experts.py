"""Mixtures of experts: what gets adapters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from trainers.config.mistakes import ConfigError
from trainers.config.options import TrainConfig
from trainers.config.validation import build
from trainers.model.experts import adapter_lines, router_names
from trainers.model.load import add_adapters

SIZES = {
    "vocab_size": 50, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 8, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 24,
    "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "pad_token_id": 0,
}  # fmt: skip


def config(**changes: Any) -> TrainConfig:
    return build({"model_name_or_path": "embedded", "dataset_name": "embedded", **changes})


def tiny(family: str) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SIZES))


@pytest.mark.parametrize("family", ["granitemoe", "qwen2_moe", "jamba", "mixtral", "qwen3_moe"])
def test_no_router_gets_an_adapter_unless_it_is_named(family: str) -> None:
    routers = set(router_names(tiny(family)))
    model: Any = add_adapters(tiny(family), config())
    assert routers
    assert not routers & set(model.targeted_module_names)
    assert model.targeted_module_names


def test_a_named_router_gets_one() -> None:
    """So all-linear would take it too, were it not left out."""
    model: Any = add_adapters(tiny("qwen2_moe"), config(lora_target_modules=["q_proj", "shared_expert_gate"]))
    assert sum(name.endswith("shared_expert_gate") for name in model.targeted_module_names) == 2
    assert "adapters on: q_proj 2, shared_expert_gate 2" in adapter_lines(model)


def test_a_model_without_experts_keeps_all_its_linear_layers() -> None:
    assert router_names(tiny("llama")) == []


def test_what_got_adapters_is_said() -> None:
    lines = adapter_lines(add_adapters(tiny("mixtral"), config()))
    assert lines == [
        "adapters on: k_proj 2, o_proj 2, q_proj 2, v_proj 2",
        "no adapters on: the 2 routers and gates of the experts",
        "no adapters on: the experts' own weights (down_proj 2, gate_up_proj 2), stored as one tensor per layer; "
        "method=full trains them",
    ]
    assert adapter_lines(add_adapters(tiny("llama"), config()))[0].startswith("adapters on: down_proj 2, gate_proj 2")
    assert adapter_lines(tiny("llama")) == []
    # Mixtral's routers are no linear layers, so that naming them is refused; one of Qwen2's gates is one.
    with pytest.raises(ConfigError, match="lora_target_modules=gate matches no module"):
        add_adapters(tiny("mixtral"), config(lora_target_modules=["gate"]))
    qwen = adapter_lines(add_adapters(tiny("qwen2_moe"), config()))
    assert "no adapters on: the 4 routers and gates of the experts, unless they are named" in qwen
