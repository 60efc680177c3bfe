"""Numbers of parameters, from which the FLOPs of a step follow (`trainers/monitor/mfu.py`)."""

from __future__ import annotations

from typing import Any

from torch import nn

from trainers.model.experts import expert_share
from trainers.model.reachability import text_parts


def matmul_parameters(model: nn.Module, expert_share: float = 1.0) -> tuple[int, int]:
    """Number of (trained, frozen) parameters in matrix products; includes the output head, not the embedding lookup.

    Args:
        model: the model, or a part of it.
        expert_share: see `trainers.model.experts.expert_share`; counts that much of the experts' weights.
    """
    trained = frozen = 0
    copied: list[Any] = [part for part in model.modules() if "modules_to_save" in part._modules]
    replaced = {id(part.original_module) for part in copied}
    for module in model.modules():
        if id(module) in replaced:  # by a trained copy
            continue
        if isinstance(module, nn.Linear) and module.weight is not None:
            # The weight may be packed or sharded.
            counts = [(module.in_features * module.out_features, module.weight.requires_grad)]
        elif isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
            continue
        else:  # experts, stacked
            stacks = (weight for weight in module.parameters(recurse=False) if weight.ndim == 3)
            counts = [(round(weight.numel() * expert_share), weight.requires_grad) for weight in stacks]
        trained += sum(count for count, trains in counts if trains)
        frozen += sum(count for count, trains in counts if not trains)
    return trained, frozen


def used_matmul_parameters(base: Any) -> tuple[int, int]:
    """`matmul_parameters` that a token of text uses: no vision tower, and of the experts those that it is routed to.

    Args:
        base: the transformers model, with adapters in it or without.
    """
    share = expert_share(base.config.get_text_config())
    counts = [matmul_parameters(part, share) for part in text_parts(base)]
    return sum(trained for trained, _ in counts), sum(frozen for _, frozen in counts)
