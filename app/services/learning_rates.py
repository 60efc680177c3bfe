"""The learning rate of a config over its steps, to be drawn."""

from __future__ import annotations

from trainers.config.lr_schedule import learning_rate
from trainers.config.options import TrainConfig

_POINTS = 200
_ANY_TOTAL = 10_000
"""Steps that stand for a run of unknown length, where only shares of it matter."""


def learning_rates(config: TrainConfig, total_steps: int | None) -> list[float]:
    """The rates of evenly spaced steps, from the first to the last.

    Args:
        config: the validated config.
        total_steps: None if not known; a warm-up in steps then has no place on the curve, which is empty.
    """
    if total_steps is None and config.warmup_steps:
        return []
    total = total_steps or _ANY_TOTAL
    count = max(2, min(total, _POINTS))
    return [learning_rate(config, round(at * (total - 1) / (count - 1)), total) for at in range(count)]
