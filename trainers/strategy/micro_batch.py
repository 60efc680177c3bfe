"""Chooses the micro-batch size when the user sets none: the largest that divides the global batch. Imports no torch.

The micro-batch only affects speed and memory; the global batch, and so the trained model, stays the same.
"""

from __future__ import annotations

from trainers.config.options import TrainConfig
from trainers.strategy.pipeline_schedules import micro_batch_mistake
from trainers.strategy.strategy import Strategy

OPTION = "per_device_train_batch_size"


def fit_micro_batch(config: TrainConfig, strategy: Strategy) -> TrainConfig:
    """Returns the config with the largest micro-batch, up to the configured one, that divides the global batch.

    The config is returned unchanged if there is none.

    Args:
        config: A validated config.
        strategy: A strategy resolved for the processes of the run.
    """
    rows, remainder = divmod(config.global_batch_size, strategy.data_parallel_size)
    if remainder:
        return config
    for size in range(min(config.per_device_train_batch_size, rows), 0, -1):
        micro_batches, odd = divmod(rows, size)
        if odd or (strategy.pp_size > 1 and micro_batch_mistake(strategy.pp_schedule, strategy.pp_size, micro_batches)):
            continue
        if size == config.per_device_train_batch_size:
            return config
        return config.model_copy(update={OPTION: size})
    return config


def micro_batch_line(before: TrainConfig, after: TrainConfig, strategy: Strategy) -> str:
    """Returns one line on which micro-batch was chosen, and why."""
    ranks = strategy.data_parallel_size
    return (
        f"{OPTION}={after.per_device_train_batch_size} instead of {before.per_device_train_batch_size}: "
        f"global_batch_size={after.global_batch_size} is shared by {ranks} data-parallel rank{'s' * (ranks > 1)}"
    )
