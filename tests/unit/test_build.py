"""How a run's parts are put together: what needs no launch to be seen."""

from __future__ import annotations

import subprocess
import sys
import weakref
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import nn
from torch.distributed import distributed_c10d
from transformers import AutoConfig, AutoModelForCausalLM

from tests.launching import ROOT, environment
from trainers import build
from trainers.config.validation import build as build_config
from trainers.model.attention import KERNELS
from trainers.model.small_model import small_config
from trainers.objectives.loss_module import LossModule
from trainers.strategy.mesh import MeshSizes

STARTED = """
import torch
from tests.launching import ROOT, environment
from trainers import build
from trainers.config.parse import Request
from trainers.strategy.strategy import load_strategy
before = torch.backends.cuda.cudnn_sdp_enabled()
build.accelerator(Request(preset="tiny-lora").resolve(), load_strategy("single"))
print(before, torch.backends.cuda.cudnn_sdp_enabled())
"""


@pytest.mark.parametrize(("hang_timeout", "minutes"), [(0, 35), (600, 35), (7200, 125)])
def test_a_hang_is_told_before_a_collective_gives_up(
    hang_timeout: int, minutes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In groups too that nobody gives a timeout, for which NCCL has one of its own."""
    for name in ("default_pg_nccl_timeout", "default_pg_timeout"):
        monkeypatch.setattr(distributed_c10d, name, timedelta(minutes=10))
    config = build_config({"model_name_or_path": "embedded", "dataset_name": "embedded", "hang_timeout": hang_timeout})
    assert build._collectives_wait(config) == timedelta(minutes=minutes)
    assert distributed_c10d._get_default_timeout("nccl") == timedelta(minutes=minutes)


def test_a_timeout_of_ones_own_is_that_of_every_group(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("default_pg_nccl_timeout", "default_pg_timeout"):
        monkeypatch.setattr(distributed_c10d, name, timedelta(minutes=10))
    config = build_config({"model_name_or_path": "embedded", "dataset_name": "embedded", "ddp_timeout": 90})
    assert build._collectives_wait(config) == timedelta(seconds=90)
    for backend in ("nccl", "gloo"):
        assert distributed_c10d._get_default_timeout(backend) == timedelta(seconds=90)


def test_a_run_keeps_cudnn_out_of_attention() -> None:
    """Control: torch begins with it."""
    command = [sys.executable, "-c", STARTED]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=120, check=True, cwd=ROOT)
    assert done.stdout.split()[-2:] == ["True", "False"]


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_a_pipeline_on_gpus_is_proved_on_the_cpu_before_it_is_cut(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a kernel that runs there, and knows Gemma 2's softcap; afterwards the model has the one of its GPUs."""

    class Reached(Exception):
        pass

    def stop(*_: Any) -> None:
        raise Reached

    monkeypatch.setattr(build, "choose", lambda *_: "varlen")
    monkeypatch.setattr(build, "split_model", stop)
    ranks: Any = SimpleNamespace(
        is_main=True, device=torch.device("cuda"), agree=lambda *_: None,
        gather=lambda value: [value], broadcast=lambda value: value,
    )  # fmt: skip
    mesh: Any = SimpleNamespace(sizes=MeshSizes(pp=2), group=lambda name: None, index=lambda name: 0)
    small, unused = small_config(AutoConfig.for_model(family)), SimpleNamespace()
    loss = LossModule(AutoModelForCausalLM.from_config(small, attn_implementation=KERNELS["sdpa"]))
    config = build_config({"model_name_or_path": "embedded", "dataset_name": "embedded"})
    with pytest.raises(Reached):
        build.backend(config, unused, unused, ranks, mesh, loss)  # type: ignore[arg-type]
    assert loss.base.config._attn_implementation == KERNELS["varlen"]


def test_a_single_process_frees_its_model_before_the_export() -> None:
    accelerator, context = Accelerator(cpu=True), SimpleNamespace(backend=nn.Linear(2, 2), bare=None, sampler=None)
    accelerator.prepare(context.backend)
    freed = weakref.ref(context.backend)
    build.tear_down(accelerator, SimpleNamespace(close=lambda: None), context)  # type: ignore[arg-type]
    assert freed() is None
