"""Medians with their spread, and what may be claimed of a ratio: nothing inside it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

LEAST_TURNS = 6
"""Fewest measurements whose interval has 95 % confidence; it then spans all of them."""


@dataclass(frozen=True)
class Interval:
    """A median, and an interval that contains the true one.

    Attributes:
        low, median, high: In the unit of the measurements.
        confidence: Probability that such an interval contains the median of what was measured, if the measurements are
            independent, whatever their distribution.
        turns: Number of measurements.
    """

    low: float
    median: float
    high: float
    confidence: float
    turns: int

    @classmethod
    def of(cls, values: Sequence[float], confidence: float = 0.95) -> Interval:
        """The narrowest interval between two of the values, at equal rank from either end, of at least this confidence.

        Each value is below the true median with probability 1/2, so the ranks follow the binomial distribution (the
        sign test). With fewer than `LEAST_TURNS` values none has 95 %: it spans all values, with its true confidence.

        Raises:
            ValueError: without values.
        """
        if not values:
            raise ValueError("no measurements")
        ordered, count = sorted(values), len(values)
        rank = max((rank for rank in range(1, count // 2 + 1) if _confidence(count, rank) >= confidence), default=1)
        low, high = ordered[rank - 1], ordered[count - rank]
        return cls(low, statistics.median(ordered), high, _confidence(count, rank), count)

    def verdict(self) -> str:
        """What may be said of a ratio of speeds: `faster`, `slower`, or that no difference was seen."""
        if self.turns < LEAST_TURNS:
            return f"too few turns to say ({self.turns} of {LEAST_TURNS})"
        return "faster" if self.low > 1 else "slower" if self.high < 1 else "no difference seen"

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f} to {self.high:.2f})"


def _confidence(count: int, rank: int) -> float:
    """Probability that the median lies between the values of this rank from below and from above."""
    return 1 - 2 * sum(math.comb(count, below) for below in range(rank)) / 2**count
