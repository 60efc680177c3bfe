"""The gradient norm of sharded weights: what its one all-reduce takes for granted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from trainers.parallel.norm import global_norm


@pytest.fixture
def mesh() -> Iterator[Any]:
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1, 1), mesh_dim_names=("replicate", "shard"))
    distributed.destroy_process_group()


def test_gradients_over_one_group_are_counted_once(mesh: Any) -> None:
    parts = [DTensor.from_local(torch.full((4,), 2.0), mesh, [Replicate(), Shard(0)]) for _ in range(2)]
    gradients = [(str(number), part) for number, part in enumerate(parts)]
    assert global_norm([*gradients, ("plain", torch.full((1,), 2.0))], (), None).item() == 6.0


def test_gradients_over_two_groups_are_no_norm(mesh: Any) -> None:
    parts = [
        DTensor.from_local(torch.ones(4), mesh, placements)
        for placements in ([Replicate(), Shard(0)], [Shard(0), Replicate()])
    ]
    with pytest.raises(AssertionError, match="sharded over different groups"):
        global_norm([(str(number), part) for number, part in enumerate(parts)], (), None)
