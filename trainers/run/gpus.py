"""The GPUs of this machine, without importing torch."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass

import pynvml

_IDLE_SHARE, _IDLE_PERCENT = 0.1, 20
"""Memory fraction and utilization in percent up to which a GPU counts as idle: driver, display, brief activity."""
LEAST_CAPABILITY = (8, 9)  # first with float8 tensor cores (Ada; Hopper is 9.0)


@dataclass(frozen=True)
class Gpu:
    """One GPU, as reported by NVML.

    Args:
        index: Index, as in `nvidia-smi` and `--gpus`.
        uuid: Identifier that stays the same if GPUs are renumbered.
        name: Product name.
        memory: Total memory in bytes.
        used: Memory used by any process, in bytes.
        busy: Recent utilization in percent.
    """

    index: int
    uuid: str
    name: str
    memory: int
    used: int = 0
    busy: int = 0

    @property
    def free(self) -> int:
        """Unused memory in bytes."""
        return max(0, self.memory - self.used)

    @property
    def in_use(self) -> bool:
        """Whether it is busy: over a tenth of its memory is used, or over 20 percent of its time."""
        return self.used > _IDLE_SHARE * self.memory or self.busy > _IDLE_PERCENT


def find_gpus() -> list[Gpu]:
    """Returns the GPUs that this process may use, in the order of CUDA_VISIBLE_DEVICES if set; empty without any."""
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
    except pynvml.NVMLError:  # not reported for MIG instances
        busy = 0
    uuid, name = str(pynvml.nvmlDeviceGetUUID(handle)), str(pynvml.nvmlDeviceGetName(handle))
    return Gpu(index, uuid, name, int(memory.total), int(memory.used), busy)


def visible(gpus: Sequence[Gpu], variable: str | None) -> list[Gpu]:
    """Returns the GPUs selected by CUDA_VISIBLE_DEVICES; like CUDA, stops at the first invalid entry.

    Args:
        gpus: All GPUs of the machine.
        variable: Value of the variable: indices, or UUIDs or prefixes of them; None if it is not set.
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


def gpu_use(uuid: str) -> dict[str, float | None]:
    """Returns `gpu_percent` (recent use) and `gpu_power_w` (watts) of a GPU; None where NVML does not report them."""
    use = dict[str, float | None](gpu_percent=None, gpu_power_w=None)
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return use
    with contextlib.suppress(pynvml.NVMLError):
        handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        with contextlib.suppress(pynvml.NVMLError):
            use["gpu_percent"] = float(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu)
        use["gpu_power_w"] = pynvml.nvmlDeviceGetPowerUsage(handle) / 1000
    with contextlib.suppress(pynvml.NVMLError):
        pynvml.nvmlShutdown()
    return use


def gpu_count() -> int:
    """Returns the number of GPUs that NVML reports and CUDA_VISIBLE_DEVICES selects; 0 without a driver.

    Counts entries for MIG instances too.
    """
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
    """Returns the lowest CUDA compute capability of the GPUs that this process may use; (0, 0) without any."""
    gpus = find_gpus()
    try:
        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(gpu.index) for gpu in gpus]
        return min((tuple(pynvml.nvmlDeviceGetCudaComputeCapability(handle)) for handle in handles), default=(0, 0))
    except pynvml.NVMLError:
        return (0, 0)
