"""The gradient norm of a model of which each tensor-parallel rank has a part, sharded by FSDP 2 or not."""

from __future__ import annotations

import math
from collections.abc import Container, Iterable
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.tensor import DTensor

from trainers.parallel.shards import local_part


@torch.no_grad()
def global_norm(gradients: Iterable[tuple[str, torch.Tensor]], sliced: Container[str], group: Any) -> torch.Tensor:
    """Norm over every element of the full model once. Collective over `group` and, with DTensors, over FSDP's group.

    Args:
        gradients: by the name of the weight; plain tensors or DTensors of FSDP 2.
        sliced: names of the weights of which each rank of `group` has a part; the others are alike on all of them.
        group: the tensor-parallel ranks; None for none.

    Returns:
        An fp32 scalar, the same on every rank that shares the model. No value is read by the host.
    """
    gradients = list(gradients)
    device = gradients[0][1].device if gradients else None
    # Squares of [those that are sliced, those that are alike], for plain tensors and for what FSDP 2 shards.
    plain, sharded = (
        torch.stack([
            _squares([grad for name, grad in gradients if _is_sharded(grad) is by_fsdp and (name in sliced) is part],
                     device)
            for part in (True, False)
        ])
        for by_fsdp in (False, True)
    )  # fmt: skip
    for _, grad in gradients:
        if isinstance(grad, DTensor) and (dim := _shard_dim(grad)) is not None:
            distributed.all_reduce(sharded, group=grad.device_mesh.get_group(dim))
            break
    # Then the tensor-parallel ranks add what each has a part of, and count once what is alike on them.
    parts, alike = (plain + sharded).unbind()
    parts = parts.clone()
    if group is not None:
        distributed.all_reduce(parts, group=group)
    return (parts + alike).sqrt()


@torch.no_grad()
def clip_grad_norm(
    weights: Iterable[tuple[str, nn.Parameter]], sliced: Container[str], group: Any, limit: float
) -> torch.Tensor:
    """Clips gradients to a global norm, as `torch.nn.utils.clip_grad_norm_` does; arguments as in `global_norm`.

    Args:
        limit: the largest norm; infinity: not clipped.

    Returns:
        The norm before.
    """
    gradients = [(name, weight.grad) for name, weight in weights if weight.grad is not None]
    norm = global_norm(gradients, sliced, group)
    if math.isfinite(limit) and gradients:
        factor = (limit / (norm + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_([local_part(grad) for _, grad in gradients], factor)
    return norm


def _shard_dim(tensor: DTensor) -> int | None:
    """The dimension of the mesh along which a tensor is sharded."""
    return next((dim for dim, placement in enumerate(tensor.placements) if placement.is_shard()), None)


def _is_sharded(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, DTensor) and _shard_dim(tensor) is not None


def _squares(tensors: list[torch.Tensor], device: torch.device | None) -> torch.Tensor:
    """The sum of squares of what this rank has, in fp32 at least."""
    if not tensors:
        return torch.zeros((), dtype=torch.float32, device=device)
    norms = torch._foreach_norm([local_part(tensor) for tensor in tensors], 2, torch.float32)
    return torch.stack(list(norms)).square().sum()
