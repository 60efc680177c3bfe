"""No micro-batch makes the host wait for the device: a step has as many host syncs with eight of them as with one.

On a CPU nothing waits, but what would is seen: every read of a tensor's value by Python, and every operation whose
result has a shape that depends on values. `tests/gpu/test_sync.py` asks the device itself.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.steps import Steps, steps
from trainers.reference import set_reference
from trainers.strategy.strategy import load_strategy

READS = ("tolist", "numpy", "cpu")
"""Methods that go past the dispatcher, or would on a CPU."""
WAITS = {"_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "equal"}
"""Operations that wait: `.item()`, `bool(tensor)`, `float(tensor)` and `int(tensor)` all become the first."""


class HostSyncs(TorchDispatchMode):
    """Counts them by name while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()
        self.patch = pytest.MonkeyPatch()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        boolean = name in ("index", "index_put", "index_put_") and any(
            one is not None and one.dtype in (torch.bool, torch.uint8) for one in args[1]
        )
        if name in WAITS or boolean or (name == "repeat_interleave" and func._overloadname == "Tensor"):
            self.found[name] += 1
        return func(*args, **(kwargs or {}))

    def __enter__(self) -> HostSyncs:
        for name in READS:
            self.patch.setattr(torch.Tensor, name, self._counted(name, getattr(torch.Tensor, name)))
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.patch.undo()

    def _counted(self, name: str, method: Any) -> Any:
        def counted(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            self.found[name] += 1
            return method(tensor, *args, **kwargs)

        return counted


def syncs_of_a_step(made: Steps) -> Counter[str]:
    """Of the second one: the first makes the optimizer's state."""
    made.take(0)
    with HostSyncs() as counting:
        result = made.take(1)
    assert result.updated
    return counting.found


@pytest.mark.parametrize(
    ("packing", "changes"),
    [(False, {}), (True, {}), (True, {"objective": "kto", "max_train_samples": 8})],
    ids=["unpacked", "packed", "kto"],
)
def test_accumulation_adds_no_host_sync(packing: bool, changes: dict[str, Any], tmp_path: Path) -> None:
    found = {}
    for accumulation in (1, 8):
        with steps(tmp_path, accumulation, packing, **changes) as made:
            if made.context.config.objective_spec.reference:
                set_reference(made.context, load_strategy("single"), None)
            assert made.context.plan.accumulation == accumulation
            found[accumulation] = syncs_of_a_step(made)
    assert found[1] == found[8]
    assert found[1]["tolist"] == 1, "the one sync of the step, which this test must see"


def _after(wait: Any) -> Any:
    """A hook that waits for the loss of each forward pass."""

    def hook(module: Any, inputs: Any, output: Any) -> None:
        wait(output[0].detach())

    return hook


@pytest.mark.parametrize(
    ("wait", "name"),
    [
        (lambda loss: loss.item(), "_local_scalar_dense"),
        pytest.param(lambda loss: bool(loss > 0), "_local_scalar_dense", marks=pytest.mark.long),
        pytest.param(lambda loss: loss.reshape(1)[loss.reshape(1) > 0], "index", marks=pytest.mark.long),
        (lambda loss: loss.cpu(), "cpu"),
    ],
    ids=["item", "bool", "mask", "cpu"],
)
def test_a_host_sync_per_micro_batch_would_be_seen(wait: Any, name: str, tmp_path: Path) -> None:
    with steps(tmp_path, 8, packing=False) as made:
        before = syncs_of_a_step(made)
        hook = made.context.backend.model.register_forward_hook(_after(wait))
        after = syncs_of_a_step(made)
        hook.remove()
    assert after[name] - before[name] == 8
