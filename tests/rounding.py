"""How far rounding alone moves a result: the same work on one process, its sums in another order.

A layout of ranks adds up the same numbers in another order. How far that moves a gradient is up to the model, the data
and the machine's kernels, so a test takes its bound from such a control and not from a constant. It compares losses,
gradient norms and gradients; weights only where an update is no steeper in the gradient than `STEADY` has it, as AdamW
makes as much as it likes of rounding where a gradient is near zero.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

ORDERS = ("backwards", "halves")
STEADY = {"learning_rate": 1e-2, "adam_epsilon": 1e-2}
"""AdamW whose update changes by no more than the gradient does, as that of SGD with a learning rate of 1."""

FACTOR = 8
_PRODUCTS = {torch.ops.aten.mm.default, torch.ops.aten.bmm.default, torch.ops.aten.addmm.default}


class _Reordered(TorchDispatchMode):
    """Matrix products that add up backwards, or half by half as tensor parallelism does, forward and backward."""

    def __init__(self, order: str):
        super().__init__()
        self.order = order

    def __torch_dispatch__(self, function: Any, types: Any, inputs: Any = (), named: Any = None) -> Any:
        named = named or {}
        if function not in _PRODUCTS or named:
            return function(*inputs, **named)
        *bias, left, right = inputs
        if self.order == "backwards":
            return function(*bias, left.flip(-1), right.flip(-2))
        half = left.shape[-1] // 2
        first = function(*bias, left[..., :half], right[..., :half, :])
        return first + left[..., half:] @ right[..., half:, :]


@contextmanager
def reordered(order: str | None) -> Iterator[None]:
    """Matrix products in here add up in another order, one of `ORDERS`; None leaves them as they are."""
    if order is None:
        yield
        return
    with _Reordered(order):
        yield


def relative(mine: torch.Tensor, expected: torch.Tensor, floor: float = 1e-6) -> float:
    """The largest difference beside the largest value, or beside `floor` where all values are smaller."""
    difference, largest = (mine - expected).detach().abs().max(), expected.detach().abs().max()
    return float(difference / largest.clamp(min=floor))


def bound(*spreads: float, dtype: torch.dtype = torch.float32) -> float:
    """The largest relative difference that rounding explains.

    Args:
        spreads: relative differences of one process from itself in other orders of sums.
        dtype: what is computed in; a spread below two units in its last place is luck.
    """
    return FACTOR * max(*spreads, 2 * torch.finfo(dtype).eps)
