"""Mixtures of experts: what gets adapters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from trainers.config.mistakes import ConfigError
from trainers.config.options import TrainConfig
from trainers.config.validation import build
from trainers.model.experts import adapter_lines, expert_share, router_names
from trainers.model.lora import add_adapters
from trainers.model.sizes import matmul_parameters, used_matmul_parameters

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
    adapted = [name for name, weight in model.named_parameters() if weight.requires_grad]
    assert not [name for name in adapted for router in routers if f".{router}." in name], "as a bare weight neither"


def test_peft_itself_adapts_the_router() -> None:
    """The control: since transformers stacks experts, peft takes `all-linear` for their weights and the router's."""
    model = get_peft_model(tiny("mixtral"), LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM"))
    assert any(".gate." in name for name, weight in model.named_parameters() if weight.requires_grad)


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
        "lora_target_parameters names those to adapt",
    ]
    assert adapter_lines(add_adapters(tiny("llama"), config()))[0].startswith("adapters on: down_proj 2, gate_proj 2")
    assert adapter_lines(tiny("llama")) == []
    # Mixtral's routers are no linear layers, so that naming them is refused; one of Qwen2's gates is one.
    with pytest.raises(ConfigError, match="lora_target_modules=gate matches no module"):
        add_adapters(tiny("mixtral"), config(lora_target_modules=["gate"]))
    alone = config(lora_target_modules=[], lora_target_parameters=["experts.down_proj"])
    assert adapter_lines(add_adapters(tiny("mixtral"), alone))[0] == "adapters on: down_proj 2"
    qwen = adapter_lines(add_adapters(tiny("qwen2_moe"), config()))
    assert "no adapters on: the 4 routers and gates of the experts, unless they are named" in qwen


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "qwen2_moe"])
def test_flops_are_those_of_the_experts_that_a_token_uses(family: str) -> None:
    model = tiny(family)
    share = expert_share(model.config)
    assert share == SIZES["num_experts_per_tok"] / SIZES["num_experts"] == 0.5
    stacked = sum(weight.numel() for weight in model.parameters() if weight.ndim == 3)
    linear = sum(part.weight.numel() for part in model.modules() if isinstance(part, nn.Linear))
    assert matmul_parameters(model, share) == (linear + stacked // 2, 0)
    assert matmul_parameters(model) == (linear + stacked, 0)  # control: all of them


def test_a_vision_tower_computes_nothing_for_text() -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("gemma3"))
    decoder, head = (matmul_parameters(part)[0] for part in (model.get_decoder(), model.get_output_embeddings()))
    assert used_matmul_parameters(model) == (decoder + head, 0)
    assert matmul_parameters(model)[0] > decoder + head, "control: it has one"


@pytest.mark.parametrize(
    ("family", "share"), [("llama", 1.0), ("gpt_oss", 4 / 128), ("gemma4", 1.0), ("glm4_moe", 8 / 128)]
)
def test_the_share_of_the_experts_is_in_the_config(family: str, share: float) -> None:
    assert expert_share(AutoConfig.for_model(family).get_text_config()) == share


def test_gemmas_share_has_another_name() -> None:
    text = {"enable_moe_block": True, "num_experts": 128, "top_k_experts": 8, "moe_intermediate_size": 704}
    assert expert_share(AutoConfig.for_model("gemma4", text_config=text).get_text_config()) == 8 / 128


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_stacks_that_are_named_get_adapters(family: str) -> None:
    named = ["experts.gate_up_proj", "mlp.experts.down_proj"]
    model: Any = add_adapters(tiny(family), config(lora_target_parameters=named))
    assert len(model.targeted_parameter_names) == 4
    lines = adapter_lines(model)
    assert "down_proj 2, gate_up_proj 2" in lines[0]
    assert not any("own weights" in line for line in lines)
    first = add_adapters(tiny(family), config(lora_target_parameters=named[:1]))
    assert any("own weights (down_proj 2)" in line for line in adapter_lines(first))


@pytest.mark.parametrize(
    ("family", "target", "line"),
    [
        ("mixtral", "experts.w1", "=experts.w1 matches no stack of matrices of .*experts.down_proj, experts.gate_up"),
        ("mixtral", "gate.weight", "=gate.weight matches no stack of matrices of"),
        ("gpt_oss", "experts.down_proj_bias", "=experts.down_proj_bias matches no stack of matrices of"),
        ("llama", "down_proj.weight", "=down_proj.weight matches no stack of matrices of .*it has no stacked weights"),
    ],
)
def test_what_is_no_stack_of_matrices_is_refused(family: str, target: str, line: str) -> None:
    with pytest.raises(ConfigError, match=line):
        add_adapters(tiny(family), config(lora_target_parameters=[target]))
