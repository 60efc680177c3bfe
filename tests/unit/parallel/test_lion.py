"""Lion: the steps of its library, bit for bit, and its state through a checkpoint's format."""

from __future__ import annotations

import lion_pytorch
import torch
from torch import nn

from tests.parity.runs import config
from trainers.parallel.lion import Lion
from trainers.parallel.optimizer import build_optimizer, empty_state, state_vectors


def start() -> nn.Parameter:
    return nn.Parameter(torch.randn(30, 17, generator=torch.Generator().manual_seed(0)))


def trained(optimizer: torch.optim.Optimizer, weight: nn.Parameter, steps: range = range(20)) -> torch.Tensor:
    for step in steps:
        weight.grad = torch.randn(weight.shape, generator=torch.Generator().manual_seed(100 + step))
        optimizer.step()
    return weight.detach().clone()


def ours(weight: nn.Parameter, **changes: float) -> torch.optim.Optimizer:
    settings = config("full", True, optim="lion", learning_rate=1e-3, **changes)
    return build_optimizer([{"params": [weight], "weight_decay": 0.1}], settings)


def test_it_steps_as_its_library_does() -> None:
    weight = start()
    library = lion_pytorch.Lion([weight], lr=1e-3, betas=(0.9, 0.99), weight_decay=0.1)
    expected = trained(library, weight)
    same, other = start(), start()
    assert torch.equal(trained(ours(same), same), expected)
    assert not torch.equal(trained(ours(other, lion_beta2=0.999), other), expected)


def test_a_weight_without_a_gradient_stays() -> None:
    weight, unused = start(), start()
    optimizer = Lion([{"params": [weight, unused], "weight_decay": 0.1}], 1e-3, (0.9, 0.99))
    trained(optimizer, weight)
    assert torch.equal(unused, start())
    assert unused not in optimizer.state


def test_a_saved_momentum_goes_on_bit_for_bit() -> None:
    weight = start()
    optimizer = ours(weight)
    half = trained(optimizer, weight, range(10))
    saved = {key: vector.clone() for key, vector in state_vectors(optimizer.state[weight]).items()}
    assert {key: vector.numel() for key, vector in saved.items()} == {"exp_avg": weight.numel()}
    expected = trained(optimizer, weight, range(10, 20))

    lost = nn.Parameter(half.clone())
    assert not torch.equal(trained(ours(lost), lost, range(10, 20)), expected)
    resumed = nn.Parameter(half.clone())
    fresh = ours(resumed)
    fresh.state[resumed] = empty_state(fresh, resumed, list(saved), 10.0)
    for key, vector in state_vectors(fresh.state[resumed]).items():
        vector.copy_(saved[key])
    assert torch.equal(trained(fresh, resumed, range(10, 20)), expected)
    assert float(fresh.state[resumed]["step"]) == 20
