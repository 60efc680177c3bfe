"""Why a strategy cannot train with an optimizer. Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainers.config.options import TrainConfig

if TYPE_CHECKING:
    from trainers.strategy.strategy import Strategy


def optimizer_refusal(strategy: Strategy, config: TrainConfig) -> str | None:
    """Returns why a strategy cannot train with the config's optimizer; None if it can."""
    if config.optim == "muon" and strategy.offload != "none":
        return "optim=muon: its matrices are not offloaded; use optim=adamw, or a strategy without offload"
    if strategy.distributed_type != "DEEPSPEED":
        return None
    if config.small_optimizer():
        return (
            "DeepSpeed keeps weights and Adam's states itself, in fp32; leave out optim=adamw_8bit and "
            "master_weights=false, or use --strategy fsdp2"
        )
    if config.optim == "adamw":
        return None
    optim = f"optim={config.optim}"
    if "optimizer" in strategy.deepspeed_json:
        return f"{optim}: the DeepSpeed JSON has an optimizer too; remove one of them"
    if strategy.offload != "none":  # Accelerate would put DeepSpeed's Adam in its place
        return f"{optim}: DeepSpeed's offload updates by its own Adam; use optim=adamw, or a strategy without offload"
    return None
