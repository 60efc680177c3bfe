"""How a run's parts are put together: what needs no launch to be seen."""

from __future__ import annotations

from datetime import timedelta

import pytest
from torch.distributed import distributed_c10d

from trainers import build
from trainers.config import build as build_config


@pytest.mark.parametrize(("hang_timeout", "minutes"), [(0, 35), (600, 35), (7200, 125)])
def test_a_hang_is_told_before_a_collective_gives_up(
    hang_timeout: int, minutes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In groups too that nobody gives a timeout, for which NCCL has one of its own."""
    monkeypatch.setattr(distributed_c10d, "default_pg_nccl_timeout", timedelta(minutes=10))
    config = build_config({"model_name_or_path": "embedded", "dataset_name": "embedded", "hang_timeout": hang_timeout})
    assert build._collectives_wait(config) == timedelta(minutes=minutes)
    assert distributed_c10d._get_default_timeout("nccl") == timedelta(minutes=minutes)
