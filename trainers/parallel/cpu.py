"""Lets Accelerate run its GPU strategies on the CPU with gloo.

Without an accelerator, stock Accelerate 1.15 silently starts independent one-process runs or falls back to plain DDP.
`PartialState._prepare_backend` is private; `tests/unit/parallel/test_cpu_adaptation.py` fails if it changes.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from accelerate.state import PartialState
from accelerate.utils import DistributedType


def needs_adaptation() -> bool:
    """Whether this run uses the CPU, by request or because there is no accelerator."""
    wants_cpu = os.environ.get("ACCELERATE_USE_CPU", "false").lower() in ("1", "true", "yes")
    return wants_cpu or not torch.accelerator.is_available()


def adapt_to_cpu() -> None:
    """Makes the next `Accelerator()` use gloo and the requested strategy. Call before constructing it."""
    if not needs_adaptation():
        return
    os.environ.update(ACCELERATE_TORCH_DEVICE="cpu", ACCELERATE_BYPASS_DEVICE_MAP="true", ACCELERATE_USE_CPU="false")
    os.environ["DS_ACCELERATOR"] = "cpu"  # otherwise DeepSpeed detects its own

    def prepare_backend(self: PartialState, *args: Any, **kwargs: Any) -> tuple[str | None, DistributedType]:
        distributed = int(os.environ.get("LOCAL_RANK", -1)) != -1
        return ("gloo", DistributedType.MULTI_GPU) if distributed else (None, DistributedType.NO)

    PartialState._prepare_backend = prepare_backend
