"""A model that starts from an adapter has its weights, bit for bit, or those that a merged export has."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AutoPeftModelForCausalLM
from torch import nn
from transformers import AutoModelForCausalLM

from trainers.checkpoint.export import export
from trainers.config.mistakes import ConfigError
from trainers.config.options import TrainConfig
from trainers.config.parse import Request
from trainers.config.validation import build
from trainers.data.prepare import load_tokenizer
from trainers.data.tokenizer import tokenizer_folder
from trainers.embedded import BASE_DIR
from trainers.model.adapter import load_start
from trainers.model.load import build_model, build_unread
from trainers.run.from_run import resolve_request

DATA = {"dataset_name": "embedded", "max_train_samples": 20}


def trained(method: str, **options: Any) -> tuple[TrainConfig, Any]:
    """A config, and a model whose trained weights are not those that it began with."""
    config = build({"model_name_or_path": "embedded", "method": method, "lora_r": 4, **DATA, **options})
    model = build_model(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.requires_grad:
                weight += torch.randn(weight.shape, generator=generator) * 0.02
    return config, model


def export_of(folder: Path, kind: str, config: TrainConfig, model: Any) -> Path:
    export(lambda _: copy.deepcopy(model), config, folder, kind, {})
    return folder


def started(folder: Path, **options: Any) -> tuple[TrainConfig, Any]:
    """The model of a run that starts from a folder."""
    config = resolve_request(Request(options={"from_run": str(folder), **DATA, **options}))
    model = build_unread(config)[0]
    load_start(config, model)
    return config, model


def trained_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: weight for name, weight in model.named_parameters() if weight.requires_grad}


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "adapter"
    template = folder.parent / "template.jinja"
    template.write_text("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}")
    config, model = trained("lora", chat_template=str(template))
    export_of(folder, "adapter", config, model)
    export_of(folder.parent / "merged", "merged", config, model)
    return folder


def test_an_adapter_is_trained_further_from_its_own_weights(adapter: Path) -> None:
    config, model = started(adapter)
    expected = trained_weights(trained("lora")[1])
    assert equal(trained_weights(model), expected)
    assert not equal(trained_weights(build_unread(config)[0]), expected)  # control: new adapters
    assert (config.lora_r, config.lora_target_modules) == (4, ["all-linear"])


def test_the_tokenizer_and_its_template_are_those_of_the_export(adapter: Path) -> None:
    config, _ = started(adapter)
    assert tokenizer_folder(config) == adapter
    assert load_tokenizer(config).chat_template.startswith("{% for m in messages %}<{{ m.role }}>")
    gone = config.model_copy(update={"from_run": f"{adapter}-gone"})
    with pytest.raises(ConfigError, match="is gone, and its tokenizer is needed"):
        load_tokenizer(gone)
    base = config.model_copy(update={"from_run": None})
    assert not load_tokenizer(base).chat_template.startswith("{% for m in messages %}<{{ m.role }}>")  # control


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_merged_adapter_gives_the_weights_of_a_merged_export(checkpointing: bool, adapter: Path) -> None:
    config, model = started(adapter, method="full", gradient_checkpointing=checkpointing)
    exported = dict(AutoModelForCausalLM.from_pretrained(adapter.parent / "merged").named_parameters())
    assert equal(dict(model.named_parameters()), exported)
    assert trained_weights(model).keys() == exported.keys()
    base = build_model(config)
    assert not equal(trained_weights(base), exported)  # control
    hooks = [len(one.get_input_embeddings()._forward_hooks) for one in (model, base)]
    assert hooks[0] == hooks[1]


def test_a_norm_that_an_adapter_saves_is_merged_into_a_tied_model(tmp_path: Path) -> None:
    folder = export_of(tmp_path / "adapter", "adapter", *trained("lora", modules_to_save="model.norm"))
    norm = started(folder, method="full")[1].get_decoder().norm.weight
    base = AutoModelForCausalLM.from_pretrained(BASE_DIR).get_decoder().norm.weight
    assert (norm - base).abs().max() > 0.01


def test_full_weights_are_loaded_as_any_base_model(tmp_path: Path) -> None:
    config, model = trained("full")
    again = started(export_of(tmp_path / "model", "full", config, model))[0]
    assert (again.method, again.model_name_or_path) == ("full", str(tmp_path / "model"))
    assert equal(trained_weights(build_model(again)), trained_weights(model))


def test_a_chain_of_adapters_ends_in_one_that_peft_loads(adapter: Path, tmp_path: Path) -> None:
    config = started(adapter)[0]
    model = build_model(config)
    load_start(config, model)
    last = export_of(tmp_path / "model", "adapter", config, model)
    assert equal(
        trained_weights(AutoPeftModelForCausalLM.from_pretrained(last, is_trainable=True)), trained_weights(model)
    )
    assert equal(trained_weights(started(last)[1]), trained_weights(model))


def test_an_adapter_that_does_not_fit_is_refused(adapter: Path) -> None:
    config, _ = started(adapter)
    other = config.model_copy(update={"lora_r": 8})
    with pytest.raises(ConfigError, match=r"from_run=\S+ cannot be used: .*lora_A"):
        load_start(other, build_unread(other)[0])


def test_an_adapter_on_a_tied_embedding_is_not_merged_in_place(tmp_path: Path) -> None:
    config, model = trained("lora", lora_target_modules=["embed_tokens", "q_proj"])
    if model.get_output_embeddings().weight is not model.get_input_embeddings().weight:
        pytest.fail("the embedded model ties its embeddings no more; use another")
    folder = export_of(tmp_path / "model", "adapter", config, model)
    with pytest.raises(ConfigError, match="one of two tied embeddings"):
        started(folder, method="full")
