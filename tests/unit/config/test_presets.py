"""Every preset: complete, honest about what it needs, and built on the meta device from its model's published config.

`safetensors_total` in a model's file is the number of weights that the Hub counts in its safetensors files
(`https://huggingface.co/api/models/REPOSITORY`, key `safetensors.total`). No weights and no network are needed.
"""

from __future__ import annotations

import re
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from app.plan.estimate import candidate, case_of, plan_row
from app.plan.hardware import GIB, ROOM, Hardware
from tests.parity.runs import mostly_long
from tests.presets import left_to_the_user
from trainers.config.mistakes import ConfigError
from trainers.config.options import EMBEDDED, TrainConfig
from trainers.config.parse import Request
from trainers.config.presets import (
    PRESETS_DIR,
    PRETRAIN,
    Method,
    ModelPresets,
    PublishedModel,
    _summary,
    find_preset,
    is_preset,
    model_names,
    model_presets,
    preset_names,
    published_config,
)
from trainers.config.yaml_file import read_yaml
from trainers.data.layout import AttentionMetadata
from trainers.model.attention import KERNELS
from trainers.model.config_checks import check_rows, is_causal
from trainers.model.experts import has_experts, router_names
from trainers.model.lora import add_adapters
from trainers.model.quantization import refuse_unfit
from trainers.objectives.output_head import decoder_of, find_head_rule
from trainers.strategy.strategy import load_strategy, strategy_names
from trainers.tools.memory_estimate import estimate_memory

NAMES = preset_names()
HUB_NAMES = [name for name in NAMES if not name.startswith("tiny-")]
PUBLISHED = {name: found for name in model_names() if (found := model_presets(name).model)}
METHODS = ("full", "lora", "qlora")


def model_of(name: str) -> str:
    """`qwen3-8b-lora` -> `qwen3-8b`."""
    return name.rpartition("-")[0]


def methods_of(model: str) -> tuple[str, ...]:
    """All methods; experts cannot be quantised."""
    return METHODS[:2] if has_experts(shape_of(PUBLISHED[model]).get_text_config()) else METHODS


def shape_of(published: PublishedModel, **changes: Any) -> Any:
    values = {**published.config, **changes}
    shape = AutoConfig.for_model(values.pop("model_type"), **values)
    assert is_causal(shape)  # from then on AutoModelForCausalLM builds models of images and text too
    return shape


def on_meta(shape: Any) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(shape, attn_implementation=KERNELS["sdpa"])


def count(model: nn.Module) -> int:
    return sum(weight.numel() for weight in model.parameters())


def stored(published: PublishedModel, model: Any) -> int:
    """The elements in the model's files: its own, and the output head again where they hold a tied one twice.

    Buffers that are saved, such as the bias of a router, are among them; the Hub does not count those of one number.
    """
    head, embedding = model.get_output_embeddings().weight, model.get_input_embeddings().weight
    if published.tied_head_stored:
        assert head is embedding
    saved = model.state_dict().keys()
    buffers = sum(buffer.numel() for name, buffer in model.named_buffers() if name in saved and buffer.ndim)
    return count(model) + buffers + (head.numel() if published.tied_head_stored else 0)


def parts_left_out(published: PublishedModel, model: Any) -> dict[str, int]:
    """The same parts as `left_out`, counted."""
    text, parts = model.config.get_text_config(), {}
    layers, hidden = decoder_of(model).layers, text.hidden_size
    if "vision_tower" in published.left_out:
        with torch.device("meta"):
            whole = AutoModelForImageTextToText.from_config(shape_of(published))
        parts["vision_tower"] = count(whole) - count(model)
    if "next_token_layer" in published.left_out:  # after a layer and a joint projection; GLM's has its own ends
        ends = 2 * text.vocab_size * hidden if text.model_type == "glm4_moe" else 0
        buffers = sum(buffer.numel() for buffer in layers[-1].buffers())
        parts["next_token_layer"] = count(layers[-1]) + buffers + 2 * hidden * hidden + 3 * hidden + ends
    if "shared_keys" in published.left_out:
        own = {**published.config, "text_config": {**published.config["text_config"], "num_kv_shared_layers": 0}}
        unshared = on_meta(shape_of(published.model_copy(update={"config": own})))
        parts["shared_keys"] = keys_and_values(unshared) - keys_and_values(model)
    return parts


def keys_and_values(model: Any) -> int:
    parameters = model.get_decoder().named_parameters()
    return sum(weight.numel() for name, weight in parameters if {"k_proj", "v_proj", "k_norm"} & set(name.split(".")))


def adapted(model: Any, config: TrainConfig) -> int:
    """The adapter weights that the preset should get: r for each row and column of each linear layer.

    Except for the head, for what routes tokens to experts, and for names under which peft knows stacked experts.
    """
    chosen, head = config.lora_target_modules, model.get_output_embeddings()
    if model.config.model_type in ("deepseek_v2", "glm4_moe"):
        chosen = ["q_proj", "k_proj", "v_proj", "o_proj", "kv_a_proj_with_mqa", "kv_b_proj"]
    routing = {id(model.get_submodule(name)) for name in router_names(model)}
    layers = [
        part
        for name, part in model.get_decoder().named_modules()
        if isinstance(part, nn.Linear)
        and part is not head
        and id(part) not in routing
        and (chosen == ["all-linear"] or name.endswith(tuple(chosen)))
    ]
    return sum(config.lora_r * (layer.in_features + layer.out_features) for layer in layers)


def test_each_model_comes_in_each_method() -> None:
    assert len(PUBLISHED) == 46
    assert set(HUB_NAMES) == {f"{model}-{method}" for model in PUBLISHED for method in methods_of(model)}
    assert set(NAMES) - set(HUB_NAMES) == {
        f"tiny-{name}" for name in ("full", "lora", "dpo", "kto", "distill", "reward", "grpo", "pretrain")
    }
    models = [model_of(name) for name in NAMES]
    assert models == sorted(models)


@pytest.mark.parametrize("name", NAMES)
def test_a_preset_is_a_complete_config_named_after_what_it_trains(name: str) -> None:
    config, preset = Request(preset=name, options=left_to_the_user(name)).resolve(), find_preset(name)
    trained = config.method if config.objective == "sft" else config.objective
    trained = PRETRAIN if config.dataset_format == "text" else trained
    assert (config.preset, f"{model_of(name)}-{trained}") == (name, name)
    assert (config.model_name_or_path == EMBEDDED) == (name not in HUB_NAMES)
    assert {"learning_rate", "global_batch_size", "max_length", "packing", "dataset_name"} <= set(preset.options)
    assert is_preset(name)


def test_a_preset_without_its_teacher_says_how_to_get_one() -> None:
    assert left_to_the_user("tiny-distill") == {"teacher": "embedded"}
    assert left_to_the_user("tiny-dpo") == left_to_the_user("tiny-full") == {}
    with pytest.raises(ConfigError, match=r"teacher is not set, .*`tunesmith train tiny-full` trains one"):
        Request(preset="tiny-distill").resolve()


def test_a_preset_that_goes_on_from_a_run_says_so_if_it_starts_from_its_base() -> None:
    def notes(**options: str) -> str:
        request = Request(preset="tiny-grpo", options=options)
        request.resolve()
        return "\n".join(request.notes)

    assert "a run of `tunesmith train tiny-full --max_steps 30`, which --from_run names" in notes()
    for other in ({"from_run": "runs/first"}, {"model_name_or_path": "org/model"}, {"objective": "sft"}):
        assert "--from_run" not in notes(**other)


@pytest.mark.parametrize("name", NAMES)
def test_the_run_that_a_preset_builds_on_is_of_a_preset_and_trains_as_asked(name: str) -> None:
    first = find_preset(name).first
    assert (first is not None) == (name in ("tiny-distill", "tiny-grpo"))
    if first is not None:
        config = Request(preset=first.method, options=dict(first.options)).resolve()
        assert config.preset == first.method
        assert {option: getattr(config, option) for option in first.options} == first.options


@pytest.mark.parametrize("name", NAMES)
def test_its_line_says_estimated_or_what_was_measured(name: str) -> None:
    summary, method = find_preset(name).summary, model_presets(model_of(name)).methods[name.rpartition("-")[2]]
    assert 20 < len(summary) <= 118
    if name in HUB_NAMES:
        assert method.measured is None, "none has been run against the Hub"
        assert re.search(r": estimated [\d.]+ GiB on (a GPU|each of \d GPUs) of \d+ GiB", summary)
    else:
        assert method.measured
        assert summary.endswith(method.measured)


def test_a_method_that_fits_no_gpu_has_a_line_too() -> None:
    entry = Method.model_validate({"options": {}, "gpu_gib": 24, "gpus": {1: {"strategies": [], "gib": 90}}})
    assert _summary("Model", "full", entry) == "Model, all weights: estimated 90 GiB on a GPU of 24 GiB"


@pytest.mark.parametrize("name", model_names())
def test_the_file_tells_a_reader_its_names_and_its_source(name: str) -> None:
    header = re.match(r"(#.*\n)+", (PRESETS_DIR / f"{name}.yaml").read_text(encoding="utf-8"))
    assert header
    assert ", ".join(f"{name}-{method}" for method in model_presets(name).methods) in header[0]
    if name in PUBLISHED:
        repository = model_presets(name).options["model_name_or_path"]
        assert f"https://huggingface.co/{repository}\n" in header[0]
        assert f"tunesmith train {name}-lora --dataset_name my.jsonl" in header[0]
        assert published_config(repository) is PUBLISHED[name].config
    assert published_config("nobody/knows") is None


@pytest.mark.parametrize("name", NAMES)
def test_its_strategies_on_1_2_and_8_gpus_exist_and_share_its_batch_out(name: str) -> None:
    config, gpus = Request(preset=name, options=left_to_the_user(name)).resolve(), find_preset(name).gpus
    assert list(gpus) == [1, 2, 8]
    assert set(gpus[1].strategies) <= {"single"}
    supported = {"single", "ddp", "fsdp2"} if config.method == "qlora" else set(strategy_names())
    for count, placement in gpus.items():
        assert set(placement.strategies) <= supported
        assert config.global_batch_size % count == 0
    assert any(placement.strategies for placement in gpus.values())


@pytest.mark.parametrize("model", PUBLISHED)
def test_the_methods_of_a_model_differ_where_they_must(model: str) -> None:
    """LoRA learns at about ten times the rate of full fine-tuning; the data is the same."""
    own = {"learning_rate", "weight_decay", "mixed_precision", "per_device_train_batch_size"}
    own |= {"per_device_eval_batch_size", "lora_r", "lora_alpha", "lora_target_modules"}
    methods = model_presets(model).methods
    full = float(methods["full"].options["learning_rate"])
    for name, method in methods.items():
        assert set(method.options) <= own
        rate = float(method.options["learning_rate"])
        assert rate == full if name == "full" else 1.5 <= rate / full <= 10.1


@pytest.mark.parametrize("wrong", ["strategy", "methods.lora.gpu", "methods.lora.gpus.1.gb", "model.configs"])
def test_a_misspelt_key_in_a_file_is_seen(wrong: str) -> None:
    values = read_yaml(PRESETS_DIR / "qwen3-8b.yaml")
    ModelPresets.model_validate(values)
    *path, key = wrong.split(".")
    inner = values
    for part in path:
        inner = inner[part]
    inner[key] = 1
    with pytest.raises(ValidationError, match="Extra inputs"):
        ModelPresets.model_validate(values)


# -- names -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "method", "found"),
    [
        ("qwen3-8b-lora", None, "qwen3-8b-lora"),
        ("qwen3-8b-lora", "full", "qwen3-8b-full"),
        ("qwen3-8b-lora", "lorra", "qwen3-8b-lora"),  # which the config refuses
        ("qwen3-8b", None, "qwen3-8b-lora"),
        ("qwen3-8b", "qlora", "qwen3-8b-qlora"),
        ("tiny-pretrain", "lora", "tiny-pretrain"),
        ("tiny-dpo", "lora", "tiny-dpo"),  # an objective has one preset, whose method the config's replaces
        ("tiny-lora", "dpo", "tiny-lora"),  # which the config refuses
        ("tiny-lora", "qlora", "tiny-lora"),  # of which there is none; the config's method is qlora
    ],
)
def test_the_method_that_is_asked_for_is_taken(name: str, method: str | None, found: str) -> None:
    assert find_preset(name, method).name == found
    assert is_preset(name)


@pytest.mark.parametrize(
    ("name", "line"),
    [
        (
            "qwen3-8b-loar",
            "preset=qwen3-8b-loar is unknown: qwen3-8b has no method 'loar'; there are full, lora and qlora",
        ),
        (
            "tiny-qlora",
            "preset=tiny-qlora is unknown: tiny has no method 'qlora'; there are full, lora, dpo, kto, distill,",
        ),
        ("qwen-8b-lora", "preset=qwen-8b-lora is unknown; did you mean qwen3-8b-lora?"),
        ("llama-8b", "preset=llama-8b is unknown; did you mean llama-3.1-8b?"),
        ("../tiny-lora", "preset=../tiny-lora is unknown; did you mean tiny-lora?"),
        ("x", "preset=x is unknown; use MODEL-METHOD, such as qwen3-8b-lora; the models are deepseek-v2-lite, gemma"),
    ],
)
def test_an_unknown_model_or_method_gets_near_names(name: str, line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        find_preset(name)
    assert str(caught.value).startswith(line)
    assert not is_preset(name)


def test_method_full_is_full_fine_tuning_with_its_own_values() -> None:
    """And not LoRA's learning rate on all weights; what the user gives stands above it."""
    request = Request("qwen3-8b-lora", options={"method": "full", "lora_r": "8"})
    config = request.resolve()
    assert config == Request("qwen3-8b-full", options={"lora_r": "8"}).resolve()
    assert (config.preset, config.learning_rate, config.weight_decay) == ("qwen3-8b-full", 1e-5, 0.01)
    assert request.notes == ["preset qwen3-8b-full instead of qwen3-8b-lora: method=full"]
    assert Request("qwen3-8b-lora", options={"method": "full", "learning_rate": "3e-6"}).resolve().learning_rate == 3e-6


def test_a_preset_of_an_objective_takes_another_method() -> None:
    assert Request("tiny-dpo").resolve().method == "full"
    config = Request("tiny-dpo", options={"method": "lora"}).resolve()
    assert (config.preset, config.objective, config.method) == ("tiny-dpo", "dpo", "lora")


@pytest.mark.parametrize("chosen", [{"objective": "dpo"}, {"objective": "dpo", "learning_rate": "1e-6"}, {}])
def test_a_rate_for_another_objective_is_named(chosen: dict[str, str]) -> None:
    request = Request("qwen3-8b-lora", options=chosen)
    request.resolve()
    expected = (
        "learning_rate=0.0001 is that of preset qwen3-8b-lora, for SFT; DPO usually takes a tenth of it or less "
        "(--learning_rate)"
    )
    assert request.notes == ([expected] if set(chosen) == {"objective"} else [])


def test_a_model_alone_gets_lora_and_says_so() -> None:
    request = Request("qwen3-8b")
    assert request.resolve() == Request("qwen3-8b-lora").resolve()
    [line] = request.notes
    assert line == ("preset qwen3-8b-lora instead of qwen3-8b, which names no method: there are full, lora and qlora")


# -- the models --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", mostly_long(PUBLISHED, list(PUBLISHED)[::4]))
def test_the_published_model_is_built_with_the_presets_methods(name: str) -> None:
    """Its parameters are counted, a row passes through it, and text reaches each adapter."""
    published, shape = PUBLISHED[name], shape_of(PUBLISHED[name])
    configs = {method: Request(preset=f"{name}-{method}").resolve() for method in methods_of(name)}
    for config in configs.values():
        check_rows(config, shape)
    assert all(config.max_length <= shape.get_text_config().max_position_embeddings for config in configs.values())
    with nullcontext() if "qlora" in configs else pytest.raises(ConfigError, match="cannot be quantized"):
        refuse_unfit(shape, trust_remote_code=False)
    model = on_meta(shape).bfloat16()  # the only dtype in which torch multiplies groups of experts on meta
    assert parts_left_out(published, model) == published.left_out
    assert stored(published, model) + sum(published.left_out.values()) == published.safetensors_total
    ids = torch.zeros(1, 8, dtype=torch.int64, device="meta")
    arguments = {"position_ids": ids, "use_cache": False, "attention_metadata": AttentionMetadata()}
    logits = model(input_ids=ids, **arguments).logits
    assert logits.shape == (1, 8, shape.get_text_config().vocab_size)
    # Gemma 4 E2B and E4B compute inputs of each layer before their decoder.
    assert (find_head_rule(model) is None) == name.startswith("gemma-4-e"), "its loss needs no full logits"
    adapter_options = [
        {option: value for option, value in config.model_dump().items() if "lora" in option}
        for method, config in configs.items()
        if method != "full"
    ]
    assert all(options == adapter_options[0] for options in adapter_options), "the adapters of QLoRA are LoRA's"
    config, text, routers = configs["lora"], model.get_decoder(), router_names(model)
    expected = adapted(model, config)
    adapters: Any = add_adapters(model, config)
    trained = {name: weight for name, weight in adapters.named_parameters() if weight.requires_grad}
    assert sum(weight.numel() for weight in trained.values()) == expected > 0
    inside = {id(weight) for weight in text.parameters()}
    assert all(id(weight) in inside for weight in trained.values()), "text reaches the decoder only"
    assert not [name for name in trained for router in routers if f".{router}." in name]


@pytest.mark.parametrize("name", ["qwen3-0.6b", "llama-3.1-8b"])
@pytest.mark.parametrize("wrong", ["num_hidden_layers", "intermediate_size", "num_key_value_heads"])
def test_a_wrong_fact_does_not_match(name: str, wrong: str) -> None:
    published = PUBLISHED[name]
    value = published.config[wrong]
    model = on_meta(shape_of(published, **{wrong: value // 2 if wrong.endswith("heads") else value - 1}))
    assert stored(published, model) != published.safetensors_total


# -- what the plan says ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    mostly_long(
        HUB_NAMES,
        [
            "llama-3.1-8b-full",
            "llama-3.3-70b-full",
            "llama-3.3-70b-lora",
            "gemma-3-12b-lora",
            "gemma-4-12b-qlora",
            "deepseek-v2-lite-full",
            "phi-4-full",
            "qwen3-32b-lora",
            "qwen3-8b-qlora",
        ],
    ),
)
def test_its_memory_is_what_the_plan_estimates(name: str) -> None:
    """Each strategy that it names fits; where it names none, one GPU, or FSDP on several, is too small."""
    config, gpus = Request(preset=name).resolve(), find_preset(name).gpus
    method = model_presets(model_of(name)).methods[config.method]
    assert method.gpu_gib
    hardware = {count: Hardware("gpu", count, method.gpu_gib * GIB, is_local=False) for count in gpus}
    able = [
        (count, *candidate(load_strategy(strategy), config, hardware[count]))
        for count, placement in gpus.items()
        for strategy in placement.strategies or ["single" if count == 1 else "fsdp2"]
    ]
    cases = {case_of(*found) for _, *found in able}
    counted = estimate_memory(config, shape_of(PUBLISHED[model_of(name)]), sorted(cases), time_here=False)
    rows = [(count, plan_row(*found, counted, hardware[count])) for count, *found in able]
    for count, placement in gpus.items():
        mine = [row for number, row in rows if number == count]
        assert all(bool(row.fits) == bool(placement.strategies) for row in mine)
        assert placement.gib == pytest.approx(max(row.total for row in mine) / GIB, rel=0.02, abs=1)
        assert placement.host_gib == pytest.approx(max(row.host for row in mine) / GIB, rel=0.02, abs=1)
        if not placement.strategies:
            assert placement.gib > ROOM["gpu"] * method.gpu_gib
