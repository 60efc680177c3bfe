"""What peft offers beside plain LoRA trains as peft itself does, under every strategy."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from tests.parity import plain
from tests.parity.runs import config, curve, mostly_long, run

STRATEGIES = ["single", "ddp", "fsdp1", "fsdp2", "zero2", "zero3", "tp", "pp"]
PATTERNS = {
    "lora_rank_pattern": "q_proj=4,down_proj=24",
    "lora_alpha_pattern": "q_proj=16,layers.0.mlp.up_proj=128",
}


def processes(strategy: str) -> int:
    return 1 if strategy == "single" else 2


@pytest.mark.parametrize("strategy", mostly_long(STRATEGIES, ["single", "fsdp2"]))
def test_ranks_and_scalings_of_some_modules_are_those_of_peft(strategy: str) -> None:
    settings = config("lora", True, **PATTERNS)
    finished = curve(run(processes(strategy), "lora", True, strategy, **PATTERNS))
    ranks: dict[str, Any] = {"rank_pattern": {"q_proj": 4, "down_proj": 24}}
    scalings: dict[str, Any] = {"alpha_pattern": {"q_proj": 16, "layers.0.mlp.up_proj": 128}}
    assert finished.agrees(plain.train(settings, build=partial(plain.build, **ranks, **scalings)))
    if strategy == "single":  # controls
        assert not finished.agrees(plain.train(settings, build=partial(plain.build, **ranks)))
        assert not finished.agrees(plain.train(settings, build=partial(plain.build, **scalings)))
