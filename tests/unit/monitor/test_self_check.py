"""The self-check names a communication backend that is not the one asked for, and weights frozen without a reason."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from accelerate import Accelerator
from torch import distributed

from tests.families import config_for, save_small
from trainers import build
from trainers.monitor.self_check import DtypeProbe, Line, _communication, compare
from trainers.parallel.ranks import Ranks
from trainers.strategy.mesh import Mesh, MeshSizes
from trainers.strategy.strategy import load_strategy


@pytest.fixture
def gloo(tmp_path: Path) -> Iterator[None]:
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.usefixtures("gloo")
@pytest.mark.parametrize(
    ("asked", "device", "backend"),
    [("auto", "cpu", "gloo"), ("gloo", "cpu", "gloo"), ("cpu:gloo,cuda:nccl", "cpu", "gloo"), ("nccl", "cuda", "nccl"),
     ("auto", "cuda", "nccl"), ("cpu:gloo,cuda:nccl", "cuda", "nccl"), ("gloo", "cuda", "gloo")],
)  # fmt: skip
def test_the_backend_of_the_device_is_compared(asked: str, device: str, backend: str) -> None:
    assert _communication(asked, device) == [Line("communication", backend, "gloo")]


def test_a_single_process_has_none() -> None:
    assert _communication("auto", "cpu") == []


@pytest.mark.parametrize(("family", "by_hand"), [("ernie4_5_moe", False), ("llama", True)])
def test_frozen_weights_need_a_reason(family: str, by_hand: bool, tmp_path: Path) -> None:
    """The biases of Ernie's routers are built frozen. Control: a weight of Llama that anything freezes is a fault."""
    config, strategy = config_for(save_small(tmp_path, family), packing=False), load_strategy("single")
    accelerator, mesh = Accelerator(), Mesh(MeshSizes())
    loss = build.module(config, main_rank=True)
    backend, _ = build.backend(config, strategy, accelerator, Ranks(accelerator.device), mesh, loss)
    if by_hand:
        next(loss.model.parameters()).requires_grad_(False)
    with DtypeProbe(loss) as dtypes:
        lines = {line.name: line for line in compare(strategy, config, accelerator, mesh, backend, loss, dtypes)}
    assert lines["frozen weights"] == Line("frozen weights", "none" if by_hand else "float32", "float32")
