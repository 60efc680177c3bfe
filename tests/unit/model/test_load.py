"""What is refused before it could train something else: models that see the future, adapters that fit nothing."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

from tests.families import config_for, save_small
from tests.rounding import bound, relative, reordered
from trainers.config.mistakes import ConfigError
from trainers.config.options import TrainConfig
from trainers.config.validation import build, ignored_choices
from trainers.data.layout import AttentionMetadata, DocumentLayout
from trainers.embedded import BASE_DIR
from trainers.model.attention import KERNELS
from trainers.model.config_checks import check_rows, check_values, refuse_other_tasks
from trainers.model.load import build_model, load_base
from trainers.model.lora import add_adapters
from trainers.model.probe import check_model_computes, own_attention
from trainers.objectives.loss_module import LossModule
from trainers.objectives.sft import linear_cross_entropy
from trainers.parallel.backend import unsplit_numel

TINY = {
    "vocab_size": 50, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "n_layer": 2, "n_head": 2, "n_embd": 16, "n_positions": 32, "max_position_embeddings": 32,
    "d_model": 16, "ffn_dim": 24, "num_layers": 2, "attention_heads": 2, "rotary_dim": 4, "n_ctx": 32,
}  # fmt: skip


def tiny(family: str) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **TINY)
    return AutoModelForCausalLM.from_config(config, attn_implementation=KERNELS["sdpa"])


def config(**changes: Any) -> TrainConfig:
    return build({"model_name_or_path": "embedded", "dataset_name": "embedded", **changes})


def probe(base: Any, packing: bool) -> None:
    check_model_computes(LossModule(base), base, packing, torch.device("cpu"), torch.float32)


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox", "qwen3", "mixtral"])
def test_models_that_use_our_attention_pass(family: str, packing: bool) -> None:
    probe(tiny(family), packing)


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("family", ["bloom", "xglm"])
def test_models_that_would_train_on_the_future_are_refused(family: str, packing: bool) -> None:
    """They never ask for the attention they are given, and run without any mask."""
    base = tiny(family)
    with pytest.raises(ConfigError, match=r"see later tokens.*through their own attention or layers"):
        check_model_computes(LossModule(base), base, packing, torch.device("cpu"), torch.float32, stock=False)


def seeing(folder: Path) -> str:
    """A tiny model with a vision tower beside its text decoder, saved."""
    text = {name: value for name, value in TINY.items() if name in ("vocab_size", "hidden_size", "intermediate_size")}
    text |= {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    vision = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"image_size": 28, "patch_size": 14}
    shape = AutoConfig.for_model("gemma3", text_config=text, vision_config=vision, mm_tokens_per_image=4)
    AutoModelForCausalLM.from_config(shape).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("method", ["full", "lora"])
def test_what_text_does_not_reach_is_never_trained(method: str, tmp_path: Path) -> None:
    """Its weights would get no gradient, which DDP waits for in vain; an adapter there would do nothing."""
    model = build_model(config(model_name_or_path=seeing(tmp_path), method=method))
    trained = [name for name, weight in model.named_parameters() if weight.requires_grad]
    assert any("language_model" in name for name in trained)
    assert not [name for name in trained if "vision" in name or "projector" in name]


@pytest.mark.parametrize("family", ["llava", "qwen3_vl"])
def test_a_model_of_images_and_text_is_a_language_model(family: str) -> None:
    refuse_other_tasks(config(), AutoConfig.for_model(family))


@pytest.mark.parametrize("family", ["shieldgemma2", "pi0", "florence2", "diffusion_gemma"])
def test_a_model_of_images_and_text_with_another_task_is_refused(family: str) -> None:
    with pytest.raises(ConfigError, match=f"{family} models are not causal language models"):
        refuse_other_tasks(config(), AutoConfig.for_model(family))


@pytest.mark.parametrize(
    ("length", "packing", "refusal"),
    [
        (8191, True, ""),
        (8192, False, ""),
        (8192, True, "max_length=8192 with llama4_text models, whose queries are scaled .* at most 8191, or packing"),
        (
            8193,
            False,
            "max_length=8193 with llama4_text models, whose layers attend in chunks of 8192, .* at most 8192",
        ),
    ],
)
def test_rows_beyond_a_chunk_of_attention_are_refused(length: int, packing: bool, refusal: str) -> None:
    longer = config(max_length=length, packing=packing)
    with pytest.raises(ConfigError, match=refusal) if refusal else nullcontext():
        check_rows(longer, AutoConfig.for_model("llama4_text"))
    check_rows(longer, AutoConfig.for_model("llama"))


def test_a_model_that_builds_its_own_mask_is_refused() -> None:
    model = tiny("llama")
    arguments = {"attention_mask": torch.ones(1, 1, 4, 4), "attention_metadata": AttentionMetadata()}
    with pytest.raises(ValueError, match="its own attention mask"):
        model(input_ids=torch.ones(1, 4, dtype=torch.int64), **arguments)


@pytest.mark.parametrize("targets", [["nothing"], ["q_proj", "k_porj"]])
def test_an_adapter_target_that_fits_nothing_is_named(targets: list[str]) -> None:
    wrong = config(lora_target_modules=targets)
    with pytest.raises(ConfigError, match=rf"lora_target_modules={targets[-1]} matches no module .* some of .*q_proj"):
        add_adapters(load_base(wrong), wrong)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (
            {"lora_rank_pattern": "q_proj=4,k_porj=8"},
            r"lora_rank_pattern=k_porj=8 matches no module .* some of .*k_proj",
        ),
        (
            {"lora_target_modules": "q_proj", "lora_alpha_pattern": "v_proj=8"},
            r"lora_alpha_pattern=v_proj=8 matches no module that has an adapter; name some of q_proj",
        ),
        (
            {"lora_rank_pattern": r"q_proj=4,layers\.0.*=8"},
            r": q_proj and layers\\.0\.\* both match model\.layers\.0\.self_attn\.q_proj",
        ),
    ],
)
def test_patterns_that_are_unclear_are_refused(changes: dict[str, Any], line: str) -> None:
    wrong = config(method="lora", **changes)
    with pytest.raises(ConfigError, match=line):
        add_adapters(load_base(wrong), wrong)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"modules_to_save": "lm_haed"}, "modules_to_save=lm_haed matches no module of"),
        (
            {"modules_to_save": "norm"},
            r"modules_to_save=norm: peft compares ends of names, and would train",
        ),
        ({"modules_to_save": "mlp"}, r"modules_to_save=mlp: model\.layers\.0\.mlp is no single layer with weights"),
        ({"modules_to_save": "embed_tokens"}, "modules_to_save=embed_tokens: embedding and output head are one weight"),
        ({"modules_to_save": "lm_head"}, "modules_to_save=lm_head: embedding and output head are one weight"),
        (
            {"modules_to_save": "q_proj", "lora_target_modules": "q_proj,k_proj"},
            "modules_to_save=q_proj is in lora_target_modules too",
        ),
    ],
)
def test_modules_that_cannot_be_saved_with_adapters_are_refused(changes: dict[str, Any], line: str) -> None:
    wrong = config(method="lora", **changes)
    with pytest.raises(ConfigError, match=line):
        add_adapters(load_base(wrong), wrong)


def test_a_module_that_is_saved_gets_no_adapter() -> None:
    wanted = config(method="lora", modules_to_save="model.norm,layers.0.self_attn.q_proj")
    model = add_adapters(load_base(wanted), wanted)
    trained = {name for name, weight in model.named_parameters() if weight.requires_grad and "lora_" not in name}
    assert {name.rpartition(".modules_to_save")[0].removeprefix("base_model.model.model.") for name in trained} == {
        "norm",
        "layers.0.self_attn.q_proj",
    }
    assert not [name for name, _ in model.named_parameters() if "layers.0.self_attn.q_proj" in name and "lora_" in name]


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"lora_r": 400}, "lora_r=400 is more than the 128 singular vectors of model.layers.0.self_attn.q_proj"),
        ({"lora_target_modules": "embed_tokens,q_proj"}, "lora_target_modules=embed_tokens is an embedding, whose"),
    ],
)
def test_adapters_that_cannot_begin_as_singular_vectors_are_refused(changes: dict[str, Any], line: str) -> None:
    wrong = config(method="lora", init_lora_weights="pissa", **changes)
    with pytest.raises(ConfigError, match=line):
        add_adapters(load_base(wrong), wrong)


def test_dora_on_stacked_experts_is_refused(tmp_path: Path) -> None:
    wrong = config_for(
        save_small(tmp_path, "mixtral"), method="lora", use_dora=True, lora_target_modules="w1,w2,w3", packing=False
    )
    with pytest.raises(ConfigError, match="use_dora=true: peft cannot add it to"):
        add_adapters(load_base(wrong), wrong)


@pytest.mark.parametrize(("family", "adapted"), [("falcon", True), ("deepseek_v4", False)])
def test_a_linear_layer_of_its_own_is_adapted_if_its_product_is_plain(
    family: str, adapted: bool, tmp_path: Path
) -> None:
    """Falcon's adds the bias itself; one of DeepSeek-V4's is grouped."""
    run = config_for(save_small(tmp_path, family), method="lora", packing=False)
    base = load_base(run)
    own = [name for name, part in base.named_modules()
           if isinstance(part, torch.nn.Linear) and type(part).forward is not torch.nn.Linear.forward
           and type(part).__name__ != "DeepseekV4TopKRouter"]  # fmt: skip
    targeted = add_adapters(base, run).targeted_module_names
    assert own
    assert all((name in targeted) == adapted for name in own)


@pytest.mark.parametrize(
    ("family", "left_out"),
    [
        ("jamba", "mamba.dt_proj"),  # only its weight is used
        ("glm4v_moe", "visual.patch_embed.proj"),  # a convolution, with the end of a linear layer's name
        ("qwen3_omni_moe_thinker", "audio_tower.layers.0"),
        ("ernie4_5_vl_moe", "vision_moe.experts"),
    ],
)
def test_text_reaches_every_adapter(family: str, left_out: str, tmp_path: Path) -> None:
    """DDP would wait for the gradients of others, and they would change nothing."""
    stacks = ["experts.down_proj"] if "vision_moe" in left_out else []
    run = config_for(save_small(tmp_path, family), method="lora", lora_target_parameters=stacks, packing=False)
    base = load_base(run)
    parts = [name for name, part in base.named_modules() if name.endswith(left_out)]
    model: Any = add_adapters(base, run)
    ids = torch.arange(1, 100)[None]
    with own_attention(base):
        model(input_ids=ids, use_cache=False).logits.sum().backward()
    adapters = {name: weight for name, weight in model.named_parameters() if "lora_" in name}
    assert parts
    assert adapters
    assert [name for name, weight in adapters.items() if weight.grad is None] == []
    assert not [name for name in adapters if left_out in name]


def test_a_layer_that_is_never_called_is_no_target(tmp_path: Path) -> None:
    wrong = config_for(save_small(tmp_path, "mamba"), method="lora", lora_target_modules="dt_proj", packing=False)
    with pytest.raises(ConfigError, match=r"lora_target_modules=dt_proj matches no module.*some of in_proj, .*x_proj$"):
        add_adapters(load_base(wrong), wrong)


def test_merging_into_tied_embeddings_is_refused() -> None:
    wrong = config(lora_target_modules=["q_proj", "lm_head"], merge_adapter=True)
    with pytest.raises(ConfigError, match="tied embeddings"):
        add_adapters(load_base(wrong), wrong)


def test_the_embedded_base_is_loaded_whole() -> None:
    ours, stock = load_base(config()), AutoModelForCausalLM.from_pretrained(BASE_DIR)
    for (name, mine), other in zip(ours.named_parameters(), stock.parameters(), strict=True):
        assert torch.equal(mine, other), name


def test_random_weights_are_the_seeds() -> None:
    first, again, other = (
        load_base(config(random_init=True, method="full", seed=seed)).get_input_embeddings().weight
        for seed in (1, 1, 2)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_a_bf16_gradient_is_scaled_exactly() -> None:
    """1 / 1234 rounded to bf16 would scale every gradient of the step by 0.998."""
    torch.manual_seed(0)
    hidden = torch.randn(64, 32, dtype=torch.bfloat16, requires_grad=True)
    weight, labels = torch.randn(100, 32), torch.randint(0, 100, (64,))
    (whole,) = torch.autograd.grad(linear_cross_entropy(hidden, weight, None, labels)[0], hidden)
    (scaled,) = torch.autograd.grad(linear_cross_entropy(hidden, weight, None, labels)[0] / 1234, hidden)
    ratio = (scaled.double() * 1234).norm() / whole.double().norm()
    assert abs(ratio - 1) < 2e-4


def adapted(casts: bool) -> tuple[int, list[torch.Tensor]]:
    """Bytes kept for the backward pass of a micro-batch in bf16, and the adapters' gradients."""
    loss = LossModule(
        build_model(config(method="lora", lora_dropout=0.0, mixed_precision="bf16")), torch.bfloat16
    ).train()
    made = torch.Generator().manual_seed(1)
    layers = [one for one in loss.model.modules() if hasattr(one, "lora_B")]
    for layer in layers:
        layer.cast_input_dtype_enabled = casts or layer.cast_input_dtype_enabled
        weight = layer.lora_B["default"].weight
        weight.data = torch.randn(weight.shape, generator=made)  # zeros would leave A without a gradient
    assert layers
    kept, held = dict[int, int](), {one.untyped_storage().data_ptr() for one in loss.parameters()}

    def keep(one: torch.Tensor) -> torch.Tensor:
        kept[one.untyped_storage().data_ptr()] = one.untyped_storage().nbytes()
        return one

    place = torch.arange(24)[None]
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda one: one):
        found = loss(place, place, None, torch.arange(23), place[0, 1:])[0]
    weights = [one for one in loss.parameters() if one.requires_grad]
    return sum(size for one, size in kept.items() if one not in held), list(torch.autograd.grad(found, weights))


def test_adapters_take_their_inputs_as_autocast_does() -> None:
    """peft would make an fp32 copy of each first, which the products never see."""
    (less, found), (more, expected) = adapted(casts=False), adapted(casts=True)
    assert less < 0.95 * more
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


class Products(TorchDispatchMode):
    """Counts matrix products."""

    count = 0

    def __torch_dispatch__(self, operation: Any, types: Any, inputs: Any = (), options: Any = None) -> Any:
        self.count += operation.name().split(".")[0] in ("aten::mm", "aten::addmm", "aten::bmm")
        return operation(*inputs, **(options or {}))


def gradients_and_products(**changes: Any) -> tuple[dict[str, torch.Tensor], int]:
    """Of one pass forward and back of the embedded model."""
    loss = LossModule(build_model(config(method="full", **changes))).train()
    place = torch.arange(12)[None]
    with Products() as products:
        total, _ = loss(place + 5, place, None, place[0, :-1], place[0, 1:] + 5)
        total.backward()
    return {name: weight.grad for name, weight in loss.model.named_parameters() if weight.grad is not None}, (
        products.count
    )


def compiled_gradients(order: str | None = None, **changes: Any) -> torch.Tensor:
    """Of a packed row through blocks that are compiled, in one graph for all of them.

    Args:
        order: of sums, for a control that is not compiled.
    """
    settings = config(method="full", attn_implementation="sdpa", **changes)
    loss = LossModule(build_model(settings)).train()
    loss.base.set_attn_implementation(KERNELS["sdpa"])
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    for block in loss.base.get_decoder().layers if settings.torch_compile else ():
        block.compile(backend="aot_eager")
    words, places = torch.arange(64)[None] + 5, torch.cat([torch.arange(30), torch.arange(34)])[None]
    layout = DocumentLayout.of(np.array([0, 30, 64]), 1)
    with reordered(order):
        loss(words, places, layout, torch.arange(60), words[0, 1:61])[0].backward()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == settings.torch_compile
    assert not torch._dynamo.utils.counters["graph_break"]
    return torch.cat([one.grad.flatten() for one in loss.parameters() if one.grad is not None])


def test_packed_blocks_that_are_checkpointed_compile_whole() -> None:
    plain = compiled_gradients()
    limit = bound(relative(compiled_gradients("backwards"), plain))
    for changes in ({}, {"gradient_checkpointing": True},
                    {"gradient_checkpointing": True, "selective_checkpointing": True}):  # fmt: skip
        assert relative(compiled_gradients(torch_compile=True, **changes), plain) <= limit


def test_selective_checkpointing_alone_is_told_to_be_idle() -> None:
    ignored = ignored_choices(config(selective_checkpointing=True))
    (mistake,) = [mistake for mistake in ignored if "selective" in mistake.option]
    assert str(mistake) == "selective_checkpointing is ignored: gradient_checkpointing is off"
    both = config(selective_checkpointing=True, gradient_checkpointing=True)
    assert not [mistake for mistake in ignored_choices(both) if "checkpointing" in mistake.option]


def test_selective_checkpointing_repeats_no_matrix_product() -> None:
    plain, products = gradients_and_products()
    kept, kept_products = gradients_and_products(gradient_checkpointing=True, selective_checkpointing=True)
    whole, all_products = gradients_and_products(gradient_checkpointing=True)
    assert kept_products == products
    assert all_products > products, "control: without it they are repeated"
    for name, gradient in plain.items():
        assert torch.equal(gradient, kept[name])
        assert torch.equal(gradient, whole[name])


def test_what_waits_elsewhere_for_the_backward_pass_is_one_tensor_a_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """And what comes back gives the same gradients; nothing is kept of what lies after the layers."""
    kept: list[torch.Size] = []

    def elsewhere(pin_memory: bool) -> Any:
        assert not pin_memory  # on a CPU
        return torch.autograd.graph.saved_tensors_hooks(
            lambda one: (kept.append(one.shape), one.clone())[1], torch.clone
        )

    monkeypatch.setattr(torch.autograd.graph, "save_on_cpu", elsewhere)
    gradients = {}
    for offloads in (False, True):
        loss = LossModule(build_model(config(method="full", gradient_checkpointing=True)), offloads=offloads).train()
        place = torch.arange(12)[None]
        loss(place + 5, place, None, place[0, :-1], place[0, 1:] + 5)[0].backward()
        gradients[offloads] = {name: weight.grad for name, weight in loss.model.named_parameters()}
        layers = loss.base.config.num_hidden_layers
        assert kept.count(torch.Size([1, 12, loss.base.config.hidden_size])) >= (layers if offloads else 0)
        assert len(kept) < 3 * layers + 10  # the layers' insides are computed again, and not kept
        assert bool(kept) == offloads
    assert all(torch.equal(one, gradients[True][name]) for name, one in gradients[False].items())


@pytest.mark.parametrize("family", ["gemma4_text", "dots3_note", "glm5_next", "gpt2", "llama"])
def test_sizes_are_checked_whether_or_not_they_differ_between_layers(family: str) -> None:
    model_config = AutoConfig.for_model(family)
    check_values(model_config)
    model_config.get_text_config().hidden_size = 0
    with pytest.raises(ValueError, match="hidden_size=0 is not between 1 and"):
        check_values(model_config)


def test_tensor_parallelism_splits_no_vision_tower(tmp_path: Path) -> None:
    """So the start does not count it among the weights of which each rank is to hold its share."""
    model = build_model(config_for(save_small(tmp_path, "mistral3")))
    loss, split = SimpleNamespace(base=model), SimpleNamespace()
    outside = [weight for name, weight in model.named_parameters() if "vision" in name or "projector" in name]
    counted = unsplit_numel(loss, split)  # type: ignore[arg-type]
    assert counted == sum(weight.numel() for weight in outside) > 0
    assert unsplit_numel(loss, None) == 0
    assert unsplit_numel(SimpleNamespace(base=tiny("llama")), split) == 0  # type: ignore[arg-type]
