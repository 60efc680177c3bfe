"""The GPUs of this machine, without importing torch."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import pynvml

_IDLE_SHARE, _IDLE_PERCENT = 0.1, 20
"""What a driver, a display or a moment's work of no consequence may take of a GPU."""
LEAST_CAPABILITY = (8, 9)  # of GPUs with float8 tensor cores: Ada and Hopper


@dataclass(frozen=True)
class Gpu:
    """One GPU, as NVML numbers it.

    Args:
        index: the id that `nvidia-smi` and `--gpus` use.
        uuid: name that stays when the machine is renumbered.
        name: the maker's name.
        memory: bytes.
        used: bytes that processes of any kind have.
        busy: percent of the last moments in which it computed.
    """

    index: int
    uuid: str
    name: str
    memory: int
    used: int = 0
    busy: int = 0

    @property
    def free(self) -> int:
        """Bytes that nobody has."""
        return max(0, self.memory - self.used)

    @property
    def in_use(self) -> bool:
        """Whether somebody works on it: a tenth of its memory is taken, or it computes."""
        return self.used > _IDLE_SHARE * self.memory or self.busy > _IDLE_PERCENT


def find_gpus() -> list[Gpu]:
    """The GPUs that this process may use, in the order of an outer CUDA_VISIBLE_DEVICES; empty without any."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    try:
        gpus = [_describe(index) for index in range(pynvml.nvmlDeviceGetCount())]
    except pynvml.NVMLError:
        return []
    finally:
        pynvml.nvmlShutdown()
    return visible(gpus, os.environ.get("CUDA_VISIBLE_DEVICES"))


def _describe(index: int) -> Gpu:
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    try:
        busy = int(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu)
    except pynvml.NVMLError:  # a part of a GPU does not tell it
        busy = 0
    uuid, name = str(pynvml.nvmlDeviceGetUUID(handle)), str(pynvml.nvmlDeviceGetName(handle))
    return Gpu(index, uuid, name, int(memory.total), int(memory.used), busy)


def visible(gpus: Sequence[Gpu], variable: str | None) -> list[Gpu]:
    """The GPUs that CUDA_VISIBLE_DEVICES leaves; like CUDA it reads the list up to its first bad entry.

    Args:
        gpus: every GPU of the machine.
        variable: the variable's value: indices or (the beginnings of) UUIDs; None when it is not set.
    """
    if variable is None:
        return list(gpus)
    selected: list[Gpu] = []
    for word in (part.strip() for part in variable.split(",")):
        match = [gpu for gpu in gpus if word == str(gpu.index) or (word[:4] == "GPU-" and gpu.uuid.startswith(word))]
        if len(match) != 1 or match[0] in selected:
            break
        selected += match
    return selected


def gpu_count() -> int:
    """GPUs that NVML sees and CUDA_VISIBLE_DEVICES leaves, MIG instances too; 0 without a driver."""
    try:
        pynvml.nvmlInit()
        total = int(pynvml.nvmlDeviceGetCount())
    except pynvml.NVMLError:
        return 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return total
    return min(total, len([index for index in visible.split(",") if index.strip() not in ("", "-1")]))


def capability() -> tuple[int, int]:
    """The least CUDA compute capability of the machine's GPUs; (0, 0) without any."""
    try:
        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        return min((tuple(pynvml.nvmlDeviceGetCudaComputeCapability(handle)) for handle in handles), default=(0, 0))
    except pynvml.NVMLError:
        return (0, 0)
