"""The CPU adaptation patches a private method of Accelerate; these tests fail when Accelerate changes under it."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest
from accelerate.state import PartialState
from accelerate.utils import DistributedType

from tests.launching import environment

PROGRAM = r"""
import sys
from accelerate import Accelerator
if sys.argv[1] == "adapted":
    from trainers.parallel.cpu import adapt_to_cpu
    adapt_to_cpu()
made = Accelerator()
sys.stdout.write(f"{made.num_processes} {made.distributed_type.value} {made.device.type}\n")
"""


def test_the_method_is_as_it_was() -> None:
    source = inspect.getsource(PartialState._prepare_backend)
    assert list(inspect.signature(PartialState._prepare_backend).parameters) == [
        "self", "cpu", "sagemaker_dp", "backend",
    ]  # fmt: skip
    assert "return backend, distributed_type" in source
    caller = inspect.getsource(PartialState.__init__)
    assert "backend, distributed_type = self._prepare_backend(cpu, use_sagemaker_dp, original_backend)" in caller
    assert {DistributedType.MULTI_GPU.value, DistributedType.NO.value} == {"MULTI_GPU", "NO"}


def torchrun(processes: int, how: str, **extra: str) -> list[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(processes)]
    command += ["--standalone", "--no-python", sys.executable, "-c", PROGRAM, how]
    done = subprocess.run(command, env=environment(**extra), capture_output=True, text=True, timeout=120, check=True)
    return sorted(done.stdout.split("\n")[:-1])


@pytest.mark.parametrize("use_cpu", ["false", "true"])
def test_two_processes_are_one_run(use_cpu: str) -> None:
    assert torchrun(2, "adapted", ACCELERATE_USE_CPU=use_cpu) == ["2 MULTI_GPU cpu"] * 2


def test_stock_accelerate_makes_two_runs_of_them() -> None:
    """Control: the silent fault that the adaptation is for. When this fails, Accelerate may have mended it."""
    assert torchrun(2, "stock") == ["1 NO cpu"] * 2
