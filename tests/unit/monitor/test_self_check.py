"""The self-check names a communication backend that is not the one asked for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from torch import distributed

from trainers.monitor.self_check import Line, _communication


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
