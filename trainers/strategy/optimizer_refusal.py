"""Why a strategy cannot train with an optimizer. Imports no torch."""

from __future__ import annotations

from trainers.config.optimizer_options import SCHEDULE_FREE
from trainers.config.options import TrainConfig


def optimizer_refusal(
    config: TrainConfig, uses_deepspeed: bool, uses_fsdp1: bool, offload: str, own_optimizer: bool, states_on: str
) -> str | None:
    """Returns why a strategy cannot train with the config's optimizer; None if it can.

    Args:
        config: The run's config.
        uses_deepspeed: Whether DeepSpeed updates the weights.
        uses_fsdp1: Whether FSDP 1 shards them.
        offload: Where weights or states rest: `none`, or in host memory (`cpu`) or on a disk (`nvme`).
        own_optimizer: Whether the DeepSpeed JSON configures an optimizer.
        states_on: Where the optimizer's states rest, as for `offload`.
    """
    offloads = offload != "none"
    if config.ema_decay is not None and states_on == "nvme":
        average = f"ema_decay={config.ema_decay}: the moving average is not offloaded to a disk"
        return f"{average}; leave it out, or use --strategy zero3_offload"
    if config.optim in ("muon", "adafactor") and offloads:
        return f"optim={config.optim}: its matrices are not offloaded; use optim=adamw, or a strategy without offload"
    if config.optim == SCHEDULE_FREE and (uses_deepspeed or uses_fsdp1):
        keeps = f"of which {'DeepSpeed' if uses_deepspeed else 'FSDP 1'} keeps copies"
        return f"optim={config.optim} evaluates other weights than it trains, {keeps}; use --strategy fsdp2"
    if not uses_deepspeed:
        return None
    if config.small_optimizer():
        return (
            "DeepSpeed keeps weights and Adam's states itself, in fp32; leave out optim=adamw_8bit and "
            "master_weights=false, or use --strategy fsdp2"
        )
    if config.optim == "adamw":
        return None
    optim = f"optim={config.optim}"
    if own_optimizer:
        return f"{optim}: the DeepSpeed JSON has an optimizer too; remove one of them"
    if offloads:  # Accelerate would put DeepSpeed's Adam in its place
        return f"{optim}: DeepSpeed's offload updates by its own Adam; use optim=adamw, or a strategy without offload"
    return None
