"""What `tunesmith plan` counts of a model, against what torch allocates."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, LlamaForCausalLM

from trainers.config.options import TrainConfig
from trainers.config.teacher import teacher_config
from trainers.config.validation import build
from trainers.model.attention import KERNELS
from trainers.model.load import build_model, compute_dtype, load_model_config
from trainers.objectives.distillation import Divergence
from trainers.objectives.loss_module import LossModule
from trainers.objectives.teacher import Teacher
from trainers.run.host_memory import MAPPED
from trainers.strategy.traffic import by_layer, head_size, key_heads
from trainers.tools.memory_estimate import (
    _divides_tokens,
    _few,
    _top_tokens,
    case,
    count_peaks,
    empty_model,
    teacher_sizes,
    weights,
)

pytestmark = pytest.mark.usefixtures("elsewhere")

LENGTH = 64


def config(**values: Any) -> TrainConfig:
    defaults = {"model_name_or_path": "embedded", "dataset_name": "embedded", "method": "full", "max_length": LENGTH}
    return build({**defaults, **values})


def allocated(settings: TrainConfig, rows: int, kernel: str = "sdpa", teacher: Any = None) -> int:
    """Bytes that a forward and backward pass of the real model has allocated at most, as torch's profiler saw them."""
    model = LossModule(build_model(settings), compute_dtype(settings))
    divergence = Divergence.of(settings.objective_options()) if settings.teacher_log_probs else None
    model.divergence = divergence
    if teacher is not None:
        model.teacher = Teacher(teacher, compute_dtype(settings), Divergence.of(settings.objective_options()))
        model.teacher.base.set_attn_implementation(KERNELS[kernel])
    model.base.set_attn_implementation(KERNELS[kernel])
    model.train()
    for weight in model.parameters():
        weight.grad = torch.zeros_like(weight) if weight.requires_grad else None
    ids = torch.zeros(rows, LENGTH, dtype=torch.int64)
    places, every = torch.arange(LENGTH).expand(rows, LENGTH), torch.zeros(rows * LENGTH, dtype=torch.int64)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as seen:
        taught = teacher is not None if divergence is None else _top_tokens(rows * LENGTH, model)
        model(ids, places, None, every, every, taught=taught)[0].backward()
    now = most = 0
    for event in seen.profiler.kineto_results.events():  # type: ignore[union-attr]
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)
    return most


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gradient_checkpointing": True},
        {"gradient_checkpointing": True, "selective_checkpointing": True},
        {"mixed_precision": "bf16"},
        {"method": "lora"},
        {"method": "lora", "mixed_precision": "bf16", "gradient_checkpointing": True},
    ],
)
@pytest.mark.parametrize("rows", [2, 8])
def test_a_micro_batch_needs_what_torch_allocates(options: dict[str, Any], rows: int) -> None:
    settings = config(**options)
    counted = count_peaks(settings, empty_model(settings, load_model_config(settings)), rows, LENGTH).highest
    # Selective checkpointing does not keep the stand-in for attention; and products in bf16 have scratch.
    exact = settings.mixed_precision == "no" and not settings.selective_checkpointing
    close = 0.01 if exact else 0.06
    assert counted == pytest.approx(allocated(settings, rows), rel=close)


@pytest.mark.parametrize("loss_type", ["forward_kl", "jsd"])
@pytest.mark.parametrize("options", [{}, {"gradient_checkpointing": True}])
def test_a_teacher_needs_what_torch_allocates(loss_type: str, options: dict[str, Any]) -> None:
    """Beside the student's activations those of one of its layers, and the logits of both in chunks."""
    settings = config(objective="distill", teacher="embedded", loss_type=loss_type, **options)
    shape = load_model_config(settings)
    wide = copy.deepcopy(shape)
    wide.hidden_size, wide.intermediate_size = 4 * shape.hidden_size, 4 * shape.intermediate_size
    for teacher in (shape, wide):
        counted = count_peaks(settings, empty_model(settings, shape), 8, LENGTH, teacher).highest
        real = build_model(teacher_config(settings)) if teacher is shape else LlamaForCausalLM(wide)
        assert counted == pytest.approx(allocated(settings, 8, teacher=real), rel=0.02)
    alone = count_peaks(settings, empty_model(settings, shape), 8, LENGTH).highest
    assert counted > 1.3 * alone, "control: the teacher is seen"


def test_a_recorded_teacher_needs_what_torch_allocates() -> None:
    settings = config(objective="distill", teacher_log_probs="recorded")
    counted = count_peaks(settings, empty_model(settings, load_model_config(settings)), 8, LENGTH).highest
    assert counted == pytest.approx(allocated(settings, 8), rel=0.02)


def test_the_weights_of_a_teacher_are_those_that_are_loaded() -> None:
    for precision, size in (("no", 4), ("bf16", 2)):
        settings = config(objective="distill", teacher="embedded", mixed_precision=precision)
        sizes = teacher_sizes(teacher_config(settings), load_model_config(teacher_config(settings)))
        model = build_model(teacher_config(settings))
        assert sizes["parameters"] == sum(weight.numel() for weight in model.parameters())
        assert sizes["inside"] + sizes["outside"] == sizes["parameters"] * size
        assert sizes["inside"] == size * sum(weight.numel() for weight in model.model.layers.parameters())


def test_capped_scores_are_counted_whole(tmp_path: Path) -> None:
    """Gemma 2 caps them, which plain matrix products do alone: tokens times tokens of each head."""
    from transformers import AutoModelForCausalLM

    small = AutoConfig.for_model(
        "gemma2", num_hidden_layers=2, hidden_size=64, intermediate_size=128, num_attention_heads=4, head_dim=16,
        num_key_value_heads=2, vocab_size=500, sliding_window=4096,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(small).save_pretrained(tmp_path)
    settings = config(model_name_or_path=str(tmp_path), packing=False)
    counted = count_peaks(settings, empty_model(settings, load_model_config(settings)), 8, LENGTH).highest
    assert counted == pytest.approx(allocated(settings, 8, "eager"), rel=0.02)
    shape = load_model_config(settings)
    shape.attn_logit_softcapping = None
    assert counted > 1.15 * count_peaks(settings, empty_model(settings, shape), 8, LENGTH).highest


def test_the_count_sees_checkpointing() -> None:
    """The control: a count that were the same for all would pass above if the profiler's were too."""
    shape = load_model_config(config())
    often, once = (
        count_peaks(settings, empty_model(settings, shape), 8, LENGTH).highest
        for settings in (config(), config(gradient_checkpointing=True))
    )
    assert once < 0.6 * often


def test_layers_add_up_to_the_whole_model() -> None:
    settings = config()
    shape = load_model_config(settings)
    sizes, layers = case(settings, shape, "1:1:1:1:4"), shape.num_hidden_layers
    full = count_peaks(settings, empty_model(settings, shape), 4, LENGTH)
    assert full.highest == full.full > full.later
    assert sizes["fixed"] + layers * sizes["layer"] == pytest.approx(full.full, rel=0.01)
    assert sizes["heap_fixed"] + layers * sizes["heap_layer"] == pytest.approx(full.heap, rel=0.01)


def test_a_rank_of_a_deep_layer_leaves_the_small_models_countable() -> None:
    settings = config(method="lora", lora_rank_pattern="layers.3.mlp.up_proj=64")
    assert case(settings, load_model_config(settings), "1:1:1:1:4")["layer"] > 0


@pytest.mark.parametrize("options", [{}, {"gradient_checkpointing": True}])
def test_layers_add_up_beside_a_large_vocabulary(options: dict[str, Any]) -> None:
    """Few layers need the most when gradients of the tied embedding are added, many when the head's are made."""
    settings = config(**options)
    shape = load_model_config(settings)
    shape.vocab_size, shape.hidden_size, shape.intermediate_size, shape.num_hidden_layers = 49_152, 512, 1024, 40
    head = shape.vocab_size * shape.hidden_size * 4
    two, four, full = (
        count_peaks(settings, empty_model(settings, shape, layers=layers), 2, LENGTH) for layers in (2, 4, 40)
    )
    sizes = case(settings, shape, "1:1:1:1:2")
    assert two.highest == four.highest == sizes["later"]  # control: their peaks show nothing of the layers
    assert max(sizes["fixed"] + 40 * sizes["layer"], sizes["later"]) == pytest.approx(full.highest, rel=0.01)
    assert (full.highest > 1.3 * two.highest) is not bool(options)
    # glibc maps gradients of this size by themselves; the heap has the rest.
    assert head > MAPPED
    assert sizes["heap_fixed"] + 40 * sizes["heap_layer"] == pytest.approx(full.heap, rel=0.01)
    assert full.full == pytest.approx(full.heap + 2 * head, rel=0.01)


@pytest.mark.parametrize(
    ("family", "changes", "few"),
    [
        ("llama", {}, [2, 4]),
        ("qwen3_5_text", {"full_attention_interval": 4}, [4, 8]),
        ("deepseek_v2", {"first_k_dense_replace": 3}, [4, 8]),
        ("gemma4_text", {"num_kv_shared_layers": 18}, [12, 18]),
        ("lfm2", {"num_hidden_layers": 3, "layer_types": ["conv", "conv", "full_attention"]}, [3, 3]),
    ],
)
def test_small_models_have_a_layer_of_each_kind(family: str, changes: dict[str, Any], few: list[int]) -> None:
    """Otherwise what a kind needs while it is recomputed would be taken for what each layer keeps."""
    assert _few(AutoConfig.for_model(family, **changes)) == few


@pytest.mark.parametrize("method", ["full", "lora"])
def test_experts_are_counted_in_bf16_too(method: str) -> None:
    """Their weights are fp32 under full, for which torch has no fake of the grouped product."""
    shape = AutoConfig.for_model("qwen3_moe", hidden_size=64, num_hidden_layers=4, num_experts=8, num_experts_per_tok=2,
                                 moe_intermediate_size=32, vocab_size=512)  # fmt: skip
    settings = config(method=method, mixed_precision="bf16", packing=True)
    sizes = case(settings, shape, "1:1:1:1:2")
    assert sizes["layer"] > 2 * LENGTH * 64 * 2, sizes.get("why")


def test_key_heads_may_differ_between_layers() -> None:
    """As in Gemma 4 12B, 26B and 31B; transformers refuses to read a size of the whole model then."""
    text = AutoConfig.for_model("gemma4_text", num_hidden_layers=6, num_attention_heads=16, num_key_value_heads=8,
                                num_global_key_value_heads=2, attention_k_eq_v=True)  # fmt: skip
    with pytest.raises(RuntimeError, match="may vary across layers"):
        _ = text.num_key_value_heads
    assert by_layer(text, "num_key_value_heads") == [8, 8, 8, 8, 8, 2]
    assert (key_heads(text), head_size(text)) == (7, round((5 * 256 + 512) / 6))
    plain = AutoConfig.for_model("qwen3", num_key_value_heads=4, head_dim=64)
    assert (by_layer(plain, "num_key_value_heads"), key_heads(plain), head_size(plain)) == ([4], 4, 64)


def test_weights_are_those_of_the_model() -> None:
    lora: dict[str, Any] = {"method": "lora", "mixed_precision": "bf16"}
    for options in ({}, lora, {**lora, "lora_rank_pattern": "q_proj=4,layers.3.mlp.up_proj=64"}):
        settings = config(**options)
        model = build_model(settings)
        sizes = weights(settings, empty_model(settings, load_model_config(settings)))
        trained = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
        frozen = sum(
            weight.numel() * weight.element_size() for weight in model.parameters() if not weight.requires_grad
        )
        assert sizes["trained_inside"] + sizes["trained_outside"] == trained
        assert sizes["frozen_inside"] + sizes["frozen_outside"] == frozen
        assert sizes["parameters"] == sum(weight.numel() for weight in model.parameters())


def test_tensor_parallel_leaves_half_of_the_matrices() -> None:
    settings = config()
    shape = load_model_config(settings)
    full, half = (weights(settings, empty_model(settings, shape, tp)) for tp in (1, 2))
    assert half["parameters"] == (full["parameters"] - full["vectors"]) / 2 + full["vectors"]
    assert half["vectors"] == full["vectors"]


@pytest.mark.parametrize(("family", "divides"), [("llama", True), ("nanochat", False), ("gpt2", False)])
def test_it_is_known_whether_tokens_are_divided(family: str, divides: bool) -> None:
    """Whatever numbers of ranks suit the model: two do not divide three heads."""
    heads = {"num_attention_heads": 3, "num_key_value_heads": 3, "hidden_size": 48, "num_hidden_layers": 2}
    assert _divides_tokens(config(), AutoConfig.for_model(family, vocab_size=64, **heads)) is divides


def test_four_bit_weights_are_counted_as_such() -> None:
    half, nibble = (config(method=method, mixed_precision="bf16") for method in ("lora", "qlora"))
    shape = load_model_config(half)
    halves, nibbles = (weights(settings, empty_model(settings, shape)) for settings in (half, nibble))
    assert nibbles["frozen_inside"] < 0.3 * halves["frozen_inside"]
    assert nibbles["frozen_outside"] == halves["frozen_outside"]  # embedding and head keep their dtype
