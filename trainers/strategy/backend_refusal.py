"""Why a strategy cannot communicate by a backend. Imports no torch."""

from __future__ import annotations

from trainers.config.options import TrainConfig


def backend_refusal(replicates: bool, config: TrainConfig, has_gpu: bool) -> str | None:
    """Returns why a strategy cannot communicate by the config's backend; None if it can.

    Args:
        replicates: Whether every process has the full model, so that gradients are all that is summed.
        config: The run's config.
        has_gpu: Whether the run uses GPUs.
    """
    if config.ddp_backend == "gloo" and has_gpu and not replicates:
        return "ddp_backend=gloo on GPUs is for ddp, whose collectives it has there; use auto, or --strategy ddp"
    return None
