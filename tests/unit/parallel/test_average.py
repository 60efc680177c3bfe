"""The moving average of weights: updates alone count, and it is in fp32 beside weights and states that are not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.steps import steps
from trainers.parallel.optimizer import KEYS, SMALLEST, Codes, SmallAdamW, empty_state, update_average
from trainers.parallel.shards import WEIGHT


def averages(taken: Any) -> dict[str, torch.Tensor]:
    shards = taken.context.backend.shards()
    return {shard.name: shard.tensors["ema"].clone() for shard in shards if "ema" in shard.tensors}


def test_a_skipped_step_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with steps(tmp_path, 2, packing=True, method="lora", ema_decay=0.5, non_finite="skip") as taken:
        backend = taken.context.backend
        assert taken.take(0).updated
        first = averages(taken)
        weights = {shard.name: shard.tensors[WEIGHT].clone() for shard in backend.shards()}
        assert first
        assert all(torch.equal(first[name], weights[name]) for name in first)  # it begins as the first weights
        with monkeypatch.context() as patch:
            patch.setattr(backend, "clip_grad_norm", lambda limit: torch.tensor(float("inf")))
            assert not taken.take(1).updated
        skipped = averages(taken)
        assert all(torch.equal(first[name], skipped[name]) for name in first)
        assert taken.take(2).updated  # control
        after = averages(taken)
        weights_after = {shard.name: shard.tensors[WEIGHT] for shard in backend.shards()}
        for name, average in after.items():
            torch.testing.assert_close(average, (first[name] + weights_after[name]) / 2, rtol=1e-6, atol=1e-9)
        assert not all(torch.equal(first[name], after[name]) for name in first)


@pytest.mark.parametrize("eight_bit", [False, True])
def test_it_is_in_fp32_beside_states_in_8_bits_and_weights_in_bf16(eight_bit: bool) -> None:
    weight = nn.Parameter(torch.randn(2 * SMALLEST, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16))
    optimizer = SmallAdamW([{"params": [weight]}], 1e-2, (0.9, 0.999), 1e-8, eight_bit, seed=0)
    expected = None
    for number in range(4):
        weight.grad = torch.full_like(weight, float(number + 1))
        optimizer.step()
        update_average([(weight.detach(), optimizer.state[weight])], 0.75)
        now = weight.detach().float()
        expected = now if expected is None else 0.75 * expected + 0.25 * now
    average = optimizer.state[weight]["ema"]
    assert average.dtype == torch.float32
    torch.testing.assert_close(average, expected)
    loaded = empty_state(optimizer, weight, [*KEYS, "ema"], 4.0)
    assert [isinstance(loaded[key], Codes) for key in (*KEYS, "ema")] == [eight_bit, eight_bit, False]


def test_a_weight_without_elements_has_none() -> None:
    state: dict[str, Any] = {}
    update_average([(torch.zeros(0), state)], 0.5)
    assert state == {}
