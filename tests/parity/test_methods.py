"""What peft offers beside plain LoRA trains as peft itself does, under every strategy."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AutoPeftModelForCausalLM, LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed

from tests.launching import launch, launch_well
from tests.parity import plain
from tests.parity.checks import equal_after_resume
from tests.parity.runs import STEPS, config, curve, mostly_long, options, run
from tests.shared import once
from trainers.checkpoint.export import export_again
from trainers.config.options import TrainConfig
from trainers.embedded import BASE_DIR

STRATEGIES = ["single", "ddp", "fsdp1", "fsdp2", "zero2", "zero3", "tp", "pp"]
PATTERNS = {
    "lora_rank_pattern": "q_proj=4,down_proj=24",
    "lora_alpha_pattern": "q_proj=16,layers.0.mlp.up_proj=128",
}


def processes(strategy: str) -> int:
    return 1 if strategy == "single" else 2


@pytest.mark.parametrize("strategy", mostly_long(STRATEGIES, ["fsdp2"]))
def test_ranks_and_scalings_of_some_modules_are_those_of_peft(strategy: str) -> None:
    settings = config("lora", True, **PATTERNS)
    finished = curve(run(processes(strategy), "lora", True, strategy, **PATTERNS))
    ranks: dict[str, Any] = {"rank_pattern": {"q_proj": 4, "down_proj": 24}}
    scalings: dict[str, Any] = {"alpha_pattern": {"q_proj": 16, "layers.0.mlp.up_proj": 128}}
    assert finished.agrees(plain.train(settings, build=partial(plain.build, **ranks, **scalings)))
    if strategy == "fsdp2":  # controls
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


@pytest.mark.parametrize("strategy", mostly_long(STRATEGIES, ["fsdp2"]))
def test_frozen_weights_stay_as_they_are_and_the_others_train_as_in_plain_torch(strategy: str) -> None:
    settings = config("full", True, **FREEZE)
    finished = run(processes(strategy), "full", True, strategy, **FREEZE)
    assert curve(finished).agrees(plain.train(settings, build=partly_frozen))
    exported, before = load_file(finished.run.model / "model.safetensors"), load_file(BASE_DIR / "model.safetensors")
    assert {name for name in before if torch.equal(exported[name], before[name])} == {
        name for name in before if name.startswith(FROZEN)
    }
    checkpoint = json.loads((finished.run.checkpoints / f"step-{STEPS:08d}" / "manifest.json").read_text())["tensors"]
    assert any("layers.1.mlp" in name for name in checkpoint)
    assert not [name for name in checkpoint if any(f".{part}" in f".{name}" for part in FROZEN)]
    if strategy == "fsdp2":  # controls
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


@pytest.mark.parametrize("strategy", mostly_long(UNSPLIT, ["fsdp2"]))
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
    if strategy == "fsdp2":  # control
        assert not curve(finished).agrees(plain.train(settings, build=partial(with_saved, saved=None)))


DORA = {"use_dora": True, "lora_rank_pattern": "down_proj=4"}


@pytest.mark.parametrize(
    "strategy", mostly_long([name for name in [*STRATEGIES, "cp", "sp"] if name != "tp"], ["fsdp2"])
)
def test_dora_is_that_of_peft(strategy: str) -> None:
    settings = config("lora", True, **DORA)
    finished = run(processes(strategy), "lora", True, strategy, **DORA)
    ranks: dict[str, Any] = {"rank_pattern": {"down_proj": 4}}
    assert curve(finished).agrees(plain.train(settings, build=partial(plain.build, use_dora=True, **ranks)))
    saved = load_file(finished.run.model / "adapter_model.safetensors")
    assert sum("lora_magnitude_vector" in name for name in saved) == 28
    if strategy == "fsdp2":  # control
        assert not curve(finished).agrees(plain.train(settings, build=partial(plain.build, **ranks)))


EVERYTHING = {**DORA, "lora_alpha_pattern": "q_proj=16", "modules_to_save": ",".join(SAVED)}


def all_of_it(untied: Path) -> dict[str, Any]:
    return {"model_name_or_path": str(untied), **EVERYTHING}


@pytest.mark.long
def test_a_resumed_run_ends_as_if_never_interrupted(untied: Path, tmp_path: Path) -> None:
    undisturbed = run(2, "lora", True, "fsdp2", **all_of_it(untied))
    more = {"resume_from_checkpoint": undisturbed.checkpoints[0]}
    again = launch_well(tmp_path / "again", 2, options("lora", True, **all_of_it(untied)) | more, strategy="fsdp2")
    assert equal_after_resume(undisturbed, again)


@pytest.mark.long
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


TOKENS = ["<name>", "</name>", "Turn"]
GROWS = {"new_tokens": ",".join([*TOKENS, "book"])}  # the last is in the vocabulary


def with_tokens(settings: TrainConfig, grows: bool = True, multiple: int | None = None) -> nn.Module:
    """The stock model with stock rows for the tokens, which begin as the mean of the others, trained by stock peft."""
    path = BASE_DIR if settings.model_name_or_path == "embedded" else settings.model_name_or_path
    base: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    before = base.get_input_embeddings().weight.shape[0]
    base.resize_token_embeddings(before + len(TOKENS), mean_resizing=False, pad_to_multiple_of=multiple)
    ends = [base.get_input_embeddings(), base.get_output_embeddings()]
    with torch.no_grad():
        for end in ends if grows else []:
            end.weight[before:] = end.weight[:before].mean(0)
    if settings.method == "full":
        return base
    ids = list(range(before, before + len(TOKENS)))
    tied = ends[0].weight is ends[1].weight
    set_seed(settings.seed)
    adapters = LoraConfig(
        r=settings.lora_r, lora_alpha=settings.lora_alpha, target_modules="all-linear",
        trainable_token_indices={"embed_tokens": ids} | ({} if tied else {"lm_head": ids}),
    )  # fmt: skip
    return get_peft_model(base, adapters)


@pytest.mark.parametrize(
    ("strategy", "method"),
    mostly_long(
        [(name, "lora") for name in [*UNSPLIT, "cp"]] + [(name, "full") for name in [*STRATEGIES, "cp"]],
        [],
    ),
)
def test_new_tokens_train_as_in_stock_transformers_and_peft(strategy: str, method: str) -> None:
    padded = {"pad_vocab_to_multiple_of": 16} if method == "full" else {}
    settings = config(method, True, **GROWS, **padded)
    finished = run(processes(strategy), method, True, strategy, **GROWS, **padded)
    expected = partial(with_tokens, multiple=padded.get("pad_vocab_to_multiple_of"))
    assert curve(finished).agrees(plain.train(settings, build=expected))
    assert "in the vocabulary already: book" in finished.output.replace("\n", " ")
    if (strategy, method) in (("fsdp2", "lora"), ("tp", "full")):  # control: rows as they are at random
        assert not curve(finished).agrees(plain.train(settings, build=partial(expected, grows=False)))


@pytest.mark.parametrize("strategy", mostly_long(UNSPLIT, ["single"]))
def test_new_tokens_of_an_untied_head_train_as_in_stock_peft_and_load_back(strategy: str, untied: Path) -> None:
    changes = {"model_name_or_path": str(untied), **GROWS}
    settings = config("lora", True, **changes)
    finished = run(processes(strategy), "lora", True, strategy, **changes)
    assert curve(finished).agrees(plain.train(settings, build=with_tokens))
    saved = load_file(finished.run.model / "adapter_model.safetensors")
    rows = {name: tensor.shape[0] for name, tensor in saved.items() if "lora_" not in name}
    assert sorted(rows.values()) == [len(TOKENS)] * 2
    if strategy == "single":  # control: rows as they are at random
        assert not curve(finished).agrees(plain.train(settings, build=partial(with_tokens, grows=False)))
    loaded = AutoPeftModelForCausalLM.from_pretrained(finished.run.model, attn_implementation="eager")
    assert loaded.get_base_model().lm_head.weight.shape[0] == 1024 + len(TOKENS)


def logits_of(folder: Path, ids: torch.Tensor, kind: Any = AutoModelForCausalLM) -> torch.Tensor:
    """Logits of an export in the hands of stock libraries."""
    model = kind.from_pretrained(folder, attn_implementation="eager").eval()
    with torch.no_grad():
        return model(input_ids=ids).logits


@pytest.mark.long
def test_new_tokens_after_a_resume_when_merged_and_in_a_run_from_the_adapter(untied: Path, tmp_path: Path) -> None:
    changes = {"model_name_or_path": str(untied), **GROWS}
    undisturbed = run(1, "lora", True, "single", **changes)
    more = {"resume_from_checkpoint": undisturbed.checkpoints[0]}
    again = launch_well(tmp_path / "again", 1, options("lora", True, **changes) | more, strategy="single")
    assert equal_after_resume(undisturbed, again)
    tokenizer = AutoTokenizer.from_pretrained(undisturbed.run.model)
    ids = tokenizer("<name>Turn</name> a book", return_tensors="pt").input_ids
    assert ids[0, :3].tolist() == [1024, 1026, 1025]
    expected = logits_of(undisturbed.run.model, ids, AutoPeftModelForCausalLM)
    export_again(undisturbed.run, tmp_path / "merged", "merged", None)
    torch.testing.assert_close(logits_of(tmp_path / "merged", ids), expected, rtol=0, atol=1e-4)
    start = {"model_name_or_path": str(untied), "from_run": str(undisturbed.run.model), "max_steps": 1}
    further = run(1, "lora", True, "single", **start)
    full = run(1, "full", True, "single", **start)
    assert "new_tokens: []" not in (further.run.path / "config.yaml").read_text()
    first = run(1, "lora", True, "single", **changes, max_steps=1)
    assert further.series("loss") == pytest.approx(full.series("loss"), abs=1e-5)
    assert further.series("loss")[0] < first.series("loss")[0] - 0.1  # control: rows and adapters from the beginning
    for finished, kind in ((further, AutoPeftModelForCausalLM), (full, AutoModelForCausalLM)):
        torch.testing.assert_close(logits_of(finished.run.model, ids, kind), expected, rtol=0, atol=1.0)


PISSA = {"init_lora_weights": "pissa", "lora_rank_pattern": "down_proj=4", "lora_alpha_pattern": "q_proj=16"}


def with_principal(settings: TrainConfig, first: Any = "pissa") -> nn.Module:
    patterns: dict[str, Any] = {"rank_pattern": {"down_proj": 4}, "alpha_pattern": {"q_proj": 16}}
    return plain.build(settings, init_lora_weights=first, **patterns)


@pytest.mark.parametrize("strategy", mostly_long([*STRATEGIES, "cp"], []))
def test_adapters_that_begin_as_singular_vectors_are_those_of_peft(strategy: str, tmp_path: Path) -> None:
    settings = config("lora", True, **PISSA)
    finished = run(processes(strategy), "lora", True, strategy, **PISSA)
    assert curve(finished).agrees(plain.train(settings, build=with_principal))
    if strategy == "single":  # control
        assert not curve(finished).agrees(plain.train(settings, build=partial(with_principal, first=True)))
    # Stock peft loads the adapter onto the unchanged base.
    ids = torch.arange(40)[None]
    exported = logits_of(finished.run.model, ids, AutoPeftModelForCausalLM)
    assert (exported - logits_of(BASE_DIR, ids)).abs().max() > 0.1
    export_again(finished.run, tmp_path / "merged", "merged", None)
    torch.testing.assert_close(logits_of(tmp_path / "merged", ids), exported, rtol=0, atol=1e-4)


@pytest.mark.long
def test_such_adapters_after_a_resume_and_in_a_run_from_their_export(tmp_path: Path) -> None:
    undisturbed = run(1, "lora", True, "single", **PISSA)
    more = {"resume_from_checkpoint": undisturbed.checkpoints[0]}
    again = launch_well(tmp_path / "again", 1, options("lora", True, **PISSA) | more, strategy="single")
    assert equal_after_resume(undisturbed, again)
    further = run(1, "lora", True, "single", from_run=str(undisturbed.run.model), max_steps=1)
    assert "lora_r: 32\n" in (further.run.path / "config.yaml").read_text()
    eager: dict[str, Any] = {"attn_implementation": "eager", "is_trainable": True}
    stock = AutoPeftModelForCausalLM.from_pretrained(undisturbed.run.model, **eager)
    expected = plain.train(config("lora", True, max_steps=1), build=lambda settings: stock)
    assert further.series("loss") == pytest.approx(expected.losses, abs=1e-5)


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


@pytest.mark.parametrize(("method", "strategy"), mostly_long(CASES, [("full", "fsdp2")]))
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


@pytest.mark.long
def test_a_resume_with_two_rates_ends_as_if_never_interrupted(tmp_path: Path) -> None:
    undisturbed = run(2, "full", True, "fsdp2", **EMBEDDING_RATE)
    more = {"resume_from_checkpoint": undisturbed.checkpoints[0]}
    again = launch_well(tmp_path / "again", 2, options("full", True, **EMBEDDING_RATE) | more, strategy="fsdp2")
    assert equal_after_resume(undisturbed, again)
    other = {**options("full", True, **EMBEDDING_RATE), **more, "embedding_learning_rate": 1e-5}
    assert "embedding_learning_rate" in launch(tmp_path / "other", 2, other, strategy="fsdp2").output
