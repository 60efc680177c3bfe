"""The learning rate as a pure function of the step; there is no scheduler state to save or to advance twice."""

from __future__ import annotations

import math

from trainers.config.options import TrainConfig


def learning_rate(config: TrainConfig, step: int, total_steps: int) -> float:
    """Learning rate of optimizer step `step` (from 0) out of `total_steps`."""
    peak = config.scaled_learning_rate()
    warmup = config.warmup_steps or math.ceil(config.warmup_ratio * total_steps)
    if step < warmup:
        return peak * (step + 1) / warmup
    done = (step - warmup) / max(1, total_steps - warmup)
    floor, kind = config.min_lr_ratio, config.lr_scheduler_type
    if kind == "linear":
        return peak * (floor + (1 - floor) * (1 - done))
    if kind == "cosine":
        return peak * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * done)))
    if kind == "inverse_sqrt":
        return peak * math.sqrt(max(warmup, 1) / (step + 1)) if step + 1 > max(warmup, 1) else peak
    return peak
