"""Schedule-free AdamW: its library's steps and its average, and no rounding on the way there and back."""

from __future__ import annotations

from typing import Any

import pytest
import schedulefree
import torch
from torch import nn

from trainers.parallel.optimizer import empty_state
from trainers.parallel.schedule_free import ScheduleFreeAdamW, averaging_share


def drawn(seed: int = 0) -> torch.Tensor:
    return torch.randn(40, generator=torch.Generator().manual_seed(seed))


def ours(weight: nn.Parameter, warmup_steps: int) -> ScheduleFreeAdamW:
    return ScheduleFreeAdamW([{"params": [weight], "weight_decay": 0.1}], 0.0, (0.9, 0.999), 1e-8, warmup_steps)


def trained(optimizer: Any, weight: nn.Parameter, warmup_steps: int, numbers: range = range(12)) -> torch.Tensor:
    for number in numbers:
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * min(1.0, (number + 1) / max(warmup_steps, 1))
        weight.grad = drawn(100 + number)
        optimizer.step()
    return weight.detach().clone()


@pytest.mark.parametrize("warmup_steps", [0, 1, 5, 30])
def test_it_steps_and_averages_as_its_library_does(warmup_steps: int) -> None:
    weight, other = nn.Parameter(drawn()), nn.Parameter(drawn())
    library = schedulefree.AdamWScheduleFree([other], lr=1e-2, weight_decay=0.1, warmup_steps=warmup_steps)
    library.train()
    for number in range(12):  # the library has a warm-up of its own
        other.grad = drawn(100 + number)
        library.step()
    optimizer = ours(weight, warmup_steps)
    torch.testing.assert_close(trained(optimizer, weight, warmup_steps), other.detach(), rtol=1e-5, atol=1e-6)
    before = weight.detach().clone()
    ((value, copy),) = optimizer.to_average()
    library.eval()
    torch.testing.assert_close(weight.detach(), other.detach(), rtol=1e-5, atol=1e-6)
    assert (weight.detach() - before).abs().max() > 1e-4  # control: another point
    value.copy_(copy)
    assert torch.equal(weight.detach(), before)


@pytest.mark.parametrize("warmup_steps", [0, 1, 4, 100])
def test_the_share_is_that_of_squared_rates(warmup_steps: int) -> None:
    rates = [min(1.0, (number + 1) / max(warmup_steps, 1)) for number in range(20)]
    for count in range(1, 21):
        expected = rates[count - 1] ** 2 / sum(rate**2 for rate in rates[:count])
        assert averaging_share(count, warmup_steps) == pytest.approx(expected)


def test_saved_states_go_on_bit_for_bit() -> None:
    weight = nn.Parameter(drawn())
    optimizer = ours(weight, 8)
    half = trained(optimizer, weight, 8, range(5))
    saved = {key: value.clone() for key, value in optimizer.state[weight].items()}
    expected = trained(optimizer, weight, 8, range(5, 12))
    again, lost = nn.Parameter(half.clone()), nn.Parameter(half.clone())
    fresh = ours(again, 8)
    fresh.state[again] = empty_state(fresh, again, ["exp_avg_sq", "z"], 5.0)
    for key in ("exp_avg_sq", "z"):
        fresh.state[again][key].copy_(saved[key])
    assert torch.equal(trained(fresh, again, 8, range(5, 12)), expected)
    assert not torch.equal(trained(ours(lost, 8), lost, 8, range(5, 12)), expected)


def test_before_the_first_step_there_is_no_average() -> None:
    weight = nn.Parameter(drawn())
    assert ours(weight, 3).to_average() == []
    assert torch.equal(weight.detach(), drawn())
