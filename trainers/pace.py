"""Which rank is slow: each one's time in work that waits for no other, compared over the ranks.

In a step all ranks take the same time, since the quick ones wait for the slow. What tells them apart is what needs no
other: the wait for data, the first forward pass where the strategy cuts no weights, and a small product of matrices.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import torch

SLOW = 1.5
"""Times the median of the others from which a rank is called slow."""
SHARE = 0.05
"""Share of the training time that it must cost."""
LOOKS = 5
"""Logged rows over which the product of matrices is averaged; a single one is noise."""
_SIZE = 256


class Pace:
    """Measures this rank; `slow_ranks` compares.

    Args:
        device: where it computes.
        alone_in_forward: whether the first forward pass of a step waits for no other rank.
    """

    def __init__(self, device: torch.device, alone_in_forward: bool):
        self.device, self.alone_in_forward = device, alone_in_forward and device.type == "cpu"
        self.seconds = 0.0
        self.products: deque[float] = deque(maxlen=LOOKS)
        self.matrix = torch.ones(_SIZE, _SIZE, device=device)

    @contextmanager
    def alone(self, counts: bool = True) -> Iterator[None]:
        """Time in here waits for no other rank."""
        began = time.perf_counter()
        yield
        if counts:
            self.seconds += time.perf_counter() - began

    def take(self) -> tuple[float, float]:
        """Seconds alone since the last call, and the mean time of a product (0 before there are enough)."""
        seconds, self.seconds = self.seconds, 0.0
        self.products.append(self._product())
        return seconds, statistics.mean(self.products) if len(self.products) == LOOKS else 0.0

    def _product(self) -> float:
        """Seconds for a small product of matrices; on a GPU nothing else runs at that moment."""
        began = time.perf_counter()
        for _ in range(4):
            product = self.matrix @ self.matrix
        product[0, 0].item()
        return time.perf_counter() - began


def slow_ranks(taken: list[tuple[float, float]], window: float) -> dict[int, float]:
    """Each slow rank, and how many times the median of the others it took.

    Args:
        taken: what `Pace.take` gave on each rank.
        window: seconds of training that the first numbers are of.
    """
    found: dict[int, float] = {}
    for which, least in ((0, SHARE * window), (1, 0.0)):
        for rank, one in enumerate(taken):
            others = statistics.median([two[which] for other, two in enumerate(taken) if other != rank] or [0.0])
            if others > 0 and one[which] > SLOW * others and one[which] - others > least:
                found[rank] = max(found.get(rank, 0.0), one[which] / others)
    return found
