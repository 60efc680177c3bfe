"""How many GPUs this process may use, without importing torch."""

from __future__ import annotations

import os

import pynvml


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
