"""What peft offers beside plain LoRA trains as peft itself does, under every strategy."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.launching import launch, launch_well
from tests.parity import plain
from tests.parity.checks import equal_after_resume
from tests.parity.runs import config, curve, mostly_long, options, run
from tests.shared import once
from trainers.config.options import TrainConfig
from trainers.embedded import BASE_DIR

STRATEGIES = ["single", "ddp", "fsdp1", "fsdp2", "zero2", "zero3", "tp", "pp"]
PATTERNS = {
    "lora_rank_pattern": "q_proj=4,down_proj=24",
    "lora_alpha_pattern": "q_proj=16,layers.0.mlp.up_proj=128",
}


def processes(strategy: str) -> int:
    return 1 if strategy == "single" else 2


@pytest.mark.parametrize("strategy", mostly_long(STRATEGIES, ["single", "fsdp2"]))
def test_ranks_and_scalings_of_some_modules_are_those_of_peft(strategy: str) -> None:
    settings = config("lora", True, **PATTERNS)
    finished = curve(run(processes(strategy), "lora", True, strategy, **PATTERNS))
    ranks: dict[str, Any] = {"rank_pattern": {"q_proj": 4, "down_proj": 24}}
    scalings: dict[str, Any] = {"alpha_pattern": {"q_proj": 16, "layers.0.mlp.up_proj": 128}}
    assert finished.agrees(plain.train(settings, build=partial(plain.build, **ranks, **scalings)))
    if strategy == "single":  # controls
        assert not finished.agrees(plain.train(settings, build=partial(plain.build, **ranks)))
        assert not finished.agrees(plain.train(settings, build=partial(plain.build, **scalings)))


# Embedding and head are tied; every stage of a pipeline still trains something.
FREEZE = {"freeze": "embed_tokens,layers.0.mlp,layers.2-3.self_attn,model.norm"}
FROZEN = ("model.embed_tokens.", "model.layers.0.mlp.", "model.layers.2.self_attn.", "model.layers.3.self_attn.",
          "model.norm.")  # fmt: skip


def partly_frozen(settings: TrainConfig, frozen: tuple[str, ...] = FROZEN) -> nn.Module:
    """The stock model, of which the weights whose names begin so are not trained."""
    model = plain.build(settings)
    for name, weight in model.named_parameters():
        weight.requires_grad_(not name.startswith(frozen))
    return model


@pytest.mark.parametrize("strategy", mostly_long(STRATEGIES, ["single", "fsdp2"]))
def test_frozen_weights_stay_as_they_are_and_the_others_train_as_in_plain_torch(strategy: str) -> None:
    settings = config("full", True, **FREEZE)
    finished = run(processes(strategy), "full", True, strategy, **FREEZE)
    assert curve(finished).agrees(plain.train(settings, build=partly_frozen))
    exported, before = load_file(finished.run.model / "model.safetensors"), load_file(BASE_DIR / "model.safetensors")
    assert {name for name in before if torch.equal(exported[name], before[name])} == {
        name for name in before if name.startswith(FROZEN)
    }
    checkpoint = json.loads((finished.run.checkpoints / "step-00000020" / "manifest.json").read_text())["tensors"]
    assert any("layers.1.mlp" in name for name in checkpoint)
    assert not [name for name in checkpoint if any(f".{part}" in f".{name}" for part in FROZEN)]
    if strategy == "single":  # controls
        assert not curve(finished).agrees(plain.train(settings, build=partial(partly_frozen, frozen=FROZEN[1:])))
        assert "tied, so frozen as well: lm_head.weight is model.embed_tokens.weight" in finished.output


@pytest.fixture(scope="module")
def untied() -> Path:
    """The embedded model with an output head of its own."""

    def save(folder: Path) -> None:
        model: Any = AutoModelForCausalLM.from_pretrained(BASE_DIR)
        head = model.lm_head.weight.detach().clone()
        model.config.tie_word_embeddings = False
        model.lm_head.weight = nn.Parameter(head + 0.01 * torch.randn(head.shape, generator=torch.manual_seed(5)))
        model.save_pretrained(folder)
        AutoTokenizer.from_pretrained(BASE_DIR).save_pretrained(folder)

    return once("untied", save)


SAVED = ["embed_tokens", "lm_head", "model.norm"]
UNSPLIT = [name for name in STRATEGIES if name not in ("tp", "pp")]


def with_saved(settings: TrainConfig, saved: list[str] | None = SAVED) -> nn.Module:
    return plain.build(settings, modules_to_save=saved, base=settings.model_name_or_path)


@pytest.mark.parametrize("strategy", mostly_long(UNSPLIT, ["single", "fsdp2"]))
def test_modules_saved_with_adapters_train_as_in_peft_and_load_back(strategy: str, untied: Path) -> None:
    saving = {"model_name_or_path": str(untied), "modules_to_save": ",".join(SAVED)}
    settings = config("lora", True, **saving)
    finished = run(processes(strategy), "lora", True, strategy, **saving)
    assert curve(finished).agrees(plain.train(settings, build=with_saved))
    base = AutoModelForCausalLM.from_pretrained(untied, attn_implementation="eager")
    before = {name: base.get_submodule(name).weight.detach().clone() for name in ("model.embed_tokens", "lm_head")}
    loaded = PeftModel.from_pretrained(base, finished.run.model)
    for name, weight in before.items():
        wrapper: Any = loaded.get_base_model().get_submodule(name)
        assert torch.equal(wrapper.original_module.weight, weight)
        assert not torch.equal(wrapper.modules_to_save["default"].weight, weight)
    assert "loaded back" in finished.output
    if strategy == "single":  # control
        assert not curve(finished).agrees(plain.train(settings, build=partial(with_saved, saved=None)))


DORA = {"use_dora": True, "lora_rank_pattern": "down_proj=4"}


@pytest.mark.parametrize(
    "strategy", mostly_long([name for name in [*STRATEGIES, "cp", "sp"] if name != "tp"], ["ddp", "fsdp2"])
)
def test_dora_is_that_of_peft(strategy: str) -> None:
    settings = config("lora", True, **DORA)
    finished = run(processes(strategy), "lora", True, strategy, **DORA)
    ranks: dict[str, Any] = {"rank_pattern": {"down_proj": 4}}
    assert curve(finished).agrees(plain.train(settings, build=partial(plain.build, use_dora=True, **ranks)))
    saved = load_file(finished.run.model / "adapter_model.safetensors")
    assert sum("lora_magnitude_vector" in name for name in saved) == 28
    if strategy == "ddp":  # control
        assert not curve(finished).agrees(plain.train(settings, build=partial(plain.build, **ranks)))


EVERYTHING = {**DORA, "lora_alpha_pattern": "q_proj=16", "modules_to_save": ",".join(SAVED)}


def all_of_it(untied: Path) -> dict[str, Any]:
    return {"model_name_or_path": str(untied), **EVERYTHING}


@pytest.mark.slow
def test_a_resumed_run_ends_as_if_never_interrupted(untied: Path, tmp_path: Path) -> None:
    undisturbed = run(2, "lora", True, "fsdp2", **all_of_it(untied))
    more = {"resume_from_checkpoint": undisturbed.checkpoints[0]}
    again = launch_well(tmp_path / "again", 2, options("lora", True, **all_of_it(untied)) | more, strategy="fsdp2")
    assert equal_after_resume(undisturbed, again)


@pytest.mark.slow
def test_what_is_merged_and_what_goes_on_from_an_adapter_is_the_model_of_peft(untied: Path) -> None:
    adapter = run(2, "lora", True, "fsdp2", **all_of_it(untied))
    base = AutoModelForCausalLM.from_pretrained(untied, attn_implementation="eager")
    loaded = PeftModel.from_pretrained(base, adapter.run.model).eval()
    merged = run(2, "lora", True, "fsdp2", merge_adapter=True, **all_of_it(untied))
    stock = AutoModelForCausalLM.from_pretrained(merged.run.model, attn_implementation="eager").eval()
    ids = torch.arange(40)[None]
    with torch.no_grad():
        logits = loaded(input_ids=ids).logits
        torch.testing.assert_close(stock(input_ids=ids).logits, logits, rtol=0, atol=1e-4)
        first = AutoModelForCausalLM.from_pretrained(untied, attn_implementation="eager")(input_ids=ids).logits
    assert (first - logits).abs().max() > 0.1  # control: the base itself
    started = {"model_name_or_path": str(untied), "from_run": str(adapter.run.model)}
    further = run(1, "lora", True, "single", max_steps=2, **started)
    assert "lora_rank_pattern: {}" not in (further.run.path / "config.yaml").read_text()
    settings = config("lora", True, **all_of_it(untied), max_steps=2)

    def go_on(settings: TrainConfig) -> nn.Module:
        base = AutoModelForCausalLM.from_pretrained(untied, attn_implementation="eager")
        return PeftModel.from_pretrained(base, adapter.run.model, is_trainable=True)

    expected = plain.train(settings, build=go_on)
    assert curve(further).losses == pytest.approx(expected.losses, abs=1e-5)
    assert curve(further).norms == pytest.approx(expected.norms, rel=1e-4)


EMBEDDING_RATE = {"embedding_learning_rate": 2e-5}
CASES = [(method, name) for method in ("full", "lora") for name in (STRATEGIES if method == "full" else UNSPLIT)]


def two_rates(model: nn.Module, settings: TrainConfig) -> torch.optim.Optimizer:
    """AdamW in which embedding and head have a rate of their own."""
    factor = settings.embedding_learning_rate / settings.learning_rate  # type: ignore[operator]
    groups = []
    for name, weight in model.named_parameters():
        if weight.requires_grad:
            rate = factor if "embed_tokens." in name or "lm_head." in name else 1.0
            groups.append({"params": [weight], "lr": rate, "weight_decay": settings.weight_decay * (weight.ndim > 1)})
    return torch.optim.AdamW(groups, lr=1.0)


@pytest.mark.parametrize(("method", "strategy"), mostly_long(CASES, [("full", "fsdp2"), ("lora", "single")]))
def test_embeddings_have_the_rate_of_a_second_group(method: str, strategy: str, untied: Path) -> None:
    chosen = dict(EMBEDDING_RATE)
    build: Any = plain.build
    if method == "lora":
        chosen |= {"model_name_or_path": str(untied), "modules_to_save": ",".join(SAVED)}
        build = with_saved
    settings = config(method, True, **chosen)
    finished = run(processes(strategy), method, True, strategy, **chosen)
    assert curve(finished).agrees(plain.train(settings, build=build, adamw=two_rates))
    assert "embedding_learning_rate=2e-05: " in finished.output
    if (method, strategy) in (("full", "fsdp2"), ("lora", "single")):  # control
        assert not curve(finished).agrees(plain.train(settings, build=build))


def test_a_resume_with_two_rates_ends_as_if_never_interrupted(tmp_path: Path) -> None:
    undisturbed = run(2, "full", True, "fsdp2", **EMBEDDING_RATE)
    more = {"resume_from_checkpoint": undisturbed.checkpoints[0]}
    again = launch_well(tmp_path / "again", 2, options("full", True, **EMBEDDING_RATE) | more, strategy="fsdp2")
    assert equal_after_resume(undisturbed, again)
    other = {**options("full", True, **EMBEDDING_RATE), **more, "embedding_learning_rate": 1e-5}
    assert "embedding_learning_rate" in launch(tmp_path / "other", 2, other, strategy="fsdp2").output
