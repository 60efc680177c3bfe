"""Adafactor: transformers' own steps from spans of any layout, and sums that count each element once."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import torch
from torch import nn
from transformers.optimization import Adafactor as OfTransformers

from trainers.parallel.adafactor import COLUMNS, ROWS, SQUARES, Adafactor, add_sums, factors
from trainers.parallel.ranks import Ranks
from trainers.parallel.shards import WEIGHT, Shard

SHAPES = [(7, 5), (1, 9), (9, 1), (3, 4, 5), (2, 3, 4, 5), (6,), ()]


def drawn(shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def pieces(shape: tuple[int, ...], seed: int) -> list[Shard]:
    """A weight in rectangles along a random dimension, each in spans of random lengths, some of them empty."""
    chance = random.Random(seed)
    dim = chance.randrange(len(shape))
    cut = chance.randint(0, shape[dim])
    shards = []
    for start, stop in ((0, cut), (cut, shape[dim])):
        slices = tuple(slice(start, stop) if d == dim else slice(0, size) for d, size in enumerate(shape))
        numel = torch.Size([side.stop - side.start for side in slices]).numel()
        borders = sorted([0, numel, *(chance.randint(0, numel) for _ in range(4))])
        for first, last in pairwise(borders):
            empty = {WEIGHT: torch.empty(last - first)}
            shards.append(Shard("w", torch.Size(shape), first, empty, slices=slices))
    return [shard for shard in shards if shard.elements]


@pytest.mark.parametrize("shape", [shape for shape in SHAPES if len(shape) > 1])
@pytest.mark.parametrize("seed", range(8))
def test_the_parts_of_a_weight_add_up_to_its_rows_and_columns(shape: tuple[int, ...], seed: int) -> None:
    full = drawn(shape, seed).square() + 0.1
    sums = {ROWS: torch.zeros(shape[:-1]), COLUMNS: torch.zeros(*shape[:-2], shape[-1])}
    shards = pieces(shape, seed)
    for shard in shards:
        values = torch.empty(shard.elements)
        Shard("w", shard.shape, shard.start, {"v": values}, slices=shard.slices).fill("v", full.view(-1))
        add_sums(shard, values, sums)
    torch.testing.assert_close(sums[ROWS], full.sum(-1))
    torch.testing.assert_close(sums[COLUMNS], full.sum(-2))
    expected = OfTransformers._approx_sq_grad(full.mean(-1), full.mean(-2))
    measured = torch.zeros(full.numel())
    means = {ROWS: full.mean(-1), COLUMNS: full.mean(-2)}
    for shard in shards:
        part = torch.zeros(full.numel())
        shard.put(factors(shard, means), part)
        measured += part
    torch.testing.assert_close(measured.view(shape), expected)


def alone(weight: nn.Parameter) -> Adafactor:
    """Adafactor over one weight in one process."""
    group = {"params": [weight], "names": ["w"], "weight_decay": 0.1, "matrix": weight.ndim > 1}
    optimizer = Adafactor([group], 1e-2)

    def shards_of(names: object, within: object) -> list[Shard]:
        state = {key: value.view(-1) for key, value in optimizer.state[weight].items() if key != "step"}
        return [Shard("w", weight.shape, 0, {WEIGHT: weight.detach().view(-1), **state})]

    optimizer.attach({"w": weight.shape}, shards_of, Ranks(torch.device("cpu")))
    return optimizer


@pytest.mark.parametrize("shape", SHAPES)
def test_it_steps_as_transformers_does(shape: tuple[int, ...]) -> None:
    ends = {}
    for kind in ("ours", "theirs", "scaled"):
        weight = nn.Parameter(drawn(shape))
        library = OfTransformers(
            [weight], lr=1e-2, weight_decay=0.1, scale_parameter=kind == "scaled", relative_step=False
        )
        optimizer = alone(weight) if kind == "ours" else library
        for number in range(10):
            weight.grad = drawn(shape, 100 + number) * 10.0 ** (number % 3)
            optimizer.step()
        ends[kind] = weight.detach()
        if kind == "ours":
            state = {*optimizer.state[weight]}
            assert state == ({"step"} if len(shape) > 1 else {"step", SQUARES})
    torch.testing.assert_close(ends["ours"], ends["theirs"], rtol=1e-5, atol=1e-6)
    assert (ends["ours"] - ends["scaled"]).abs().max() > 1e-4  # control


def test_a_gradient_of_zeros_moves_nothing() -> None:
    weight = nn.Parameter(drawn((4, 3)))
    optimizer = alone(weight)
    optimizer.param_groups[0]["weight_decay"] = 0.0
    weight.grad = torch.zeros(4, 3)
    optimizer.step()
    assert torch.equal(weight.detach(), drawn((4, 3)))
