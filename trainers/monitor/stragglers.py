"""Detects slow ranks by comparing the time that each spends in local work, which waits for no other rank.

All ranks take the same time for a step, since fast ranks wait for slow ones. They differ in local work: the wait for
data, the first forward pass (if the strategy does not shard weights), and a small matrix product.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple

import torch

SLOW = 1.5
"""A rank is slow above this multiple of the median of the others."""
SHARE = 0.05
"""Minimum slowdown, as a fraction of training time."""
LEAST_SECONDS, LEAST_ROWS = 5.0, 5
"""Minimum training time (seconds) and logged rows for a verdict; anything less is noise."""
LEAST_PRODUCT = 2e-4
"""Minimum difference in seconds between matrix products; anything less is below the clock's resolution."""
_SIZE = 256


class Sample(NamedTuple):
    """Measurements of one rank since the last verdict.

    Args:
        training: seconds of training.
        local: seconds of it in work that waits for no other rank.
        product: median of the seconds that a matrix product took, so that one that was interrupted does not count.
        rows: number of logged rows.
    """

    training: float = 0.0
    local: float = 0.0
    product: float = 0.0
    rows: int = 0


class Stragglers:
    """Measures this rank and compares it with the others.

    Args:
        device: device of the matrix product.
        local_forward: whether the first forward pass of a step waits for no other rank.
    """

    def __init__(self, device: torch.device, local_forward: bool):
        self.local_forward = local_forward and device.type == "cpu"  # on a GPU, a forward pass only queues kernels
        self.matrix = torch.ones(_SIZE, _SIZE, device=device)
        self.measured, self.products = Sample(), list[float]()

    @contextmanager
    def local_work(self) -> Iterator[None]:
        """Context manager around work that waits for no other rank."""
        began = time.perf_counter()
        yield
        self.measured = self.measured._replace(local=self.measured.local + time.perf_counter() - began)

    def first_forward(self) -> AbstractContextManager[None]:
        """Context manager around the first forward pass of a step."""
        return self.local_work() if self.local_forward else nullcontext()

    def sample(self, training: float) -> Sample:
        """Adds `training` seconds of training and a matrix product; returns the measurements since the last verdict."""
        before = self.measured
        self.products.append(self._product())
        product = statistics.median(self.products)
        self.measured = Sample(before.training + training, before.local, product, before.rows + 1)
        return self.measured

    def _product(self) -> float:
        """Seconds of a small matrix product, measured after the device has finished its queued work."""
        (self.matrix @ self.matrix)[0, 0].item()  # waits for queued work, and warms up
        began = time.perf_counter()
        for _ in range(4):
            product = self.matrix @ self.matrix
        product[0, 0].item()
        return time.perf_counter() - began

    def verdict(self, samples: list[Sample]) -> dict[int, float]:
        """Slow ranks with their slowdown, or empty if there is too little data; otherwise starts a new measurement.

        Args:
            samples: the results of `sample` of all ranks, the same on every rank.
        """
        if samples[0].training < LEAST_SECONDS or samples[0].rows < LEAST_ROWS:
            return {}
        self.measured, self.products = Sample(), []
        return slow_ranks(samples)


def slow_ranks(samples: list[Sample]) -> dict[int, float]:
    """Slow ranks, and their time as a multiple of the median of the others."""
    ratios: dict[int, float] = {}
    for values, least in (([sample.local for sample in samples], SHARE * samples[0].training),
                          ([sample.product for sample in samples], LEAST_PRODUCT)):  # fmt: skip
        for rank, value in enumerate(values):
            others = statistics.median(values[:rank] + values[rank + 1 :] or [0.0])
            if others > 0 and value > SLOW * others and value - others > least:
                ratios[rank] = max(ratios.get(rank, 0.0), value / others)
    return ratios


def slow_warning(rank: int, ratio: float) -> str:
    """The warning about a slow rank that takes `ratio` times as long as the others."""
    return (
        f"warning: rank {rank} is slow: its local work takes {ratio:.1f} times as long as on the others, which wait "
        "for it; check for other processes there, its clock speed and its temperature"
    )
