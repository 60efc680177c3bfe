"""Weights that get no gradient from any text are found without data, refused by name, or frozen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from tests.families import config_for, save_small
from trainers.build import can_fill_gradients, refuse_varying_graph
from trainers.config.mistakes import ConfigError
from trainers.config.options import TrainConfig
from trainers.config.validation import build, ignored_choices
from trainers.model.load import build_model
from trainers.model.reachability import (
    OPTION,
    Reach,
    expert_list,
    freeze_unreached,
    reach_lines,
    reach_of,
    reach_of_loaded,
    refuse_unreached,
    silent_weights,
)
from trainers.model.small_model import small_config
from trainers.objectives.loss_module import LossModule
from trainers.strategy.strategy import load_strategy
from trainers.tools.preflight import check

TINY: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2,
}  # fmt: skip


def config(**changes: Any) -> TrainConfig:
    return build({"model_name_or_path": "embedded", "dataset_name": "embedded", "method": "full", **changes})


def without_gradient(model_config: Any) -> list[str]:
    """The weights of a model with values that a real backward pass gives none."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(model_config, dtype=torch.float32)
    for weight in silent_weights(model):
        weight.requires_grad_(False)
    model(input_ids=torch.arange(1, 13)[None], use_cache=False).logits.sum().backward()
    return [name for name, weight in model.named_parameters() if weight.requires_grad and weight.grad is None]


@pytest.mark.parametrize("family", ["ernie4_5_moe", "afmoe"])
def test_biases_that_choose_experts_stay_frozen_when_they_are_loaded(family: str, tmp_path: Path) -> None:
    """transformers makes them trainable; AdamW would decay them, and DDP wait for their gradients. Without a word."""
    folder = save_small(tmp_path / family, family)
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    names = [name for name, _ in loaded.named_parameters() if name.endswith(("e_score_correction_bias", "expert_bias"))]
    assert names
    assert all(weight.requires_grad for weight in loaded.parameters()), "control"
    built = build_model(config_for(folder, packing=False))
    assert sorted(name for name, weight in built.named_parameters() if not weight.requires_grad) == sorted(names)


@pytest.mark.parametrize(
    ("family", "count"),
    [("llama", 0), ("qwen3_moe", 0), ("gemma3", 0), ("bart", 20), ("deepseek_v32", 15), ("git", 43)],
)
def test_they_are_those_that_a_backward_pass_leaves_out(family: str, count: int) -> None:
    """Control: nothing of a dense model, of a mixture of experts, or beside the tower that is frozen anyway."""
    model_config = small_config(AutoConfig.for_model(family))
    reach = reach_of(config(), model_config)
    assert list(reach.unreached) == without_gradient(model_config)
    assert (len(reach.unreached), reach.sometimes, reach.varies) == (count, (), False)


def test_what_only_long_rows_reach_is_not_refused() -> None:
    """DeepSeek V4 compresses keys of tokens far away; with rows that are shorter, nothing can train that."""
    model_config = small_config(AutoConfig.for_model("deepseek_v4"))
    model_config.max_position_embeddings = 1024
    long, short = (reach_of(config(max_length=length), model_config) for length in (1024, 12))
    assert long.varies
    assert long.sometimes
    assert set(short.unreached) == {*long.unreached, *long.sometimes}


def test_a_model_that_does_not_run_without_values_is_not_refused(caplog: pytest.LogCaptureFixture) -> None:
    """JetMoE loops over its experts. Nor does its user see torch's account of that."""
    assert reach_of(config(), small_config(AutoConfig.for_model("jetmoe"))) == Reach(varies=True)
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


class Routed(nn.Module):
    """Experts in a list, of which only the first two ever get tokens here."""

    def __init__(self, count: int):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(count))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.experts[0](hidden) + self.experts[1](hidden)


def routed_model() -> Any:
    """A model with experts in a list, and a second head that nothing calls."""
    model: Any = LlamaForCausalLM(LlamaConfig(**TINY))
    model.model.layers[0].mlp = Routed(4)
    model.second_head = nn.Linear(16, 64, bias=False)
    return model


def test_an_expert_without_tokens_is_no_weight_that_text_never_reaches() -> None:
    """Control: the second head is one, and so is a list of experts of which none is reached."""
    model = routed_model()
    assert reach_of_loaded(model) == Reach(("second_head.weight",), varies=True)
    model.model.layers[0].mlp.forward = lambda hidden: hidden
    unreached = reach_of_loaded(model).unreached
    assert sum(".experts." in name for name in unreached) == 8


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("model.layers.0.mlp.experts.3.up_proj.weight", "model.layers.0.mlp.experts"),
        ("model.layers.0.mlp.experts.up_proj", None),
        ("model.layers.3.mlp.up_proj.weight", None),
    ],
)
def test_the_experts_of_a_list_are_told_by_their_names(name: str, expected: str | None) -> None:
    assert expert_list(name) == expected


def test_check_and_run_name_them_with_a_way_out(tmp_path: Path) -> None:
    """And both of them let the option and adapters pass."""
    save_small(tmp_path, "bart")
    refused = config_for(tmp_path, packing=False, cache_dir=str(tmp_path))
    with pytest.raises(ConfigError) as early:
        check(refused, load_strategy("single"), has_gpu=False)
    with pytest.raises(ConfigError) as late:
        build_model(refused)
    assert early.value.lines == late.value.lines
    assert early.value.lines == [
        f"{OPTION}=false: 20 weights get no gradient from any text in bart models "
        "(model.decoder.layers.0.encoder_attn.k_proj.weight, model.decoder.layers.0.encoder_attn.k_proj.bias, "
        "model.decoder.layers.0.encoder_attn.v_proj.weight and 17 more); "
        f"use {OPTION}=true, which freezes them as they are, or method=lora, which trains adapters elsewhere"
    ]
    for changes in ({OPTION: True}, {"method": "lora"}):
        allowed = config_for(tmp_path, packing=False, cache_dir=str(tmp_path), **changes)
        if allowed.method == "full":
            check(allowed, load_strategy("single"), has_gpu=False)
        trained = [name for name, weight in build_model(allowed).named_parameters() if weight.requires_grad]
        assert any("self_attn" in name for name in trained)
        assert not [name for name in trained if "encoder_attn" in name]


def test_a_single_weight_is_told_in_the_singular() -> None:
    with pytest.raises(ConfigError, match=r": 1 weight gets no gradient from any text in x models \(head\.weight\);"):
        refuse_unreached(config(), "x", ["head.weight"])


def test_an_option_without_effect_is_told() -> None:
    """Control: nothing is said of it where it has one, or by default."""
    allowed, reach = config(ddp_find_unused_parameters=True), Reach(("head.weight",))
    assert reach_lines(allowed, Reach()) == [f"{OPTION} is ignored: text reaches every weight"]
    assert reach_lines(allowed, reach) == ["frozen, as no text reaches them: 1 weights (head.weight)"]
    assert reach_lines(config(), Reach()) == []
    lora = config(method="lora", ddp_find_unused_parameters=True)
    assert [str(mistake) for mistake in ignored_choices(lora) if mistake.option == OPTION] == [
        f"{OPTION}=true is ignored: method=lora trains adapters, where text reaches"
    ]
    assert not [mistake for mistake in ignored_choices(allowed) if mistake.option == OPTION]


def test_a_graph_that_varies_is_refused_where_ranks_would_part() -> None:
    """By the names of the experts in a list, or of what long rows alone reach. Control: of a dense model, nothing."""
    dense, mixture = LlamaForCausalLM(LlamaConfig(**TINY)), routed_model()
    refuse_varying_graph(LossModule(dense))
    with pytest.raises(ConfigError, match=r"others of 8 weights \(.*experts\.0\.weight.* such as ddp or fsdp2"):
        refuse_varying_graph(LossModule(mixture))
    freeze_unreached(dense, Reach(sometimes=("model.layers.0.mlp.up_proj.weight",), varies=True))
    with pytest.raises(ConfigError, match=r"others of 1 weights \(model\.layers\.0\.mlp\.up_proj\.weight\)"):
        refuse_varying_graph(LossModule(dense))
    dense.requires_grad_(False)
    refuse_varying_graph(LossModule(dense))


def test_it_is_refused_under_zero_and_pipelines_alone() -> None:
    names = ("single", "ddp", "fsdp1", "fsdp2", "hsdp", "zero1", "zero2", "zero3", "pp", "pp_fsdp2")
    able = {name for name in names if can_fill_gradients(load_strategy(name))}
    assert able == {"single", "ddp", "fsdp1", "fsdp2", "hsdp"}
