"""Weights that are left in their files are those that loading the model whole gives, bit for bit."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, modeling_utils
from transformers.core_model_loading import WeightConverter

from tests.unit.model.test_load import TINY, config, seeing
from trainers.checkpoint.weights import base_digest
from trainers.config.mistakes import ConfigError
from trainers.model import stored as module
from trainers.model.load import build_model, build_unread
from trainers.model.principal import PREFIX, adapted, begin_principal, leave_residual, principal_factors
from trainers.model.stored import ConvertedTensor, Source, StoredTensor, replace, tensors_in
from trainers.run.errors import TrainingError

EXPERTS = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}


def saved(family: str, folder: Path, **changes: Any) -> str:
    """A tiny model of random weights."""
    torch.manual_seed(0)
    shape = AutoConfig.for_model(family, **{**TINY, **EXPERTS, **changes})
    AutoModelForCausalLM.from_config(shape).save_pretrained(folder)
    return str(folder)


def rewritten(folder: Path, **changes: torch.Tensor | None) -> None:
    """Replaces tensors in the file of a model; None removes one."""
    file = folder / "model.safetensors"
    tensors: dict[str, Any] = load_file(file) | changes
    save_file({name: one for name, one in tensors.items() if one is not None}, file, {"format": "pt"})


def fill(model: nn.Module, sources: dict[str, Source]) -> nn.Module:
    """Reads every weight that is on the meta device, in full."""
    for name, weight in list(model.named_parameters()):
        if weight.is_meta:
            whole = torch.empty(weight.shape, dtype=weight.dtype)
            sources[name].read(whole, tuple(slice(0, size) for size in weight.shape))
            replace(weight, nn.Parameter(whole, weight.requires_grad))
    return model


def state(model: nn.Module) -> dict[str, torch.Tensor]:
    """Weights under each of their names, and all buffers."""
    return {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}


def assert_same(one: nn.Module, other: nn.Module) -> None:
    first, second = state(one), state(other)
    assert list(first) == list(second)
    for name, tensor in first.items():
        assert tensor.dtype == second[name].dtype, name
        assert tensor.requires_grad == second[name].requires_grad, name
        assert torch.equal(tensor, second[name]), name
    assert len(list(one.parameters())) == len(list(other.parameters())), "what is tied stays tied"
    assert [part.training for part in one.modules()] == [part.training for part in other.modules()]


@pytest.mark.parametrize(("method", "precision"), [("full", "no"), ("full", "bf16"), ("lora", "bf16")])
@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3_moe", "gpt_oss", "gemma3"])
def test_what_is_read_later_is_what_is_loaded(family: str, method: str, precision: str, tmp_path: Path) -> None:
    path = seeing(tmp_path) if family == "gemma3" else saved(family, tmp_path)
    chosen = config(model_name_or_path=path, method=method, mixed_precision=precision, packing=family != "gpt_oss")
    whole = build_model(chosen)
    drawn = torch.get_rng_state()
    model, sources = build_unread(chosen)
    assert method == "full" or torch.equal(drawn, torch.get_rng_state())
    left = [name for name, weight in model.named_parameters() if weight.is_meta]
    assert left == [name for name, _ in model.named_parameters() if "lora_" not in name]
    assert any(isinstance(source, ConvertedTensor) for source in sources.values()) == (family == "qwen3_moe")
    assert base_digest(model, sources) == base_digest(whole)
    assert_same(fill(model, sources), whole)


def test_experts_are_read_without_the_others_of_their_stack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One at a time, of files that have each expert by itself. Control: for the full weight, all are read."""
    monkeypatch.setattr(module, "CHUNK", 1)
    _, sources = build_unread(config(model_name_or_path=saved("qwen3_moe", tmp_path), method="full"))
    stacks = [source for source in sources.values() if isinstance(source, ConvertedTensor)]
    assert len(stacks) >= 2
    read, plain = set[str](), StoredTensor.read

    def seen(place: StoredTensor, *args: Any) -> None:
        read.add(place.name.split(".experts.")[1].split(".")[0])
        plain(place, *args)

    monkeypatch.setattr(StoredTensor, "read", seen)
    for source in stacks:
        full = source.mapped()
        assert read == {str(expert) for expert in range(len(full))}
        read.clear()
        part = (slice(1, 3), slice(0, full.shape[1] // 2), slice(0, full.shape[2]))
        into = torch.empty(full[part].shape)
        source.read(into, part)
        assert torch.equal(into, full[part])
        assert read == {"1", "2"}
        read.clear()


def test_nothing_is_read_before_it_is_asked_for(tmp_path: Path) -> None:
    path = saved("llama", tmp_path, tie_word_embeddings=False)
    model, sources = build_unread(config(model_name_or_path=path, method="full"))
    other = torch.full_like(load_file(tmp_path / "model.safetensors")["lm_head.weight"], 7.0)
    rewritten(tmp_path, **{"lm_head.weight": other})
    assert torch.equal(dict(fill(model, sources).named_parameters())["lm_head.weight"], other)


def test_transformers_is_as_before_afterwards() -> None:
    before = modeling_utils.safe_open, WeightConverter.convert
    build_unread(config())
    assert (modeling_utils.safe_open, WeightConverter.convert) == before


def test_what_cannot_be_read_in_parts_is_loaded_whole() -> None:
    model, sources = build_unread(config(random_init=True, method="full"))
    assert not sources
    assert not [name for name, weight in model.named_parameters() if weight.is_meta]


def test_missing_weights_are_refused_and_never_made_up(tmp_path: Path) -> None:
    path = saved("llama", tmp_path)
    rewritten(tmp_path, **{"model.norm.weight": None})
    with pytest.raises(ConfigError, match=r"not in its files: model\.norm\.weight"):
        build_unread(config(model_name_or_path=path))


@pytest.mark.parametrize("same", [True, False])
def test_a_tied_weight_that_the_file_has_twice(same: bool, tmp_path: Path) -> None:
    path = saved("llama", tmp_path, tie_word_embeddings=True)
    embedding = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]
    rewritten(tmp_path, **{"lm_head.weight": embedding.clone() if same else embedding + 1})
    chosen = config(model_name_or_path=path, method="full")
    model: Any = fill(*build_unread(chosen))
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == same
    assert_same(model, build_model(chosen))


@pytest.mark.parametrize("chunk", [64, 2**25])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_rectangle_is_read(dtype: torch.dtype, chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK", chunk)
    tensors = {str(ndim): torch.randn(tuple(range(5, 5 + ndim))).bfloat16() for ndim in range(4)}
    save_file(tensors, tmp_path / "file.safetensors")
    for name, place in tensors_in(tmp_path / "file.safetensors").items():
        for start, stop in ((0, 5), (1, 4), (2, 3), (3, 3)):
            part = tuple(slice(start, stop) for _ in place.shape)
            into = torch.empty(tensors[name][part].shape, dtype=dtype)
            place.read(into, part)
            assert torch.equal(into, tensors[name][part].to(dtype))


def test_a_part_costs_its_bytes_and_no_more(tmp_path: Path) -> None:
    save_file({"weight": torch.randn(1024, 1024)}, tmp_path / "file.safetensors")
    place, process = tensors_in(tmp_path / "file.safetensors")["weight"], psutil.Process()
    into, before = torch.empty(256, 1024), process.io_counters().read_chars
    place.read(into, (slice(512, 768), slice(0, 1024)))
    read = process.io_counters().read_chars - before
    assert into.nbytes <= read < into.nbytes + 2**15


def test_a_file_that_shrinks_is_named(tmp_path: Path) -> None:
    file = tmp_path / "file.safetensors"
    save_file({"weight": torch.randn(64, 64)}, file)
    place = tensors_in(file)["weight"]
    assert isinstance(place, StoredTensor)
    os.truncate(file, file.stat().st_size - 1)
    with pytest.raises(TrainingError, match=r"file\.safetensors ended while weight was read"):
        place.read(torch.empty(64, 64))


def test_several_files(tmp_path: Path) -> None:
    torch.manual_seed(0)
    shape = AutoConfig.for_model("llama", **TINY)
    AutoModelForCausalLM.from_config(shape).save_pretrained(tmp_path, max_shard_size="4KB")
    assert len(set(json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"].values())) > 2
    chosen = config(model_name_or_path=str(tmp_path), method="full")
    assert_same(fill(*build_unread(chosen)), build_model(chosen))


DERIVED: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"use_dora": True}),
    ("llama", {"use_dora": True, "mixed_precision": "bf16"}),
    ("llama", {"use_dora": True, "lora_target_modules": "embed_tokens,q_proj"}),
    ("gpt2", {"use_dora": True}),
    ("llama", {"modules_to_save": "embed_tokens,lm_head,model.norm"}),
]


@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_first_adapters_and_residuals_are_those_of_peft(family: str, precision: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"lora_r": 4, "lora_rank_pattern": {"c_attn" if family == "gpt2" else "q_proj": 2}}
    path = saved(family, tmp_path, tie_word_embeddings=False)
    settings = config(
        model_name_or_path=path, method="lora", init_lora_weights="pissa", mixed_precision=precision, **options
    )
    base = AutoModelForCausalLM.from_pretrained(path)
    peft_config = LoraConfig(r=4, lora_alpha=32, target_modules="all-linear", init_lora_weights="pissa",
                             rank_pattern=options["lora_rank_pattern"])  # fmt: skip
    expected = dict(get_peft_model(base, peft_config).named_parameters())
    for model, sources in (build_unread(settings), (build_model(settings), {})):
        factors: dict[str, torch.Tensor] = {}
        for part in adapted(model):
            names = (f"{PREFIX}{part.name}.{key}" for key in ("lora_A", "lora_B"))
            factors |= zip(names, principal_factors(part, sources), strict=True)
        begin_principal(model, factors)
        leave_residual(model, sources, factors)
        half = {"rtol": 0, "atol": 1e-3} if precision == "bf16" else {"rtol": 1e-5, "atol": 1e-6}
        for part in adapted(model):
            if part.weight.is_meta and min(part.weight.shape) > 6:
                piece = torch.empty(5, 3)
                sources[part.stored].read(piece, (slice(1, 6), slice(2, 5)))
                torch.testing.assert_close(piece, expected[part.stored][1:6, 2:5].detach(), **half)
        weights = dict(fill(model, sources).named_parameters())
        products = {part.name: part.layer.lora_B["default"].weight @ part.layer.lora_A["default"].weight
                    for part in adapted(model)}  # fmt: skip
        for name, product in products.items():
            stock = expected[f"{name}.lora_B.default.weight"] @ expected[f"{name}.lora_A.default.weight"]
            torch.testing.assert_close(product, stock, **half)
            residual = weights[f"{name}.base_layer.weight"]
            torch.testing.assert_close(residual.float(), expected[f"{name}.base_layer.weight"], **half)


@pytest.mark.parametrize(("family", "options"), DERIVED)
def test_what_adapters_derive_from_weights_left_in_files_is_that_of_peft(
    family: str, options: dict[str, Any], tmp_path: Path
) -> None:
    path = saved(family, tmp_path, tie_word_embeddings=False)
    settings = config(model_name_or_path=path, method="lora", **options)
    expected, (model, sources) = dict(build_model(settings).named_parameters()), build_unread(settings)
    derived = [name for name, weight in model.named_parameters() if weight.requires_grad and weight.is_meta]
    assert any("lora_magnitude_vector" in name or "modules_to_save" in name for name in derived)
    for name, weight in fill(model, sources).named_parameters():
        assert (weight.dtype, weight.requires_grad) == (expected[name].dtype, expected[name].requires_grad), name
        assert torch.equal(weight, expected[name]), name
