"""Which rank is slow: each one's time in work that waits for no other, compared over the ranks.

In a step all ranks take the same time, since the quick ones wait for the slow. What tells them apart is what needs no
other: the wait for data, the first forward pass where the strategy cuts no weights, and a small product of matrices.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

SLOW = 1.5
"""Times the median of the others from which a rank is called slow."""
SHARE = 0.05
"""Share of the training time that it must cost."""
LEAST_SECONDS, LEAST_LOOKS = 5.0, 5
"""Training time and logged rows that a verdict is of: less is noise."""
LEAST_PRODUCT = 2e-4
"""Seconds by which a slow product is slower at least: what is less is the clock's."""
_SIZE = 256


class Taken(NamedTuple):
    """What a rank measured since the last verdict.

    Args:
        training: seconds of training.
        alone: seconds of them in work that waits for no other rank.
        product: seconds for all products of matrices.
        looks: logged rows.
    """

    training: float = 0.0
    alone: float = 0.0
    product: float = 0.0
    looks: int = 0


class Pace:
    """Measures this rank, and compares it with the others.

    Args:
        device: where it computes.
        alone_in_forward: whether the first forward pass of a step waits for no other rank.
    """

    def __init__(self, device: torch.device, alone_in_forward: bool):
        self.alone_in_forward = alone_in_forward and device.type == "cpu"  # on a GPU a pass only queues kernels
        self.matrix = torch.ones(_SIZE, _SIZE, device=device)
        self.taken = Taken()

    @contextmanager
    def alone(self, counts: bool = True) -> Iterator[None]:
        """Time in here waits for no other rank."""
        began = time.perf_counter()
        yield
        if counts:
            self.taken = self.taken._replace(alone=self.taken.alone + time.perf_counter() - began)

    def look(self, training: float) -> Taken:
        """What was measured since the last verdict, `training` more seconds of training included."""
        before = self.taken
        self.taken = Taken(before.training + training, before.alone, before.product + self._product(), before.looks + 1)
        return self.taken

    def _product(self) -> float:
        """Seconds for a small product of matrices, once the device has done what was queued before."""
        (self.matrix @ self.matrix)[0, 0].item()
        began = time.perf_counter()
        for _ in range(4):
            product = self.matrix @ self.matrix
        product[0, 0].item()
        return time.perf_counter() - began

    def verdict(self, taken: list[Taken]) -> dict[int, float]:
        """Each slow rank, and how many times the median of the others it took; begins anew where there is a verdict.

        Args:
            taken: what `look` gave on each rank, alike on all.
        """
        if taken[0].training < LEAST_SECONDS or taken[0].looks < LEAST_LOOKS:
            return {}
        self.taken = Taken()
        return slow_ranks(taken)


def slow_ranks(taken: list[Taken]) -> dict[int, float]:
    """Each slow rank, and how many times the median of the others it took."""
    found: dict[int, float] = {}
    for values, least in (([one.alone for one in taken], SHARE * taken[0].training),
                          ([one.product for one in taken], LEAST_PRODUCT * taken[0].looks)):  # fmt: skip
        for rank, value in enumerate(values):
            others = statistics.median(values[:rank] + values[rank + 1 :] or [0.0])
            if others > 0 and value > SLOW * others and value - others > least:
                found[rank] = max(found.get(rank, 0.0), value / others)
    return found


def slow_warning(rank: int, ratio: float) -> str:
    """The line that names a slow rank, which takes `ratio` times as long as the others."""
    return (
        f"warning: rank {rank} is slow: what it does alone takes {ratio:.1f} times as long as on the others, which "
        "wait for it; look at what else runs there, its clock and its temperature"
    )
