"""Model FLOPs utilization: the FLOPs of a step and the peak rates of devices."""

from __future__ import annotations

import re
from typing import Any

import torch

# Dense bf16/fp16 peak in FLOP/s from the vendors' data sheets; MFU is not reported for other devices.
_PEAKS = {
    "H100 80GB HBM3": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H200 NVL": 835e12,
    "H200": 989e12,
    "GH200": 989e12,
    "A100": 312e12,
    "L40": 181e12,
    "L40S": 362e12,
    "L4": 121e12,
}


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Peak matrix throughput of a device in FLOP/s, or None if unknown."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return None
    name_parts = re.split(r"[\s-]", torch.cuda.get_device_name(device))
    return next((peak for known, peak in _PEAKS.items() if set(known.split()) <= set(name_parts)), None)


def attention_width(model_config: Any) -> int:
    """Attention heads times head size, summed over layers; 0 if the model's config does not say."""
    text = model_config.get_text_config() if hasattr(model_config, "get_text_config") else model_config
    heads, layers = getattr(text, "num_attention_heads", None), getattr(text, "num_hidden_layers", None)
    hidden = getattr(text, "hidden_size", 0)
    size = getattr(text, "head_dim", None)
    return (int(heads * size) if heads and size else hidden) * (layers or 0)


def step_flops(
    tokens: int, matmul_parameters: tuple[int, int, int], attention_width: int, squared_lengths: float
) -> float:
    """Model FLOPs of one step, without recomputation.

    Args:
        tokens: real tokens.
        matmul_parameters: trained and frozen parameters in matrix products, and those of a teacher; per token, 6 FLOPs
            for each trained, 4 for each frozen one and 2 for each of the teacher's, whose attention is not counted.
        attention_width: heads times head size, summed over layers.
        squared_lengths: sum of squared document lengths; causal attention computes half of each square.
    """
    trained, frozen, teacher = matmul_parameters
    return tokens * (6 * trained + 4 * frozen + 2 * teacher) + 6 * attention_width * squared_lengths
