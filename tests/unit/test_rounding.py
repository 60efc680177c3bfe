"""The controls that bounds come from: another order of sums is other rounding and nothing else."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.rounding import ORDERS, STEADY, relative, reordered


def outcome(order: str | None, dtype: torch.dtype) -> list[torch.Tensor]:
    """Output and gradients of two layers, one with a bias, and of a product of batches."""
    made = torch.Generator().manual_seed(0)
    shapes = ((6, 50, 33), (40, 33), (40,), (33, 40))
    leaves = [torch.randn(*shape, generator=made, dtype=torch.float64).to(dtype) for shape in shapes]
    for one in leaves:
        one.requires_grad_()
    rows, first, bias, second = leaves
    with reordered(order):
        hidden = functional.linear(functional.linear(rows, first, bias), second)
        output = hidden @ rows.transpose(1, 2)
        return [output.detach(), *torch.autograd.grad(output.square().sum(), leaves)]


@pytest.mark.parametrize("order", ORDERS)
def test_another_order_is_other_rounding_and_nothing_else(order: str) -> None:
    pairs = list(zip(outcome(order, torch.float64), outcome(None, torch.float64), strict=True))
    assert all(relative(mine, plain) < 1e-12 for mine, plain in pairs)
    assert not any(torch.equal(mine, plain) for mine, plain in pairs), "the backward pass too"
    pairs = list(zip(outcome(order, torch.float32), outcome(None, torch.float32), strict=True))
    assert all(0 < relative(mine, plain) < 1e-4 for mine, plain in pairs)


@pytest.mark.parametrize("size", [0, 1])
def test_a_product_with_nothing_to_reorder_stays(size: int) -> None:
    left, right = torch.randn(3, size), torch.randn(size, 4)
    for order in ORDERS:
        with reordered(order):
            found = left @ right
        assert torch.equal(found, left @ right)


def update(gradient: float, epsilon: float) -> float:
    """What AdamW's first step makes of a gradient."""
    weight = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    weight.grad = torch.full_like(weight, gradient)
    torch.optim.AdamW([weight], lr=STEADY["learning_rate"], eps=epsilon, weight_decay=0.0).step()
    return float(weight.detach())


@pytest.mark.parametrize("gradient", [0.0, 1e-9, -1e-6, 1e-3, 0.5])
def test_a_steady_update_makes_no_more_of_rounding_than_there_is(gradient: float) -> None:
    rounding = 1e-7
    steps = [update(gradient + error, STEADY["adam_epsilon"]) for error in (-rounding, rounding)]
    assert abs(steps[0] - steps[1]) <= 2 * rounding * (1 + 1e-6)


def test_plain_adamw_makes_much_of_rounding_near_zero() -> None:
    """Control: a gradient of nothing but rounding moves the weight by the whole learning rate."""
    assert abs(update(1e-7, 1e-8)) > 0.9 * STEADY["learning_rate"]
