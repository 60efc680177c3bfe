"""Lets Accelerate run its GPU strategies on gloo where there is no accelerator.

Stock Accelerate 1.15 starts independent one-process runs there, or falls back to plain DDP, without a word.
`PartialState._prepare_backend` is private: `tests/unit/parallel/test_cpu_adaptation.py` fails when it changes.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from accelerate.state import PartialState
from accelerate.utils import DistributedType


def needs_adaptation() -> bool:
    """Whether this run is on the CPU, because nothing else is there or because it was asked for."""
    wants_cpu = os.environ.get("ACCELERATE_USE_CPU", "false").lower() in ("1", "true", "yes")
    return wants_cpu or not torch.accelerator.is_available()


def adapt_to_cpu() -> None:
    """Makes the coming `Accelerator()` use gloo and the strategy that was asked for. Call before it is built."""
    if not needs_adaptation():
        return
    os.environ.update(ACCELERATE_TORCH_DEVICE="cpu", ACCELERATE_BYPASS_DEVICE_MAP="true", ACCELERATE_USE_CPU="false")
    os.environ["DS_ACCELERATOR"] = "cpu"  # DeepSpeed looks for itself otherwise

    def prepare_backend(self: PartialState, *args: Any, **kwargs: Any) -> tuple[str | None, DistributedType]:
        distributed = int(os.environ.get("LOCAL_RANK", -1)) != -1
        return ("gloo", DistributedType.MULTI_GPU) if distributed else (None, DistributedType.NO)

    PartialState._prepare_backend = prepare_backend
