"""The micro-batch of a run that names none: the largest with which its global batch divides. Imports no torch.

Global batch, and with it the model, stay as they are: a micro-batch changes speed and memory alone.
"""

from __future__ import annotations

from trainers.config.options import TrainConfig
from trainers.strategy.pipeline_schedules import micro_batch_mistake
from trainers.strategy.strategy import Strategy

OPTION = "per_device_train_batch_size"


def fit_micro_batch(config: TrainConfig, strategy: Strategy) -> TrainConfig:
    """The config with the largest micro-batch, at most its own, that divides; as it is where none does.

    Args:
        config: validated.
        strategy: resolved for its processes.
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
    """One line that says which micro-batch was chosen, and why."""
    ranks = strategy.data_parallel_size
    return (
        f"{OPTION}={after.per_device_train_batch_size} instead of {before.per_device_train_batch_size}: "
        f"global_batch_size={after.global_batch_size} is shared by {ranks} data-parallel rank{'s' * (ranks > 1)}"
    )
