"""The gradient norm of a model of which each tensor-parallel rank has a part, cut again by FSDP 2 or not."""

from __future__ import annotations

import math
from collections.abc import Container, Iterable
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.tensor import DTensor

from trainers.parallel.shards import local_part


@torch.no_grad()
def global_norm(gradients: Iterable[tuple[str, torch.Tensor]], cuts: Container[str], group: Any) -> torch.Tensor:
    """Norm over every element of the whole model once. Collective over `group` and, with DTensors, over FSDP's group.

    Args:
        gradients: by the name of the weight; plain tensors or DTensors of FSDP 2.
        cuts: names of the weights of which each rank of `group` has a part; the others are alike on all of them.
        group: the tensor-parallel ranks; None for none.

    Returns:
        An fp32 scalar, the same on every rank that shares the model. No value is read by the host.
    """
    found = list(gradients)
    meshes = [(one.device_mesh, _shard_dim(one)) for _, one in found if isinstance(one, DTensor)]
    plain, sharded = (
        torch.stack([_squares([one for name, one in found if _is_sharded(one) is way and (name in cuts) is cut], found)
                     for cut in (True, False)])
        for way in (False, True)
    )  # fmt: skip
    spread = next(((mesh, dim) for mesh, dim in meshes if dim is not None), None)
    if spread is not None:
        distributed.all_reduce(sharded, group=spread[0].get_group(spread[1]))
    parts, alike = (plain + sharded).unbind()
    parts = parts.clone()
    if group is not None:
        distributed.all_reduce(parts, group=group)
    return (parts + alike).sqrt()


@torch.no_grad()
def clip(weights: Iterable[tuple[str, nn.Parameter]], cuts: Container[str], group: Any, limit: float) -> torch.Tensor:
    """Clips gradients to a global norm, as `torch.nn.utils.clip_grad_norm_` does; arguments as in `global_norm`.

    Args:
        limit: the largest norm; infinity: not clipped.

    Returns:
        The norm before.
    """
    gradients = [(name, weight.grad) for name, weight in weights if weight.grad is not None]
    norm = global_norm(gradients, cuts, group)
    if math.isfinite(limit) and gradients:
        factor = (limit / (norm + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_([local_part(one) for _, one in gradients], factor)
    return norm


def _shard_dim(tensor: DTensor) -> int | None:
    """The dimension of the mesh along which a tensor is cut."""
    return next((dim for dim, placement in enumerate(tensor.placements) if placement.is_shard()), None)


def _is_sharded(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, DTensor) and _shard_dim(tensor) is not None


def _squares(tensors: list[torch.Tensor], found: list[tuple[str, torch.Tensor]]) -> torch.Tensor:
    """The sum of squares of what is here, in fp32 at least."""
    if not tensors:
        device = found[0][1].device if found else None
        return torch.zeros((), dtype=torch.float32, device=device)
    norms = torch._foreach_norm([local_part(one) for one in tensors], 2, torch.float32)
    return torch.stack(list(norms)).square().sum()
