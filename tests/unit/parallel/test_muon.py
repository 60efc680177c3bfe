"""Muon: what an orthogonal update is, torch's own steps in fp32, and a state of each weight's own kind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import BertConfig, GPT2Config, RobertaConfig

from tests.parity.runs import config
from tests.steps import steps
from trainers.config.mistakes import ConfigError
from trainers.parallel.muon import Muon, held_elements, is_hidden_matrix, orthogonalized
from trainers.parallel.optimizer import empty_state, parameter_groups
from trainers.parallel.ranks import Ranks
from trainers.parallel.shards import WEIGHT, Shard
from trainers.run.disk import layer_of
from trainers.tools.peak_memory import PeakMemoryMode

NAME = "model.layers.0.mlp.up_proj.weight"
SHAPES = [(24, 24), (40, 16), (16, 40), (8, 1)]


def drawn(shape: tuple[int, int], seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", SHAPES)
def test_an_update_keeps_the_directions_and_evens_out_their_sizes(shape: tuple[int, int]) -> None:
    matrix = drawn(shape) * torch.logspace(0, -1, shape[1])
    left, sizes, right = torch.linalg.svd(matrix, full_matrices=False)
    measured = left.T @ orthogonalized(matrix) @ right.T
    assert 0.5 < measured.diagonal().min() <= measured.diagonal().max() < 1.3
    assert (measured - measured.diagonal().diag()).abs().max() < 1e-4
    assert sizes.min() / sizes.max() < 0.5 or min(shape) == 1  # control: there was something to even out
    assert torch.equal(orthogonalized(torch.zeros(shape)), torch.zeros(shape))


def alone(weight: nn.Parameter, momentum: float = 0.95) -> Muon:
    """Muon over one matrix in one process."""
    group = {"params": [weight], "weight_decay": 0.1, "hidden": True}
    optimizer = Muon([group], 1e-2, momentum, (0.9, 0.999), 1e-8)

    def shards_of(names: object, within: object) -> list[Shard]:
        state = {key: value.view(-1) for key, value in optimizer.state[weight].items() if key != "step"}
        return [Shard(NAME, weight.shape, 0, {WEIGHT: weight.detach().view(-1), **state})]

    optimizer.attach({NAME: weight.shape}, shards_of, Ranks(torch.device("cpu")))
    return optimizer


def trained(optimizer: torch.optim.Optimizer, weight: nn.Parameter, numbers: range = range(10)) -> torch.Tensor:
    for number in numbers:
        weight.grad = drawn((weight.shape[0], weight.shape[1]), 100 + number)
        optimizer.step()
    return weight.detach().clone()


@pytest.mark.parametrize("shape", SHAPES)
def test_it_steps_as_torchs_muon_does_in_fp32(shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    ends = {}
    for precision in ("fp32", "bf16"):
        weight = nn.Parameter(drawn(shape))
        library = torch.optim.Muon([weight], lr=1e-2, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
        with monkeypatch.context() as patch:
            if precision == "fp32":
                patch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)
            ends[precision] = trained(library, weight)
    weight, other = nn.Parameter(drawn(shape)), nn.Parameter(drawn(shape))
    measured = trained(alone(weight), weight)
    torch.testing.assert_close(measured, ends["fp32"], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(measured, ends["bf16"], rtol=0, atol=0.01)
    assert (measured - ends["bf16"]).abs().max() > 1e-5  # control: torch's own precision is another
    assert (trained(alone(other, 0.9), other) - measured).abs().max() > 1e-4


def test_a_saved_momentum_goes_on_bit_for_bit() -> None:
    weight = nn.Parameter(drawn((24, 16)))
    optimizer = alone(weight)
    half = trained(optimizer, weight, range(5))
    momentum = optimizer.state[weight]["momentum_buffer"].clone()
    expected = trained(optimizer, weight, range(5, 10))
    resumed, lost = nn.Parameter(half.clone()), nn.Parameter(half.clone())
    fresh = alone(resumed)
    fresh.state[resumed] = empty_state(fresh, resumed, ["momentum_buffer"], 5.0)
    fresh.state[resumed]["momentum_buffer"].copy_(momentum)
    assert torch.equal(trained(fresh, resumed, range(5, 10)), expected)
    assert not torch.equal(trained(alone(lost), lost, range(5, 10)), expected)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_full_matrix_takes_what_the_plan_counts(shape: tuple[int, int]) -> None:
    """The gathered matrix, and what the iteration holds beside it, but for a norm and its like."""
    matrix = drawn(shape)
    with PeakMemoryMode([matrix]) as live:
        orthogonalized(matrix)
    assert 0 <= matrix.numel() + live.peaks.highest / 4 - held_elements(shape) <= 8


@pytest.mark.parametrize("method", ["full", "lora"])
def test_each_weight_has_the_state_of_its_kind(method: str, tmp_path: Path) -> None:
    with steps(tmp_path, 2, packing=True, method=method, optim="muon") as taken:
        taken.take(0)
        shards = {shard.name: shard for shard in taken.context.backend.shards()}
    kinds = {name: sorted(shard.tensors.keys() - {WEIGHT}) for name, shard in shards.items()}
    adam = ["exp_avg", "exp_avg_sq"]
    assert {
        name: ["momentum_buffer"] if is_hidden_matrix(name, shards[name].shape) else adam for name in kinds
    } == kinds
    by_adam = [name for name, keys in kinds.items() if keys == adam]
    assert {shard.step for shard in shards.values()} == {1.0}
    if method == "lora":
        assert by_adam == []
    else:
        assert {"model.embed_tokens.weight", "model.norm.weight"} <= set(by_adam)
        assert not [name for name in by_adam if ".layers." in name and "norm" not in name]


def test_groups_have_decay_rate_and_kind() -> None:
    shapes = {
        "model.embed_tokens.weight": torch.Size([8, 4]), NAME: torch.Size([4, 4]), "model.norm.weight": torch.Size([4]),
        "model.layers.0.q_proj.lora_A.default.weight": torch.Size([2, 4]),
        "model.layers.0.q_proj.lora_B.default.weight": torch.Size([4, 2]),
        "model.layers.0.mixer.A_log": torch.Size([4, 2]), "lm_head.weight": torch.Size([8, 4]),
    }  # fmt: skip
    weights = [(name, nn.Parameter(torch.zeros(shape))) for name, shape in shapes.items()]
    settings = config("lora", True, optim="muon", loraplus_lr_ratio=8.0, weight_decay=0.1)
    groups = parameter_groups(weights, shapes, settings)
    kinds = {id(weight): (group["hidden"], group["rate_factor"]) for group in groups for weight in group["params"]}
    assert [kinds[id(weight)] for _, weight in weights] == [
        (False, 1), (True, 1), (False, 8), (True, 1), (True, 8), (False, 1), (False, 1),
    ]  # fmt: skip


def test_stacks_of_experts_are_refused() -> None:
    name = "model.layers.0.mlp.experts.gate_up_proj"
    weights = [(name, nn.Parameter(torch.zeros(2, 4, 4)))]
    with pytest.raises(ConfigError, match=r"optim=muon: .*experts\.gate_up_proj stacks the experts"):
        parameter_groups(weights, {name: torch.Size([2, 4, 4])}, config("full", True, optim="muon"))
    assert parameter_groups(weights, {name: torch.Size([2, 4, 4])}, config("full", True, optim="lion"))


@pytest.mark.parametrize("finite", [True, False])
def test_a_scaler_skips_a_step_that_is_not_finite(finite: bool) -> None:
    """Fused AdamW says that it does so itself, in its kernel, which Muon's matrices do not go through."""
    weight, plain = nn.Parameter(drawn((24, 16))), nn.Parameter(drawn((24, 16)))
    optimizer, scaler = alone(weight), torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(torch.zeros(()))  # sets it up
    weight.grad = drawn((24, 16), 100) * 1024
    if not finite:
        weight.grad[0, 0] = float("inf")
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    expected = trained(alone(plain), plain, range(1)) if finite else drawn((24, 16))
    assert torch.equal(weight.detach(), expected)
    assert bool(optimizer.state[weight]) is finite


@pytest.mark.parametrize(
    ("kind", "config", "outside"),
    [
        ("BertLMHeadModel", BertConfig, {"embeddings", "cls"}),
        ("RobertaForCausalLM", RobertaConfig, {"embeddings", "lm_head"}),
        ("GPT2LMHeadModel", GPT2Config, {"wte", "wpe"}),
    ],
)
def test_the_matrices_of_layers_are_known_by_the_names_of_each_family(
    kind: str, config: Any, outside: set[str]
) -> None:
    """BERT's kin say `encoder.layer.0`."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    model = getattr(transformers, kind)(config(**sizes, vocab_size=40, max_position_embeddings=24))
    matrices = {name for name, weight in model.named_parameters() if weight.dim() == 2}
    hidden = {name for name in matrices if is_hidden_matrix(name, (2, 2))}
    others = {name for name in matrices if outside & set(name.split("."))}
    assert (hidden, len(others) >= 2) == (matrices - others, True)
    assert {layer_of(name) for name in hidden} == {0, 1}
