"""Says which mesh sizes a model can be split into, and which cases to count so that all of them follow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from trainers.config.options import TrainConfig
from trainers.strategy.mesh import MeshSizes

MOST = 128
"""Largest size along an axis, and largest number of pipeline stages, that is tried."""
_PART = 8
_LARGE = 32_768
"""A part of a row, as a number of parts, and the tokens of a large micro-batch."""
Refused = Callable[[Any, MeshSizes, int], str | None]


def mesh_limits(model_config: Any, refused: Refused) -> dict[str, dict[str, str | None]]:
    """Returns by axis and size why a model cannot be split so, or None if it can; `stages` stands for those of pp.

    Args:
        model_config: Transformers config of the model.
        refused: `trainers.tools.memory_estimate.refused`.
    """
    sizes = range(2, MOST + 1)
    limits = {axis: {str(size): refused(model_config, MeshSizes(**{axis: size}), 1) for size in sizes}
              for axis in ("tp", "cp", "sp", "ep")}  # fmt: skip
    return limits | {"stages": {str(size): refused(model_config, MeshSizes(), size) for size in sizes}}


def basis_cases(limits: dict[str, dict[str, str | None]], config: TrainConfig, most_tp: int) -> list[str]:
    """Returns the cases from which those of every mesh and micro-batch follow.

    Memory is linear in the share of each matrix, 1 / tp, so two sizes suffice; and piecewise linear in the tokens of a
    micro-batch, where a few points are close to it: part of a row, a row, the user's micro-batch, and a large one.

    Args:
        limits: Result of `mesh_limits`.
        config: The training config.
        most_tp: The largest tp to plan for.
    """
    splits = [int(size) for size, reason in limits["tp"].items() if reason is None and int(size) <= most_tp]
    large = min(config.global_batch_size, _LARGE // config.example_tokens)
    rows = sorted({1, config.per_device_train_batch_size, max(2, large)})
    parts = [f"{_PART}:1:1:1", *(f"1:1:1:{count}" for count in rows)]
    return [f"{tp}:{part}" for tp in (1, *splits[-1:]) for part in parts]
