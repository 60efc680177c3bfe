"""`method=qlora`: what is quantised, to which bits, what is refused, and how it is dequantised again."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig

from tests.rounding import bound, relative, reordered
from trainers.checkpoint.export import export
from trainers.config.mistakes import ConfigError
from trainers.config.options import TrainConfig
from trainers.config.validation import build
from trainers.data.layout import AttentionMetadata
from trainers.embedded import BASE_DIR
from trainers.model.load import build_model, load_base
from trainers.model.quantization import four_bit_layers, many_threads, quantise_scales, refuse_unfit, whole_layers
from trainers.model.sizes import matmul_parameters
from trainers.objectives.loss_module import inner_model
from trainers.strategy.strategy import cannot_run, load_strategy
from trainers.tools.preflight import machine_mistakes

TINY = {
    "vocab_size": 50, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "n_layer": 2, "n_head": 2, "n_embd": 16, "head_dim": 8, "moe_intermediate_size": 24,
}  # fmt: skip


def config(**changes: Any) -> TrainConfig:
    return build({"model_name_or_path": "embedded", "dataset_name": "embedded", "method": "qlora", **changes})


@pytest.fixture(scope="module")
def model() -> Any:
    return build_model(config())


def bits(model: Any) -> list[torch.Tensor]:
    """All that a quantised model is made of, bit for bit."""
    tensors = [weight.data.view(torch.uint8) for weight in model.parameters()]
    for layer in four_bit_layers(model):
        state = layer.quant_state
        tensors += [state.absmax, state.offset, state.state2.absmax, state.state2.code]
    return tensors


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_each_linear_layer_of_a_block_holds_four_bits_per_weight(precision: str) -> None:
    model = build_model(config(mixed_precision=precision))
    dtype = torch.float32 if precision == "no" else torch.bfloat16
    layers = four_bit_layers(model)
    assert len(layers) == 7 * 4
    for layer in layers:
        assert layer.weight.numel() * layer.weight.element_size() * 2 == layer.in_features * layer.out_features
        assert layer.weight.dtype == dtype, "another dtype would not be sharded"
        assert (layer.quant_state.quant_type, layer.quant_state.blocksize) == ("nf4", 64)
        assert layer.quant_state.absmax.dtype == torch.uint8
    frozen = {weight.dtype for weight in model.parameters() if not weight.requires_grad}
    trained = {weight.dtype for name, weight in model.named_parameters() if weight.requires_grad}
    assert (frozen, trained) == ({dtype}, {torch.float32})
    assert all("lora_" in name for name, weight in model.named_parameters() if weight.requires_grad)


def test_all_but_the_linear_layers_is_as_under_lora(model: Any) -> None:
    plain = dict(build_model(config(method="lora")).named_parameters())
    quantised = {id(layer.weight) for layer in four_bit_layers(model)}
    for name, weight in model.named_parameters():
        assert id(weight) in quantised or torch.equal(weight, plain[name]), name


def test_weights_are_counted_as_what_they_stand_for(model: Any) -> None:
    plain = build_model(config(method="lora"))
    assert matmul_parameters(model) == matmul_parameters(plain)


def test_the_self_check_would_see_a_layer_that_was_left_out() -> None:
    model = build_model(config())
    head = inner_model(model).get_output_embeddings()
    assert whole_layers(model, head) == len(four_bit_layers(model)) == 28
    block = inner_model(model).model.layers[0]
    block.mlp.up_proj.base_layer = torch.nn.Linear(128, 320, bias=False).requires_grad_(False)
    assert whole_layers(model, head) == 26 != len(four_bit_layers(model))


def test_the_bits_are_the_same_on_any_number_of_threads() -> None:
    """Ranks have fewer threads than a single process, and the base is not in the checkpoints."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        one = bits(load_base(config()))
        torch.set_num_threads(4)
        assert same(one, bits(load_base(config())))
        assert torch.get_num_threads() == 4
    finally:
        torch.set_num_threads(before)


def test_the_scales_of_a_large_matrix_do_not_depend_on_threads() -> None:
    """bitsandbytes' own mean of the scales does, in half of the sizes tried."""
    from bitsandbytes.functional import quantize_4bit

    scales = torch.rand(262_144, generator=torch.Generator().manual_seed(0))
    before, seen = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3, 7):
            torch.set_num_threads(threads)
            state = quantize_4bit(torch.zeros(64, 64), quant_type="nf4")[1]
            state.absmax = scales.clone()
            quantise_scales(state)
            seen.append([state.absmax, state.offset, state.state2.absmax])
    finally:
        torch.set_num_threads(before)
    assert all(same(seen[0], one) for one in seen[1:])
    assert float(seen[0][1]) == pytest.approx(float(np.float32(scales.numpy().astype(np.float64).mean())))


def test_threads_are_given_back() -> None:
    before = torch.get_num_threads()
    with pytest.raises(OSError, match="unreadable"), many_threads():
        raise OSError("unreadable")
    assert torch.get_num_threads() == before


def test_the_bits_are_those_of_stock_transformers_but_for_the_mean_of_the_scales() -> None:
    from transformers import BitsAndBytesConfig

    settings = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_quant_storage="float32"
    )
    stock = AutoModelForCausalLM.from_pretrained(BASE_DIR, dtype=torch.float32, quantization_config=settings)
    for mine, theirs in zip(four_bit_layers(load_base(config())), four_bit_layers(stock), strict=True):
        assert torch.equal(mine.weight.view(torch.uint8), theirs.weight.view(torch.uint8))
        assert torch.equal(mine.quant_state.absmax, theirs.quant_state.absmax)
        assert float(mine.quant_state.offset) == pytest.approx(float(theirs.quant_state.offset), rel=1e-6)


def logits(model: Any) -> torch.Tensor:
    ids = torch.arange(40)[None]
    return model(input_ids=ids, position_ids=ids, attention_metadata=AttentionMetadata()).logits


def test_evaluation_neither_repacks_nor_computes_otherwise(model: Any) -> None:
    """bitsandbytes has a bf16 kernel for evaluation on some CPUs, which packs the weights in place."""
    before = [tensor.clone() for tensor in bits(model)]
    with torch.no_grad():
        evaluated = logits(model.eval())
    assert same(before, bits(model))
    assert torch.equal(evaluated, logits(model.train()))


@torch.no_grad()
def test_under_autocast_a_layer_gives_the_dtype_that_a_plain_one_gives() -> None:
    """bitsandbytes alone would give back the dtype of the input, and so another rule than LoRA's."""
    (layer, *_), hidden = four_bit_layers(load_base(config(mixed_precision="bf16"))), torch.randn(3, 128)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer(hidden).dtype == torch.nn.Linear(128, 4)(hidden).dtype == torch.bfloat16
        assert type(layer).forward(layer, hidden).dtype == torch.float32


def disturb(model: Any) -> None:
    """Adapters that do something."""
    generator = torch.Generator().manual_seed(0)
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            weight.data = torch.randn(weight.shape, generator=generator) * 0.05


@torch.no_grad()
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_merged_weights_are_the_dequantised_ones_and_the_adapters_in_fp32(tmp_path: Path, precision: str) -> None:
    from bitsandbytes.functional import dequantize_4bit

    choice = config(mixed_precision=precision, merge_adapter=True)
    model: Any = build_model(choice)
    disturb(model)
    wanted = {
        name.removeprefix("base_model.model."): dequantize_4bit(
            part.base_layer.weight, part.base_layer.quant_state
        ).float()
        + part.get_delta_weight("default")
        for name, part in model.named_modules()
        if hasattr(part, "get_delta_weight")
    }
    export(lambda _: model, choice, tmp_path / "model", "merged", {})
    saved = load_file(tmp_path / "model" / "model.safetensors")
    assert len(wanted) == 28
    assert all(torch.allclose(saved[f"{name}.weight"], one, rtol=0, atol=1e-6) for name, one in wanted.items())
    assert {weight.dtype for weight in saved.values()} == {torch.float32}


@torch.no_grad()
def test_merged_weights_give_the_same_logits(tmp_path: Path) -> None:
    """Within rounding; merged into four bits, as peft does it, they are far beyond it."""
    choice = config(merge_adapter=True)
    model: Any = build_model(choice)
    disturb(model)
    wanted = logits(model)
    with reordered("backwards"):
        limit = bound(relative(logits(model), wanted))
    export(lambda _: model, choice, tmp_path / "model", "merged", {})
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    assert not hasattr(merged.config, "quantization_config")
    assert relative(logits(merged), wanted) <= limit
    model = build_model(choice)
    disturb(model)
    with pytest.warns(UserWarning, match="Merge lora module to 4-bit"):
        requantised = model.merge_and_unload()
    assert relative(logits(requantised), wanted) > 10 * limit


@pytest.mark.parametrize(
    ("family", "kinds"), [("gpt2", "Conv1D"), ("mixtral", "MixtralExperts"), ("qwen3_moe", "Qwen3MoeExperts")]
)
def test_what_would_stay_unquantised_is_refused(family: str, kinds: str) -> None:
    shape = AutoConfig.for_model(family, **TINY)
    with pytest.raises(
        ConfigError, match=rf"method=qlora: \d\d% of the weights of {family} are in .*{kinds}.*use method"
    ):
        refuse_unfit(shape, False)


@pytest.mark.parametrize("family", ["llama", "gpt_neox", "qwen3", "gemma2", "phi3"])
def test_models_of_linear_layers_pass(family: str) -> None:
    refuse_unfit(AutoConfig.for_model(family, **TINY, pad_token_id=0), False)


def test_a_layer_that_nf4_does_not_fit_is_refused() -> None:
    with pytest.raises(ConfigError, match="a linear layer of 16 x 25, which nf4 does not support"):
        refuse_unfit(AutoConfig.for_model("llama", **{**TINY, "intermediate_size": 25}), False)


def test_a_quantised_base_is_refused(tmp_path: Path) -> None:
    load_base(config()).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"already quantized \(.*\) and cannot be trained with method=qlora; use"):
        load_base(config(model_name_or_path=str(tmp_path)))


def test_random_weights_are_not_quantised() -> None:
    with pytest.raises(ConfigError, match="no pretrained weights to quantize; use method=full"):
        config(random_init=True)


def test_bitsandbytes_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert machine_mistakes(config(), has_gpu=False) == []
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    (mistake,) = machine_mistakes(config(), has_gpu=False)
    assert 'pip install "tunesmith[quant]"' in mistake.remedy
    assert machine_mistakes(config(method="lora"), has_gpu=False) == []


@pytest.mark.parametrize(
    ("name", "fits"),
    [("single", 1), ("ddp", 1), ("fsdp2", 1), ("hsdp", 1), ("zero1", 1), ("zero2", 1), ("fsdp1", 0), ("zero3", 0)],
)
def test_strategies_that_would_break_the_bits_are_refused(name: str, fits: int) -> None:
    reason = cannot_run(load_strategy(name), "qlora", has_gpu=False)
    assert (reason is None) is bool(fits)
    assert reason is None or reason.startswith("method=qlora: ")
    assert cannot_run(load_strategy(name), "lora", has_gpu=False) is None


def test_an_adapter_is_loaded_back_in_its_own_dtype_on_a_cpu_with_bf16_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check of an export would otherwise compute in bf16 there, and call the export another model."""
    monkeypatch.setattr("bitsandbytes.nn.modules.has_avx512bf16", lambda: True)
    choice = config()
    model: Any = build_model(choice)
    disturb(model)
    assert not export(lambda _: model, choice, tmp_path / "model", "adapter", {}).failed


def test_why_eight_bits_are_not_offered() -> None:
    """An outlier in one row changes what LLM.int8 computes for the others, which is not so in 4 bits."""

    def others_change(**bits: bool) -> bool:
        model: Any = AutoModelForCausalLM.from_pretrained(
            BASE_DIR, quantization_config=BitsAndBytesConfig(**bits), device_map={"": "cpu"}, dtype=torch.float32
        )
        layer = model.model.layers[0].self_attn.q_proj
        rows = torch.randn(4, 128, generator=torch.Generator().manual_seed(0))
        with_outlier = rows.clone()
        with_outlier[3, 5] = 20.0
        with torch.no_grad():
            return not torch.allclose(layer(with_outlier)[:3], layer(rows)[:3], atol=1e-5)

    assert others_change(load_in_8bit=True)
    assert not others_change(load_in_4bit=True)
