"""How many GPUs this process may use, without importing torch."""

from __future__ import annotations

import os

import pynvml

LEAST_CAPABILITY = (8, 9)  # of GPUs with float8 tensor cores: Ada and Hopper


def gpu_count() -> int:
    """GPUs that NVML sees and CUDA_VISIBLE_DEVICES leaves; 0 without a driver."""
    try:
        pynvml.nvmlInit()
        total = int(pynvml.nvmlDeviceGetCount())
    except pynvml.NVMLError:
        return 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return total
    return min(total, len([one for one in visible.split(",") if one.strip() not in ("", "-1")]))


def capability() -> tuple[int, int]:
    """The least CUDA compute capability of the machine's GPUs; (0, 0) without any."""
    try:
        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        return min((tuple(pynvml.nvmlDeviceGetCudaComputeCapability(one)) for one in handles), default=(0, 0))
    except pynvml.NVMLError:
        return (0, 0)
