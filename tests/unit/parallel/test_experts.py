"""Expert parallelism divides the stacks of experts that transformers plans, and refuses what it would train wrongly."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

from trainers.config.mistakes import ConfigError
from trainers.objectives.loss_module import LossModule
from trainers.parallel.experts import expert_stacks, planned

SIZES = {"hidden_size": 16, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2,
         "num_key_value_heads": 1, "vocab_size": 32, "num_local_experts": 4, "head_dim": 8}  # fmt: skip


def mixture(**changes: Any) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model("mixtral", **{**SIZES, **changes}))


def test_stacks_come_before_the_modules_that_they_are_in() -> None:
    """A module's forward is built from the number of experts that are left in it."""
    plan = list(planned(LossModule(mixture()), 2))
    weights = [f"layers.{layer}.mlp.experts.{name}" for layer in (0, 1) for name in ("gate_up_proj", "down_proj")]
    assert plan == [*weights, "layers.0.mlp.experts", "layers.1.mlp.experts"]
    assert expert_stacks(mixture()) == weights


def test_adapters_on_experts_wrap_the_module_that_is_divided() -> None:
    plain = LoraConfig(r=2, target_modules=["q_proj"])
    assert len(planned(LossModule(get_peft_model(mixture(), plain)), 2)) == 6
    names = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    stacked = LoraConfig(r=2, target_modules=["q_proj"], target_parameters=names)
    plan = list(planned(LossModule(get_peft_model(mixture(), stacked)), 2))
    assert plan[0] == "layers.0.mlp.experts.base_layer.base_layer.gate_up_proj"
    assert plan[4:] == [f"layers.{layer}.mlp.experts.base_layer.base_layer" for layer in (0, 1)]


def test_a_weight_that_the_plan_leaves_out_is_refused() -> None:
    model = mixture()
    model.config.base_model_ep_plan = {
        name: style for name, style in model.config.base_model_ep_plan.items() if not name.endswith("down_proj")
    }
    with pytest.raises(ConfigError, match=r"has weights at layers\.0\.mlp\.experts\.down_proj which its plan leaves"):
        planned(LossModule(model), 2)
