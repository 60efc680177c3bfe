"""The numbers of NEFTune's noise: as large as its paper says, uniform, and of each token alone."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from tests.parity.test_noise import noise
from trainers.data.noise import NoiseRule, TokenNoise


def of_document(number: int, length: int, channels: int, step: int = 3, seed: int = 7) -> torch.Tensor:
    rule = NoiseRule(5.0, seed)
    keys = rule.keys(step, np.full(length, number, dtype=np.int32), np.arange(length))
    batch = TokenNoise(torch.from_numpy(keys)[None], torch.full((1, length), length), rule.alpha)
    return batch.added_to(torch.zeros(1, length, channels))[0]


@pytest.mark.parametrize(("seed", "step", "number"), [(0, 0, 0), (42, 999_999, 2**31 - 1), (2**32 - 1, 1, 17)])
def test_the_numbers_are_those_of_splitmix(seed: int, step: int, number: int) -> None:
    torch.testing.assert_close(of_document(number, 9, 33, step, seed), noise(seed, step, number, 9, 33, 5.0))


def test_noise_is_uniform_and_of_the_size_of_the_paper() -> None:
    values, limit = of_document(1, 512, 256), 5 / math.sqrt(512 * 256)
    assert 0.999 * limit < values.abs().max() <= limit * (1 + 1e-6)
    assert values.mean().abs() < 0.01 * limit
    assert values.std() == pytest.approx(limit / math.sqrt(3), rel=0.01)
    counts = torch.histc(values, 16, -limit, limit)
    assert (counts - counts.mean()).abs().max() < 0.05 * counts.mean()
    neighbours = torch.corrcoef(torch.stack([values[:-1].flatten(), values[1:].flatten()]))[0, 1]
    assert neighbours.abs() < 0.01


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_no_step_warns_of_an_overflow() -> None:
    NoiseRule(5.0, 2**32 - 1).keys(10**9, np.arange(4, dtype=np.int32), np.arange(4))


def test_every_part_of_the_key_makes_other_noise() -> None:
    first = of_document(1, 6, 8)
    others = [of_document(2, 6, 8), of_document(1, 6, 8, step=4), of_document(1, 6, 8, seed=8), first.flip(0)]
    assert all(not torch.isclose(first, other).any() for other in others)


def test_padding_gets_none_and_half_precision_keeps_its_dtype() -> None:
    keys, lengths = torch.arange(6)[None], torch.tensor([[4, 4, 4, 4, 0, 0]])
    embeddings = torch.ones(1, 6, 3, dtype=torch.bfloat16)
    noisy = TokenNoise(keys, lengths, 50.0).added_to(embeddings)
    assert noisy.dtype == torch.bfloat16
    assert torch.equal(noisy[:, 4:], embeddings[:, 4:])
    assert not torch.equal(noisy[:, :4], embeddings[:, :4])
