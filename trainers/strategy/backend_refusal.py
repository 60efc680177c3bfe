"""Why a strategy cannot communicate by a backend. Imports no torch."""

from __future__ import annotations

from typing import Protocol

from trainers.config.options import TrainConfig


class _Kind(Protocol):
    """What counts of a strategy."""

    @property
    def distributed_type(self) -> str: ...

    @property
    def has_mesh(self) -> bool: ...


def backend_refusal(strategy: _Kind, config: TrainConfig, has_gpu: bool) -> str | None:
    """Returns why a strategy cannot communicate by the config's backend; None if it can."""
    replicates = strategy.distributed_type in ("NO", "MULTI_GPU") and not strategy.has_mesh
    if config.ddp_backend == "gloo" and has_gpu and not replicates:
        return "ddp_backend=gloo on GPUs is for ddp, whose collectives it has there; use auto, or --strategy ddp"
    return None
