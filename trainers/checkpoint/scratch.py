"""Tensors in files instead of memory, so that exporting a model takes the memory of a few tensors, not of all.

The kernel writes pages of a mapped file back and drops them when memory is short. Anonymous memory can only be swapped.
"""

from __future__ import annotations

import mmap
import os
import shutil
import sys
import tempfile
from pathlib import Path

import torch
from torch import nn

from trainers.model.stored import Source, StoredTensor, replace

SMALL = 2**16
"""Tensors of fewer bytes stay in memory: a process may have only 65,530 mappings."""
SPARE = 2**30
"""Bytes of the disk to leave free for what else writes to it, such as checkpoints of other runs."""
NORESERVE = 0x4000 if sys.platform == "linux" else 0
"""Lets a file be mapped that is larger than memory. Python 3.11 has no name for it."""


class Scratch:
    """Makes tensors in files that have no name, whose space is free again when the tensor is.

    Args:
        folder: a folder on the disk to use.
        reserved: bytes to leave free there. What does not fit beside them is kept in memory.
    """

    def __init__(self, folder: Path, reserved: float = 0):
        self.folder, self.reserved = folder, reserved

    def has_room(self, size: float) -> bool:
        """Whether the disk has room for so many bytes."""
        return size + self.reserved + SPARE <= shutil.disk_usage(self.folder).free

    def empty(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """A contiguous tensor of unspecified values."""
        size = shape.numel() * dtype.itemsize
        if size < SMALL or not self.has_room(size):
            return torch.empty(shape, dtype=dtype)
        with tempfile.NamedTemporaryFile(dir=self.folder) as file:
            try:
                os.posix_fallocate(file.fileno(), 0, size)  # a full disk would end the process at the first write
            except OSError:
                return torch.empty(shape, dtype=dtype)
            return torch.from_file(file.name, shared=True, size=shape.numel(), dtype=dtype).view(shape)

    def copy(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """A copy of a tensor in a dtype."""
        return self.empty(tensor.shape, dtype).copy_(tensor.detach())

    @torch.no_grad()
    def copy_weights(self, model: nn.Module, dtype: torch.dtype) -> None:
        """Replaces the weights of a model by copies in a dtype, one by one; tied weights stay tied."""
        for weight in model.parameters():
            weight.data = self.copy(weight, dtype)


def map_weights(model: nn.Module, stored: dict[str, Source], scratch: Scratch) -> None:
    """Maps weights on the meta device into memory from their files, or from a copy where the model's dtype differs.

    Args:
        model: the model.
        stored: where each of them comes from, by name.
        scratch: where copies go.
    """
    opened: dict[Path, mmap.mmap] = {}
    for name, weight in model.named_parameters():
        if not weight.is_meta:
            continue
        source = stored[name]
        if isinstance(source, StoredTensor) and source.dtype == weight.dtype and source.shape.numel():
            value = _mapped(source, opened)
        else:
            value = scratch.empty(weight.shape, weight.dtype)
            source.read(value)
        replace(weight, nn.Parameter(value, weight.requires_grad))


def _mapped(source: StoredTensor, opened: dict[Path, mmap.mmap]) -> torch.Tensor:
    """A stored tensor with a storage of its own, as storages that weights share would be written into one shard."""
    if source.file not in opened:
        opened[source.file] = map_file(source.file)
    flat = torch.frombuffer(opened[source.file], dtype=source.dtype, count=source.shape.numel(), offset=source.offset)
    return flat.view(source.shape)


def map_file(path: Path) -> mmap.mmap:
    """Maps a file of any size. What is written to the mapping stays in memory, and the file as it is."""
    with path.open("rb") as file:
        flags, access = mmap.MAP_PRIVATE | NORESERVE, mmap.PROT_READ | mmap.PROT_WRITE
        return mmap.mmap(file.fileno(), 0, flags=flags, prot=access)
