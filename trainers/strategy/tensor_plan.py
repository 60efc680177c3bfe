"""What tensor parallelism asks of a model's config. Imports no torch, so that it can be asked before any launch."""

from __future__ import annotations

from math import gcd
from typing import Any

BY_HEADS = {"colwise", "rowwise", "replicated_with_grad_allreduce"}
"""Words of a plan whose block computes its own heads or channels on each rank."""
GATHERED = {"colwise_gather_output", "rowwise_split_input"}
"""Words of a plan whose block computes alike on each rank between its linear layers."""
_OTHER_WAY = "use tp_size=1, with fsdp2 for instance, which cuts any model"


def layer_plan(config: Any) -> dict[str, str]:
    """What transformers' plan says of each layer; empty without a plan.

    The vocabulary is left out, as it is always cut by words; some versions name it where head and embedding are tied.
    """
    plan = getattr(config, "base_model_tp_plan", None) or {}
    return {name: word for name, word in plan.items() if name != "embed_tokens"}


def refusals(config: Any, tp_size: int) -> list[str]:
    """Why a model cannot be cut into `tp_size` parts, a line each; empty where it can.

    Args:
        config: the transformers config of the language model (`get_text_config()` of one with a vision tower).
        tp_size: ranks that share each layer.
    """
    if tp_size == 1:
        return []
    option, kind = f"tp_size={tp_size}", config.model_type
    plan = layer_plan(config)
    if not plan:
        return [f"{option}: transformers has no tensor-parallel plan for {kind}; {_OTHER_WAY}"]
    if strange := sorted(set(plan.values()) - BY_HEADS - GATHERED):
        return [f"{option}: the plan of {kind} has {', '.join(strange)}, which is not supported; {_OTHER_WAY}"]
    heads = config.num_attention_heads
    sizes = {
        "{} attention heads": heads,
        "{} key-value heads": getattr(config, "num_key_value_heads", None) or heads,
        "an intermediate_size of {}": config.intermediate_size,
    }
    common = gcd(*sizes.values())
    ways = [str(size) for size in range(1, common + 1) if common % size == 0]
    use = " or ".join([", ".join(ways[:-1]), ways[-1]] if len(ways) > 1 else ways)
    return [
        f"{option}: {kind} has {problem.format(size)}; use {use}" for problem, size in sizes.items() if size % tp_size
    ]
