"""What a method of training weights cannot do under a mesh. Imports no torch."""

from __future__ import annotations

from trainers.config.options import TrainConfig
from trainers.strategy.mesh import MeshSizes


def method_refusal(sizes: MeshSizes, config: TrainConfig, uses_deepspeed: bool) -> str | None:
    """Returns why a strategy cannot train the weights that a config names; None if it can.

    Args:
        sizes: The strategy's mesh.
        config: The run's config.
        uses_deepspeed: Whether DeepSpeed updates the weights.
    """
    if config.qat != "none" and (uses_deepspeed or sizes.tp * sizes.pp * sizes.ep > 1):
        strategy = "DeepSpeed" if uses_deepspeed else str(sizes)
        return f"qat={config.qat} with {strategy}: layers that round were not tried so; use single, ddp or fsdp2"
    if config.method == "full" or sizes.tp * sizes.pp * sizes.ep == 1:
        return None
    if config.method == "qlora":
        return f"method=qlora with {sizes}: 4-bit layers are not split so; use method=lora, or fsdp2"
    if sizes.tp * sizes.pp == 1:  # ep divides experts alone, and what is trained beside them is as under ddp
        return None
    if config.modules_to_save:
        names = ",".join(config.modules_to_save)
        return f"modules_to_save={names} with {sizes}: modules saved with adapters are not split so; use fsdp2"
    if config.lora_target_parameters:
        names = ",".join(config.lora_target_parameters)
        return f"lora_target_parameters={names} with {sizes}: adapters on stacks of experts are not split; use fsdp2"
    if config.new_tokens:
        tokens = ",".join(config.new_tokens)
        return f"new_tokens={tokens} with adapters and {sizes}: the rows of tokens are not split so; use fsdp2"
    if config.use_dora and sizes.tp > 1:
        return f"use_dora=true with {sizes}: DoRA needs the norms of weights that no rank has in full; use fsdp2"
    return None
