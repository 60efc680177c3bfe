"""Every tensor of a batch goes to a GPU from pinned memory, without waiting. `tests/gpu/test_pinned.py` has the GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode

from trainers.data.layout import DocumentLayout, Scales, ScoredDocuments, TopTokens, to_device
from trainers.data.micro_batch import LabelSources, MicroBatch
from trainers.data.noise import TokenNoise

CUDA = torch.device("cuda")


class Copies(TorchFunctionMode):
    """Stands for a GPU: takes copies to one, and notes those that are not from pinned memory or that wait."""

    def __init__(self) -> None:
        super().__init__()
        self.pinned, self.copied, self.wrong = list[torch.Tensor](), list[torch.Tensor](), list[tuple[int, ...]]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.pin_memory:
            self.pinned.append(args[0].clone())
            return self.pinned[-1]
        if func is torch.Tensor.to and args[1] == CUDA:
            waits = not (kwargs or {}).get("non_blocking")
            if waits or not any(args[0] is tensor for tensor in self.pinned):
                self.wrong.append(tuple(args[0].shape))
            self.copied.append(args[0])
            return args[0]
        return func(*args, **(kwargs or {}))


def micro_batch() -> MicroBatch:
    """With every part that a batch may have."""
    numbers, floats = torch.arange(6), torch.rand(6)
    scored = ScoredDocuments(
        numbers, numbers, floats, Scales(1.0, 1.0), np.arange(2), floats > 0.5, floats[0], {"chosen": floats}, floats,
        floats, floats,
    )  # fmt: skip
    return MicroBatch(
        numbers.view(1, 6), numbers.view(1, 6), DocumentLayout.of(np.array([0, 2, 6]), 1), numbers, numbers,
        numbers.view(1, 6) > 2, 6, 6, scored, TopTokens(numbers.view(3, 2), floats.view(2, 3), 9),
        LabelSources(numbers, 2), TokenNoise(numbers, numbers, 1.0),
    )  # fmt: skip


def tensors_in(value: Any) -> int:
    """Tensors of a batch, and of what it holds."""
    if isinstance(value, torch.Tensor):
        return 1
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, tuple) else None
    return sum(map(tensors_in, parts if parts is not None else getattr(value, "__dict__", {}).values()))


@pytest.mark.parametrize("weights", [None, torch.ones(2)])
def test_every_tensor_is_copied_from_pinned_memory_without_waiting(weights: torch.Tensor | None) -> None:
    with Copies() as copies:
        moved = micro_batch().inputs(CUDA, weights)
    assert copies.wrong == []
    unmoved = 0 if weights is None else 1  # on the device already
    assert len(copies.copied) == tensors_in(moved) - unmoved >= 20
    assert (replace(micro_batch(), documents=None).inputs(torch.device("cpu")))["documents"] is None


def test_a_copy_from_pageable_memory_or_one_that_waits_would_be_seen() -> None:
    with Copies() as copies:
        torch.ones(3).to(CUDA, non_blocking=True)
        torch.ones(4).pin_memory().to(CUDA)
        to_device(torch.ones(5), CUDA)
    assert copies.wrong == [(3,), (4,)]


def test_nothing_is_pinned_for_a_cpu() -> None:
    tensor = torch.ones(3)
    with Copies() as copies:
        assert to_device(tensor, torch.device("cpu")) is tensor
    assert copies.pinned == []
