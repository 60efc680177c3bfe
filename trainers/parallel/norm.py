"""Gradient norm and clipping under tensor parallelism, with or without FSDP 2."""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Sequence
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.tensor import DTensor

from trainers.parallel.shards import local_part


@torch.no_grad()
def global_norm(gradients: Iterable[tuple[str, torch.Tensor]], sliced: Container[str], group: Any) -> torch.Tensor:
    """2-norm over the full model, counting every element once.

    Collective over `group` and, with DTensors, over the FSDP shard group.

    Args:
        gradients: weight names and gradients; plain tensors or FSDP 2 DTensors.
        sliced: names of the weights split over `group`; all others are replicated on it.
        group: the tensor-parallel ranks; None without tensor parallelism.

    Returns:
        An fp32 scalar, equal on every rank that shares the model. Does not synchronize with the host.
    """
    gradients = list(gradients)
    device = gradients[0][1].device if gradients else None
    # Squared norms of [sliced, replicated] weights, separately for plain tensors and for those that FSDP 2 shards.
    plain, sharded = (
        torch.stack([
            _squares([grad for name, grad in gradients if _is_sharded(grad) is by_fsdp and (name in sliced) is part],
                     device)
            for part in (True, False)
        ])
        for by_fsdp in (False, True)
    )  # fmt: skip
    # All shards have the same group, so that one all-reduce completes their sums.
    meshes = {
        (grad.device_mesh, dim)
        for _, grad in gradients
        if isinstance(grad, DTensor) and (dim := _shard_dim(grad)) is not None
    }
    assert len(meshes) <= 1, f"gradients are sharded over different groups: {meshes}"
    for mesh, dim in meshes:
        distributed.all_reduce(sharded, group=mesh.get_group(dim))
    # Sum sliced weights over the tensor-parallel ranks; replicated weights count once.
    parts, alike = (plain + sharded).unbind()
    parts = parts.clone()
    if group is not None:
        distributed.all_reduce(parts, group=group)
    return (parts + alike).sqrt()


@torch.no_grad()
def clip_grad_norm(
    weights: Iterable[tuple[str, nn.Parameter]], sliced: Container[str], group: Any, limit: float
) -> torch.Tensor:
    """Clips gradients to a global norm like `torch.nn.utils.clip_grad_norm_`.

    Args:
        weights: weight names and weights; those without a gradient are ignored.
        sliced: see `global_norm`.
        group: see `global_norm`.
        limit: maximum norm; infinity disables clipping.

    Returns:
        The norm before clipping.
    """
    gradients = [(name, weight.grad) for name, weight in weights if weight.grad is not None]
    norm = global_norm(gradients, sliced, group)
    scale_gradients([grad for _, grad in gradients], norm, limit)
    return norm


@torch.no_grad()
def scale_gradients(gradients: Sequence[torch.Tensor], norm: torch.Tensor, limit: float) -> None:
    """Scales gradients down to a finite limit of their norm, as torch does. Does not synchronize with the host."""
    if math.isfinite(limit) and gradients:
        factor = (limit / (norm + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_([local_part(grad) for grad in gradients], factor)


def _shard_dim(tensor: DTensor) -> int | None:
    """The mesh dimension over which a tensor is sharded; None if it is replicated."""
    return next((dim for dim, placement in enumerate(tensor.placements) if placement.is_shard()), None)


def _is_sharded(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, DTensor) and _shard_dim(tensor) is not None


def _squares(tensors: list[torch.Tensor], device: torch.device | None) -> torch.Tensor:
    """Sum of squares of the local parts, in fp32."""
    if not tensors:
        return torch.zeros((), dtype=torch.float32, device=device)
    norms = torch._foreach_norm([local_part(tensor) for tensor in tensors], 2, torch.float32)
    return torch.stack(list(norms)).square().sum()
