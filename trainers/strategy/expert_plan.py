"""Checks whether expert parallelism can divide a model. Imports no torch, so that it can run before any launch."""

from __future__ import annotations

from typing import Any

EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts", "num_routed_experts")
SHARD, DISPATCH = "grouped_gemm", "ep_dispatch_experts"
"""Styles of transformers' expert-parallel plan: weights stacked by expert, and the module that they are in."""


def largest_of(text_config: Any, names: tuple[str, ...]) -> int:
    """Returns the largest of the numbers that a config has under these names; 0 without any."""
    counts = (getattr(text_config, name, None) for name in names)
    return max((count for count in counts if isinstance(count, int)), default=0)


def expert_plan(config: Any) -> dict[str, str]:
    """Returns the style of each module and weight in transformers' expert-parallel plan; empty if there is none.

    Args:
        config: Transformers config of the language model.
    """
    return dict(getattr(config, "base_model_ep_plan", None) or {})


def expert_refusals(config: Any, ep_size: int) -> list[str]:
    """Returns the reasons why the experts of a model cannot be divided over `ep_size` ranks; empty if they can.

    Args:
        config: Transformers config of the language model (`get_text_config()` of a vision-language model).
        ep_size: Ranks that share the experts of each layer.
    """
    if ep_size == 1:
        return []
    option, kind = f"ep_size={ep_size}", config.model_type
    experts, plan = largest_of(config, EXPERT_COUNTS), expert_plan(config)
    if experts < 2:
        this = "this " if plan else ""
        return [f"{option}: ep divides experts, and {this}{kind} has none; use ddp"]
    if not plan:
        return [f"{option}: transformers has no expert-parallel plan for {kind}; use ddp or fsdp2"]
    if strange := sorted(set(plan.values()) - {SHARD, DISPATCH}):
        return [f"{option}: the plan of {kind} has {', '.join(strange)}, which is not supported; use ddp or fsdp2"]
    if experts % ep_size:
        sizes = [str(size) for size in range(2, experts + 1) if experts % size == 0]
        return [f"{option} does not divide the {experts} experts of {kind}; use {' or '.join(sizes)}"]
    return []
