"""A step that must not update, changes nothing: no weight and nothing that the optimizer keeps, under every strategy.

DeepSpeed updates inside its own step, and would do so on finite gradients of a loss that is not finite.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator

from tests import forked, steps
from tests.launching import ROOT, environment

SCRIPT = Path(__file__).with_name("skipped_step_ranks.py")
QUICK = ["zero2", "zero3"]
SLOW = ["ddp", "fsdp2", "pp", "tp", "fsdp2_tp"]
LONG = ["fsdp1", "zero1", "zero3_offload", "zero2_tp"]
FOUR_RANKS = ("fsdp2_tp", "zero2_tp")


@pytest.mark.parametrize(
    "name",
    [
        *QUICK,
        *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW),
        *(pytest.param(name, marks=pytest.mark.long) for name in LONG),
    ],
)
def test_a_refused_or_skipped_step_changes_nothing(name: str, tmp_path: Path) -> None:
    """Control, in the same processes: a step with finite numbers changes all of it, before and after those."""
    world = 4 if name in FOUR_RANKS else 2
    file = ROOT / "accelerate_configs" / f"{name}.yaml"
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(file)]
    command += ["--num_processes", str(world), "--main_process_port", "0", str(SCRIPT), str(file), str(tmp_path)]
    done = forked.run(command, env=environment(PYTHONPATH=str(ROOT)), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    assert len(list(tmp_path.glob("rank-*"))) == world


@pytest.mark.slow
def test_a_step_that_fp16_s_scaler_skips_is_no_update(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)

    class Scaled(Accelerator):
        def __init__(self) -> None:
            super().__init__(cpu=True)
            self.scaler: Any = scaler

    monkeypatch.setattr(steps, "Accelerator", Scaled)
    with steps.steps(tmp_path, 1, packing=False, mixed_precision="fp16", max_train_samples=20) as taken:
        trained = [weight for _, weight in taken.context.backend.trained]
        for step, overflows in enumerate((True, False)):
            before, result = [weight.clone() for weight in trained], taken.take(step)
            assert math.isfinite(result.loss)
            assert result.updated is not overflows
            assert all(torch.equal(*pair) for pair in zip(before, trained, strict=True)) is overflows
            scaler.update(1.0)
