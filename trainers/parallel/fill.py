"""Reads weights that were left in their files (`trainers/model/stored.py`), once a strategy has cut them."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from trainers.model.stored import TEACHER, replace
from trainers.objectives.output_head import decoder_of


def fill(loss: Any, device: torch.device) -> None:
    """Reads, of every weight on the meta device, the part that this rank keeps, and puts it onto a device.

    Args:
        loss: the loss module, whose weights tensor parallelism and FSDP 2 may have cut.
        device: the device of this rank's parts.

    Raises:
        TrainingError: if a file has become shorter since its header was read.
    """
    for name, weight in unread(loss):
        replace(weight, _parameter(_local(loss, name, weight, device), weight))


def filler(loss: Any, device: torch.device) -> Callable[[nn.Module], None]:
    """A function that reads the weights of one module, not those of its children, in full (see `read_whole`)."""
    names = {id(weight): name for name, weight in unread(loss)}

    def take(module: nn.Module) -> None:
        for weight in module.parameters(recurse=False):
            if weight.is_meta:
                full = read_whole(loss, names[id(weight)], weight, device)
                replace(weight, nn.Parameter(full, weight.requires_grad))

    return take


def trim_heap() -> None:
    """Gives freed memory between blocks that stay back to the system, which glibc does by itself at the end alone."""
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)


def shard_as_read(loss: Any, settings: dict[str, Any], device: torch.device, groups: Any, first: bool) -> None:
    """Shards all weights as ZeRO 3, one after the other, each read just before by the rank that broadcasts it.

    All are read into the same memory, that of the largest. DeepSpeed's own temporary memory lies between the shards
    that stay: gaps that took up to half of their size at 1.1B weights, unless they are given back.

    Args:
        loss: the loss module.
        settings: the DeepSpeed config.
        device: the device of this rank.
        groups: the process groups of a tensor-parallel model; None for all ranks.
        first: whether this rank is the first of those that share each weight, whose values DeepSpeed sends to all.
    """
    from deepspeed.runtime.zero.partition_parameters import Init  # an extra

    names, shard = {id(weight): name for name, weight in unread(loss)}, Init._convert_to_zero_parameters
    largest = max((weight.numel() * weight.element_size() for _, weight in unread(loss)), default=0)
    buffer = torch.empty(largest, dtype=torch.uint8, device=device)

    def read_and_shard(self: Any, weights: Iterable[nn.Parameter]) -> None:
        for weight in list(weights):
            if weight.is_meta:
                full = buffer[: weight.numel() * weight.element_size()].view(weight.dtype).view(weight.shape)
                if first:
                    name = names[id(weight)]
                    loss.stored[name].read(full, _rectangle(loss, name, weight.shape))
                replace(weight, nn.Parameter(full, weight.requires_grad))
            shard(self, [weight])
            trim_heap()

    for module in loss.modules():
        module._buffers.update({name: buffer.to(device) for name, buffer in module.named_buffers(recurse=False)})
    Init._convert_to_zero_parameters = read_and_shard
    try:
        Init(
            module=loss,
            data_parallel_group=groups.get_data_parallel_group() if groups else None,
            dtype=next(loss.parameters()).dtype,
            config_dict_or_path=settings,
            mpu=groups,
        )
    finally:
        Init._convert_to_zero_parameters = shard


def unread(loss: Any) -> list[tuple[str, nn.Parameter]]:
    """The weights on the meta device, with their names in `loss.stored`.

    Those are the transformers or peft names, and for the weights of a teacher these after `TEACHER`.
    """
    weights = [*loss.model.named_parameters()]
    if loss.teacher is not None:
        weights += [(f"{TEACHER}{name}", weight) for name, weight in loss.teacher.model.named_parameters()]
    return [(name, weight) for name, weight in weights if weight.device.type == "meta"]


def read_whole(loss: Any, name: str, weight: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A weight, or this rank's tensor-parallel slice of it, on a device."""
    full = torch.empty(weight.shape, dtype=weight.dtype, device=device)
    loss.stored[name].read(full, _rectangle(loss, name, weight.shape))
    return full


def _parameter(local: torch.Tensor, weight: nn.Parameter) -> nn.Parameter:
    """A parameter of the same kind as a weight: 4-bit ones have a class of their own, unless they are sharded."""
    if type(weight) is nn.Parameter or isinstance(local, DTensor):
        return nn.Parameter(local, weight.requires_grad)
    return torch.Tensor._make_subclass(type(weight), local, weight.requires_grad)


def _local(loss: Any, name: str, weight: Any, device: torch.device) -> torch.Tensor:
    if not isinstance(weight, DTensor):
        return read_whole(loss, name, weight, device)
    mesh, placements = weight.device_mesh, weight.placements
    shape, starts = compute_local_shape_and_global_offset(weight.shape, mesh, placements)
    local = torch.empty(shape, dtype=weight.dtype, device=device)
    sides = zip(_rectangle(loss, name, weight.shape), starts, shape, strict=True)
    part = [slice(side.start + start, side.start + start + size) for side, start, size in sides]
    loss.stored[name].read(local, tuple(part))
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=weight.shape, stride=weight.stride())


def _rectangle(loss: Any, name: str, shape: Sequence[int]) -> tuple[slice, ...]:
    """The rectangle of a stored weight that tensor parallelism leaves this rank, which has this shape."""
    of_teacher = name.startswith(TEACHER)
    tensor = loss.teacher.tensor if of_teacher else loss.tensor
    cut = tensor.slices.get(name.removeprefix(TEACHER)) if tensor else None
    rectangle = cut.slices if cut is not None else tuple(slice(0, size) for size in loss.stored[name].shape)
    assert [side.stop - side.start for side in rectangle] == list(shape), f"{name} was cut in an unknown way"
    return rectangle


@contextmanager
def passing_through(loss: Any, device: torch.device) -> Iterator[None]:
    """Makes the full model usable with one decoder layer in memory at a time, read when it runs and dropped after.

    Weights outside the layers are in memory for the whole time.
    """
    layers: list[nn.Module] = list(getattr(decoder_of(loss.base), "layers", []))
    names, inside = {id(weight): name for name, weight in unread(loss)}, _ids(layers)
    empty: dict[int, nn.Parameter] = {}

    def take(weights: Iterable[nn.Parameter]) -> None:
        for weight in weights:
            if (name := names.get(id(weight))) is not None:
                full = read_whole(loss, name, weight, device)
                empty[id(weight)] = replace(weight, nn.Parameter(full, weight.requires_grad))

    def drop(weights: Iterable[nn.Parameter]) -> None:
        for weight in weights:
            if id(weight) in empty:
                replace(weight, empty.pop(id(weight)))

    outside = [weight for weight in loss.parameters() if id(weight) not in inside]
    take(outside)
    hooks = [layer.register_forward_pre_hook(lambda layer, _: take(layer.parameters())) for layer in layers]
    hooks += [layer.register_forward_hook(lambda layer, *_: drop(layer.parameters())) for layer in layers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        drop(list(loss.parameters()))


def _ids(modules: Iterable[nn.Module]) -> set[int]:
    return {id(weight) for module in modules for weight in module.parameters()}
