"""Checks whether tensor parallelism supports a model config. Imports no torch, so that it can run before any launch."""

from __future__ import annotations

from math import gcd
from typing import Any

from trainers.strategy.traffic import by_layer

BY_HEADS = {"colwise", "rowwise", "replicated_with_grad_allreduce"}
"""Plan styles of blocks in which each rank computes its own heads or channels."""
GATHERED = {"colwise_gather_output", "rowwise_split_input"}
"""Plan styles of blocks in which every rank computes the same between the linear layers."""
_OTHER_WAY = "use tp_size=1, with fsdp2 for instance, which cuts any model"


def layer_plan(config: Any) -> dict[str, str]:
    """Returns the style of each layer in transformers' tensor-parallel plan; empty if the model has none.

    Leaves out the embedding, which is always sharded by vocabulary; some transformers versions list it if it is tied.
    """
    plan = getattr(config, "base_model_tp_plan", None) or {}
    return {name: word for name, word in plan.items() if name != "embed_tokens"}


def refusals(config: Any, tp_size: int) -> list[str]:
    """Returns the reasons why a model cannot be split over `tp_size` ranks, one line each; empty if it can.

    Args:
        config: Transformers config of the language model (`get_text_config()` of a vision-language model).
        tp_size: Ranks that share each layer.
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
        "{} key-value heads": gcd(*(count or heads for count in by_layer(config, "num_key_value_heads"))),
        "an intermediate_size of {}": config.intermediate_size,
    }
    common = gcd(*sizes.values())
    ways = [str(size) for size in range(1, common + 1) if common % size == 0]
    use = " or ".join([", ".join(ways[:-1]), ways[-1]] if len(ways) > 1 else ways)
    return [
        f"{option}: {kind} has {problem.format(size)}; use {use}" for problem, size in sizes.items() if size % tp_size
    ]
