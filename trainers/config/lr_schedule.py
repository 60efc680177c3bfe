"""The learning rate as a pure function of the step; there is no scheduler state to save or to advance twice."""

from __future__ import annotations

import math

from trainers.config.options import TrainConfig


def learning_rate(config: TrainConfig, step: int, total_steps: int) -> float:
    """Learning rate of optimizer step `step` (from 0) out of `total_steps`."""
    peak, kind = config.scaled_learning_rate(), config.lr_scheduler_type
    warmup = config.warmup_steps or math.ceil(config.warmup_ratio * total_steps)
    if step < warmup:
        return peak * (step + 1) / warmup
    if kind == "constant":
        return peak
    if kind == "inverse_sqrt":
        return peak * math.sqrt(max(warmup, 1) / (step + 1)) if step + 1 > max(warmup, 1) else peak
    start = warmup
    if kind == "warmup_stable_decay":
        start = max(warmup, stable_steps(total_steps, config.lr_decay_ratio))
    done = max(0, step - start) / max(1, total_steps - start)
    return peak * (config.min_lr_ratio + (1 - config.min_lr_ratio) * _remaining(config, done))


def stable_steps(total_steps: int, decay_ratio: float) -> int:
    """Steps of `warmup_stable_decay` before its decay."""
    return total_steps - math.ceil(round(decay_ratio * total_steps, 6))  # 0.07 * 100 is above 7


def _remaining(config: TrainConfig, done: float) -> float:
    """Share of the way from the final to the peak rate that is left when a share `done` of the decay is over."""
    kind = config.lr_decay_type if config.lr_scheduler_type == "warmup_stable_decay" else config.lr_scheduler_type
    if kind == "cosine_with_restarts":
        return 0.5 * (1 + math.cos(math.pi * (config.lr_num_cycles * done % 1)))
    if kind == "cosine":
        return 0.5 * (1 + math.cos(math.pi * done))
    if kind == "1-sqrt":
        return 1 - math.sqrt(done)
    return (1 - done) ** (config.lr_power if kind == "polynomial" else 1)
