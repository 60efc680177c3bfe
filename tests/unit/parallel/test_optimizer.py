"""Weights in bf16 and states in 8 bits: what is lost is small, has no bias, and is the same after a resume."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, GPTNeoXConfig, OpenAIGPTConfig

from tests.parity.runs import config
from tests.rounding import bound, relative
from trainers.config.mistakes import ConfigError
from trainers.config.validation import build, ignored_choices
from trainers.model.embedding_rate import embedding_rate_lines, refuse_unknown_embeddings
from trainers.model.load import build_model
from trainers.parallel.backend import set_rate
from trainers.parallel.optimizer import (
    BLOCK,
    KEYS,
    SMALLEST,
    Codes,
    SmallAdamW,
    build_optimizer,
    empty_state,
    parameter_groups,
    rounded_by_chance,
    state_vectors,
    write_state_vectors,
)
from trainers.strategy.strategy import load_strategy, refusal
from trainers.tools.preflight import machine_mistakes

CPU = torch.device("cpu")
SIZE = 3 * SMALLEST + 17  # no multiple of a block


def numbers(size: int = SIZE, seed: int = 0) -> torch.Tensor:
    """Normal numbers whose blocks differ in scale by powers of ten."""
    drawn = torch.randn(size, generator=torch.Generator().manual_seed(seed))
    return drawn * 10.0 ** -(torch.arange(size) // BLOCK % 6)


def chance(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def small(weight: nn.Parameter, eight_bit: bool = False, seed: int = 1, rate: float = 1e-3) -> SmallAdamW:
    return SmallAdamW([{"params": [weight], "weight_decay": 0.1}], rate, (0.9, 0.999), 1e-8, eight_bit, seed)


def trained(optimizer: torch.optim.Optimizer, weight: nn.Parameter, steps: int = 20, start: int = 0) -> torch.Tensor:
    """The weight after some updates with drawn gradients."""
    for step in range(start, start + steps):
        weight.grad = numbers(weight.numel(), seed=100 + step).view_as(weight).to(weight.dtype)
        optimizer.step()
    return weight.detach().clone()


def test_in_fp32_it_is_torchs_own_adamw() -> None:
    mine, fused, looped = (nn.Parameter(numbers().clone()) for _ in range(3))

    def reference(weight: nn.Parameter, **kind: bool) -> torch.Tensor:
        groups = [{"params": [weight], "weight_decay": 0.1}]
        return trained(torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, **kind), weight)

    expected = reference(fused, fused=True)
    limit = bound(relative(reference(looped, foreach=False), expected))
    assert relative(trained(small(mine), mine), expected) <= limit
    assert relative(trained(small(other := nn.Parameter(numbers().clone()), rate=1.01e-3), other), expected) > limit


def test_a_weight_is_updated_chunk_by_chunk_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, chunked = (nn.Parameter(numbers().clone()) for _ in range(2))
    expected = trained(small(whole), whole)
    monkeypatch.setattr("trainers.parallel.optimizer.CHUNK", 2 * BLOCK)
    assert torch.equal(trained(small(chunked), chunked), expected)


@pytest.mark.parametrize("signed", [True, False])
def test_codes_keep_each_number_within_a_sixteenth(signed: bool) -> None:
    values = numbers() if signed else numbers().square()
    kept = Codes(SIZE, signed, CPU)
    kept.write(values)
    assert kept.codes.numel() * kept.codes.element_size() == SIZE
    scales = kept.scales.repeat_interleave(BLOCK)[:SIZE]
    large = values.abs() > scales * 2.0 ** (-15 if signed else -31)
    assert large.float().mean() > 0.99
    error = ((kept.read() - values).abs() / values.abs())[large]
    assert error.max() <= 1 / 16 + 1e-6
    assert error.max() > 1 / 32  # control: codes are not free
    assert not (kept.read()[values != 0] == 0).any() or signed


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("by_chance", [True, False])
def test_codes_that_were_read_are_written_the_same(signed: bool, by_chance: bool) -> None:
    kept, again = (Codes(SIZE, signed, CPU) for _ in range(2))
    kept.write(numbers() if signed else numbers().square(), chance=chance() if by_chance else None)
    again.write(kept.read())
    assert torch.equal(kept.codes, again.codes)
    assert torch.equal(kept.scales, again.scales)
    assert kept.codes.unique().numel() > 100


def test_codes_are_read_and_written_in_part() -> None:
    kept = Codes(SIZE, True, CPU)
    kept.write(numbers())
    part = Codes(SIZE, True, CPU)
    for start in range(0, SIZE, 5 * BLOCK):
        part.write(numbers()[start : start + 5 * BLOCK], start)
    assert torch.equal(part.read(), kept.read())
    assert torch.equal(kept.read(2 * BLOCK, 2 * BLOCK + 7), kept.read()[2 * BLOCK : 2 * BLOCK + 7])


def test_a_mean_that_moves_slowly_gets_there_by_chance_alone() -> None:
    """A mean of squares moves by a thousandth at a time: the nearest code would always be the one it has."""
    ends = {}
    for name, drawn in {"chance": chance(), "nearest": None}.items():
        kept = Codes(SMALLEST, False, CPU)
        start = torch.full((SMALLEST,), 0.5)
        start[::BLOCK] = 1.0  # keeps the scale
        kept.write(start)
        for _ in range(2000):
            kept.write(kept.read().lerp_(torch.where(start == 1.0, 1.0, 0.25), 1e-3), chance=drawn)
        ends[name] = kept.read()[start == 0.5].mean().item()
    assert ends["chance"] == pytest.approx(0.25 + 0.25 * 0.999**2000, rel=0.01)
    assert ends["nearest"] == 0.5


def test_rounding_by_chance_has_no_bias_and_takes_a_neighbour() -> None:
    value = torch.full((100_000,), 1.0 + 2.0**-10)  # an eighth of the way to bf16's next number
    rounded = rounded_by_chance(value, chance())
    assert rounded.dtype == torch.bfloat16
    assert rounded.unique().tolist() == [1.0, 1.0078125]
    assert rounded.float().mean().item() == pytest.approx(1.0 + 2.0**-10, abs=3e-5)
    exact = torch.tensor([0.0, -1.5, 2.0**-100, -0.0])
    assert torch.equal(rounded_by_chance(exact, chance()).float(), exact)


def test_small_updates_of_a_bf16_weight_add_up() -> None:
    moved = {}
    for dtype in (torch.float32, torch.bfloat16):
        weight = nn.Parameter(torch.ones(SMALLEST, dtype=dtype))
        optimizer = small(weight, rate=1e-4)
        optimizer.param_groups[0]["weight_decay"] = 0.0
        for _ in range(200):
            weight.grad = torch.ones_like(weight)
            optimizer.step()
        moved[dtype] = 1 - weight.detach().float().mean().item()
    assert moved[torch.float32] == pytest.approx(200 * 1e-4, rel=1e-3)
    assert moved[torch.bfloat16] == pytest.approx(200 * 1e-4, rel=0.02)
    plain = torch.ones(1, dtype=torch.bfloat16)
    assert plain - 1e-4 == plain  # control: rounded to the nearest it would never move


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_states_that_were_saved_go_on_bit_for_bit(dtype: torch.dtype) -> None:
    start = numbers().to(dtype)
    weight = nn.Parameter(start.clone())
    optimizer = small(weight, eight_bit=True)
    half = trained(optimizer, weight, 10)
    saved = {key: vector.clone() for key, vector in state_vectors(optimizer.state[weight]).items()}
    expected = trained(optimizer, weight, 10, start=10)

    resumed = nn.Parameter(half.clone())
    fresh = small(resumed, eight_bit=True)
    fresh.state[resumed] = empty_state(fresh, resumed, KEYS, 10.0)
    vectors = state_vectors(fresh.state[resumed])
    for key, vector in vectors.items():
        assert not vector.any()
        vector.copy_(saved[key])
    write_state_vectors(fresh.state[resumed], vectors)
    assert torch.equal(trained(fresh, resumed, 10, start=10), expected)

    other = nn.Parameter(half.clone())  # control: without the states it goes elsewhere
    assert not torch.equal(trained(small(other, eight_bit=True), other, 10, start=10), expected)


def test_the_seed_decides_the_rounding() -> None:
    weights = [nn.Parameter(numbers().bfloat16()) for _ in range(3)]
    ends = [trained(small(weight, seed=seed), weight) for weight, seed in zip(weights, (1, 1, 2), strict=True)]
    assert torch.equal(ends[0], ends[1])
    assert not torch.equal(ends[0], ends[2])


def test_what_is_kept_is_as_small_as_promised() -> None:
    weight, norm = nn.Parameter(numbers().bfloat16()), nn.Parameter(torch.ones(64))
    groups = [{"params": [weight, norm], "weight_decay": 0.0}]
    optimizer = build_optimizer(groups, config("full", True, optim="adamw_8bit"))
    weight.grad, norm.grad = torch.ones_like(weight), torch.ones_like(norm)
    optimizer.step()
    state = optimizer.state[weight]
    held = sum(state[key].codes.nbytes + state[key].scales.nbytes for key in KEYS)
    assert held < 2.05 * SIZE
    assert {optimizer.state[norm][key].dtype for key in KEYS} == {torch.float32}


BF16 = {"mixed_precision": "bf16", "master_weights": False}


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"master_weights": False}, "mixed_precision=no; use bf16"),
        ({**BF16, "method": "lora"}, "adapters are small, and stay in fp32; leave it out"),
    ],
)
def test_clashes_are_told(changes: dict[str, Any], part: str) -> None:
    values = {"model_name_or_path": "embedded", "dataset_name": "embedded", "method": "full"}
    build(values | BF16)
    with pytest.raises(ConfigError, match=part):
        build(values | changes)


def test_they_are_named_as_outside_the_promise() -> None:
    outside = config("full", True, optim="adamw_8bit", **BF16).outside_parity()
    assert set(outside) == {"optim=adamw_8bit", "master_weights=false"}


@pytest.mark.parametrize("name", ["zero1", "zero2", "zero3"])
def test_deepspeed_which_keeps_states_itself_refuses(name: str) -> None:
    strategy = load_strategy(name)
    assert "use --strategy fsdp2" in str(refusal(strategy, config("full", True, optim="adamw_8bit"), has_gpu=False))
    assert refusal(strategy, config("full", True), has_gpu=False) is None


def test_activation_offloading_is_idle_without_checkpointing_and_refused_without_a_gpu() -> None:
    alone = config("full", True, activation_offloading=True)
    assert "activation_offloading is ignored: gradient_checkpointing is off" in map(str, ignored_choices(alone))
    (mistake,) = machine_mistakes(alone, has_gpu=False)
    assert str(mistake).startswith("activation_offloading=true needs a GPU")
    assert not machine_mistakes(alone, has_gpu=True)


def test_all_b_matrices_of_adapters_have_the_rate_of_lora_plus() -> None:
    names = ["a.lora_A.default.weight", "a.lora_B.default.weight", "e.lora_embedding_A.default",
             "e.lora_embedding_B.default", "lm_head.weight", "norm.weight"]  # fmt: skip
    weights = [(name, nn.Parameter(torch.zeros(2, 2) if name[0] != "n" else torch.zeros(2))) for name in names]
    settings = config("lora", True, loraplus_lr_ratio=16.0, weight_decay=0.1)
    groups = parameter_groups(weights, {name: weight.shape for name, weight in weights}, settings)
    factors = {
        id(weight): (group["rate_factor"], group["weight_decay"]) for group in groups for weight in group["params"]
    }
    assert [factors[id(weight)] for _, weight in weights] == [
        (1, 0.1), (16, 0.1), (1, 0.1), (16, 0.1), (1, 0.1), (16, 0.0),
    ]  # fmt: skip
    optimizer = build_optimizer(groups, settings)
    set_rate(optimizer, 1e-3)
    assert sorted({group["lr"] for group in optimizer.param_groups}) == [1e-3, 16e-3]


def test_embedding_and_head_have_a_rate_of_their_own() -> None:
    names = ["model.embed_tokens.weight", "lm_head.weight", "model.layers.0.mlp.up_proj.weight", "score.weight",
             "base_model.model.lm_head.modules_to_save.default.weight", "transformer.wpe.weight",
             "base_model.model.lm_head.lora_A.default.weight", "model.layers.0.embed_tokens.weight"]  # fmt: skip
    weights = [(name, nn.Parameter(torch.zeros(2, 2))) for name in names]
    settings = config("full", True, embedding_learning_rate=1e-4, learning_rate=1e-3)
    groups = parameter_groups(weights, {name: weight.shape for name, weight in weights}, settings)
    factors = {id(weight): group["rate_factor"] for group in groups for weight in group["params"]}
    embed = {name for name, weight in weights if factors[id(weight)] == pytest.approx(0.1)}
    assert embed == {names[0], names[1], names[4]}
    alone = parameter_groups(weights, {name: weight.shape for name, weight in weights}, config("full", True))
    assert {group["rate_factor"] for group in alone} == {1.0}, "control"


def test_a_rate_of_the_embeddings_that_reaches_none_is_named() -> None:
    lora = config("lora", True, embedding_learning_rate=1e-4)
    reason = "method=lora trains no embedding without modules_to_save=embed_tokens,lm_head"
    assert f"embedding_learning_rate is ignored: {reason}" in map(str, ignored_choices(lora))
    frozen = config("full", True, embedding_learning_rate=1e-4, freeze="embed_tokens")
    lines = embedding_rate_lines(build_model(frozen), frozen)
    assert lines == ["warning: embedding_learning_rate=0.0001 is ignored: no embedding is trained"]
    full = config("full", True, embedding_learning_rate=1e-4)
    assert embedding_rate_lines(build_model(full), full) == [
        "embedding_learning_rate=0.0001: model.embed_tokens.weight"
    ]


def test_a_model_whose_embeddings_have_other_names_is_refused() -> None:
    small = GPTNeoXConfig(
        vocab_size=32, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8
    )
    settings = config("full", True, embedding_learning_rate=1e-4)
    refuse_unknown_embeddings(AutoModelForCausalLM.from_config(small), settings)
    other = OpenAIGPTConfig(vocab_size=32, n_positions=8, n_embd=16, n_layer=1, n_head=2)
    model = AutoModelForCausalLM.from_config(other)
    with pytest.raises(ConfigError, match=r"whether transformer.tokens_embed.weight"):
        refuse_unknown_embeddings(model, settings)
