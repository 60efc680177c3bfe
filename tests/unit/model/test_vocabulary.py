"""New tokens get rows that begin as the mean of the others, however the weights are read and loaded back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AutoPeftModelForCausalLM
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from tests.unit.model.test_load import TINY, config
from tests.unit.model.test_stored import assert_same, fill
from trainers.config.mistakes import ConfigError
from trainers.data.tokenizer import load_tokenizer, new_token_ids
from trainers.embedded import BASE_DIR
from trainers.model.adapter import Adapter
from trainers.model.attention import KERNELS
from trainers.model.load import build_model, build_unread, load_base
from trainers.model.lora import add_adapters
from trainers.model.sizes import matmul_parameters
from trainers.model.vocabulary import GrownTensor
from trainers.objectives.loss_module import LossModule
from trainers.tools.memory_estimate import empty_model, read_config

TOKENS = ["<a>", "<b>", "<c>"]
VOCABULARY = 1024
"""Tokens of the embedded tokenizer."""


def saved(family: str, folder: Path, **changes: Any) -> str:
    """A tiny model of random weights with the embedded tokenizer."""
    torch.manual_seed(0)
    shape = AutoConfig.for_model(family, **{**TINY, "vocab_size": VOCABULARY, "n_positions": 64, **changes})
    AutoModelForCausalLM.from_config(shape).save_pretrained(folder)
    AutoTokenizer.from_pretrained(BASE_DIR).save_pretrained(folder)
    return str(folder)


FAMILIES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"tie_word_embeddings": False}),
    ("gpt2", {}),
    ("phi", {}),  # its head has a bias
    ("gemma2", {"tie_word_embeddings": True}),  # scales its embedding, and caps its logits
    ("qwen3", {"vocab_size": VOCABULARY + 2, "tie_word_embeddings": False}),  # two rows to spare
]


@pytest.mark.parametrize("method", ["full", "lora"])
@pytest.mark.parametrize(("family", "changes"), FAMILIES)
def test_rows_read_later_are_those_of_the_loaded_model(
    family: str, changes: dict[str, Any], method: str, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"method": method, "new_tokens": TOKENS, "mixed_precision": "bf16", "packing": False}
    options |= {"pad_vocab_to_multiple_of": 8} if method == "full" else {}
    settings = config(model_name_or_path=saved(family, tmp_path, **changes), **options)
    model, sources = build_unread(settings)
    whole = build_model(settings)
    assert_same(fill(model, sources), whole)
    stock = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    before, rows = stock.get_input_embeddings().weight, 1032 if method == "full" else 1027
    base: Any = LossModule(whole).base
    assert base.config.vocab_size == rows
    for end, old in ((base.get_input_embeddings(), before), (base.get_output_embeddings(), None)):
        old = stock.get_output_embeddings().weight if old is None else old
        weight = end.weight.detach().float()
        assert weight.shape[0] == rows
        torch.testing.assert_close(weight[VOCABULARY:], old.mean(0).expand(rows - VOCABULARY, -1), atol=1e-3, rtol=0)
        torch.testing.assert_close(weight[:VOCABULARY], old[:VOCABULARY], atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize(("family", "changes"), FAMILIES)
def test_the_loss_of_trained_rows_is_that_of_stock_peft(family: str, changes: dict[str, Any], tmp_path: Path) -> None:
    path = saved(family, tmp_path / "base", **changes)
    settings = config(model_name_or_path=path, method="lora", new_tokens=TOKENS, packing=False)
    model: Any = build_model(settings)
    trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    assert sum("trainable_tokens_delta" in name for name in trained) == (1 if family in ("gpt2", "gemma2") else 2)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in trained.values():
            weight += 0.1 * torch.randn(weight.shape, generator=generator)
    model.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
    load_tokenizer(settings).save_pretrained(tmp_path / "adapter")
    stock = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter", is_trainable=True).eval()
    ids = torch.tensor([[5, VOCABULARY + 2, 9, VOCABULARY, 77, VOCABULARY + 1]])
    loss = LossModule(model.eval())
    assert loss.chunked
    loss.base.set_attn_implementation(KERNELS["eager"])
    positions = torch.arange(5)
    got = loss(ids, torch.arange(6)[None], None, positions, ids[0, 1:])[0]
    logits = stock(input_ids=ids).logits[0, :-1]
    expected = torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum")
    torch.testing.assert_close(got, expected)
    gradients = [torch.autograd.grad(value, weights) for value, weights in (
        (got, list(trained.values())),
        (expected, [dict(stock.named_parameters())[name] for name in trained]),
    )]  # fmt: skip
    for name, own, other in zip(trained, *gradients, strict=True):
        torch.testing.assert_close(own, other, atol=1e-4, rtol=1e-4, msg=name)
    base = load_base(config(model_name_or_path=path, method="lora", packing=False))
    base.set_attn_implementation("eager")
    again = Adapter.read(tmp_path / "adapter").attach(base).eval()
    torch.testing.assert_close(again(input_ids=ids).logits, stock(input_ids=ids).logits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_part_of_a_grown_tensor(dtype: torch.dtype, tmp_path: Path) -> None:
    settings = config(model_name_or_path=saved("llama", tmp_path, tie_word_embeddings=False), new_tokens=TOKENS)
    sources = build_unread(settings.model_copy(update={"method": "full"}))[1]
    grown = sources["lm_head.weight"]
    assert isinstance(grown, GrownTensor)
    full = grown.mapped().to(dtype)
    for rows in (slice(0, 3), slice(1020, 1026), slice(1024, 1027), slice(1025, 1027), slice(0, 1027), slice(7, 7)):
        for columns in (slice(0, full.shape[1]), slice(3, 9)):
            part = torch.empty(rows.stop - rows.start, columns.stop - columns.start, dtype=dtype)
            grown.read(part, (rows, columns))
            assert torch.equal(part, full[rows, columns])


def test_ids_are_those_of_the_tokenizer_and_known_tokens_stay_as_they_are() -> None:
    settings = config(new_tokens=["<a>", "the", "a", "<b>"], method="lora")
    plain, grown = load_tokenizer(config(method="lora")), load_tokenizer(settings)
    assert "a" in plain.get_vocab()
    fresh = [token for token in settings.new_tokens if token not in plain.get_vocab()]
    assert new_token_ids(settings) == {token: VOCABULARY + number for number, token in enumerate(fresh)}
    text = "a banana <a> and<b>"
    assert grown.decode(grown(text)["input_ids"], skip_special_tokens=True) == text
    assert grown("banana")["input_ids"] == plain("banana")["input_ids"]
    assert grown("x<a>y")["input_ids"][1] == VOCABULARY


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"lora_target_modules": "q_proj,lm_head"}, "lora_target_modules=lm_head gets rows for new_tokens"),
        ({"lora_target_modules": "embed_tokens"}, "lora_target_modules=embed_tokens gets rows for new_tokens"),
    ],
)
def test_adapters_on_rows_of_new_tokens_are_refused(changes: dict[str, Any], line: str) -> None:
    wrong = config(method="lora", new_tokens=TOKENS, **changes)
    with pytest.raises(ConfigError, match=line):
        add_adapters(load_base(wrong), wrong)


def test_weights_that_are_tied_against_the_config_are_refused(tmp_path: Path) -> None:
    """peft goes by the config, and would train the new rows of one of both."""
    settings = config(model_name_or_path=saved("llama", tmp_path, tie_word_embeddings=True), method="lora",
                      new_tokens=TOKENS)  # fmt: skip
    base = load_base(settings)
    base.config.tie_word_embeddings = False
    with pytest.raises(ConfigError, match="new_tokens=<a>,<b>,<c>: llama ties its embedding and head in another way"):
        add_adapters(base, settings)


def test_a_saved_embedding_has_the_new_rows(tmp_path: Path) -> None:
    path = saved("llama", tmp_path, tie_word_embeddings=False)
    settings = config(model_name_or_path=path, method="lora", new_tokens=TOKENS, modules_to_save="embed_tokens")
    trained = {name: weight.shape for name, weight in build_model(settings).named_parameters() if weight.requires_grad}
    ends = sorted((name.rpartition("base_model.model.")[2], tuple(shape)) for name, shape in trained.items()
                  if "lora_" not in name)  # fmt: skip
    assert ends == [
        ("lm_head.token_adapter.trainable_tokens_delta.default", (3, TINY["hidden_size"])),
        ("model.embed_tokens.modules_to_save.default.weight", (1027, TINY["hidden_size"])),
    ]


@pytest.mark.parametrize("method", ["full", "lora"])
def test_an_estimate_counts_the_weights_of_new_tokens(method: str) -> None:
    settings = config(method=method, new_tokens=TOKENS)
    model, empty = build_unread(settings)[0], empty_model(settings, read_config(settings))
    counts = [sum(weight.numel() for weight in each.parameters() if weight.requires_grad) for each in (model, empty)]
    assert counts[0] == counts[1]
    assert matmul_parameters(model) == matmul_parameters(empty)
    plain = config(method=method)
    fewer = sum(weight.numel() for weight in build_unread(plain)[0].parameters() if weight.requires_grad)
    assert counts[0] - fewer == len(TOKENS) * 128
    assert sum(matmul_parameters(model)) - sum(matmul_parameters(build_unread(plain)[0])) == len(TOKENS) * 128
