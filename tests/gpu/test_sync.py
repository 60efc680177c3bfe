"""On the device: from the first forward pass of a step to its all-reduce, nothing makes the host wait."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.steps import steps


def refuse_waits(section: str, step: int) -> None:
    """As a heartbeat: between the step's first forward pass and its all-reduce, PyTorch raises where the host waits.

    The first step is let off, in which libraries measure and allocate.
    """
    torch.cuda.set_sync_debug_mode("error" if section in ("forward", "backward") and step > 0 else "default")


@pytest.fixture(autouse=True)
def _waits_allowed_again() -> Iterator[None]:
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("packing", [False, True], ids=["unpacked", "packed"])
def test_micro_batches_never_make_the_host_wait(packing: bool, tmp_path: Path) -> None:
    with steps(tmp_path, 4, packing, refuse_waits) as made:
        assert made.context.ranks.device.type == "cuda"
        for step in range(3):
            assert made.take(step).updated


def test_a_wait_in_a_micro_batch_would_be_seen(tmp_path: Path) -> None:
    with steps(tmp_path, 4, False, refuse_waits) as made:
        made.take(0)
        made.context.backend.model.register_forward_hook(lambda module, inputs, output: print(output[0].item()))
        with pytest.raises(RuntimeError, match="synchronizing"):
            made.take(1)
