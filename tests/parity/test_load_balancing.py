"""A mixture of experts whose config asks for a load-balancing loss: every strategy trains it alike."""

from __future__ import annotations

import functools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.launching import Finished
from tests.parity.plain import Curve
from tests.parity.runs import STEPS, curve, mostly_long, run
from tests.parity.test_families import model
from tests.parity.test_mixes import written
from tests.shared import once

LEAF = {"zero_stage": 3, "zero3_init_flag": False, "deepspeed_moe_layer_cls_names": "Qwen3MoeSparseMoeBlock"}
OTHERS = ["ddp", "fsdp1", "fsdp2", "zero1", "zero2", "zero3", "leaf", "sp", "cp"]


@functools.cache
def balanced(asks: bool) -> str:
    """A folder with the small mixture of experts, and the coefficient large enough to show in a few steps."""
    plain = Path(model("qwen3_moe"))

    def write(folder: Path) -> None:
        shutil.copytree(plain, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns(".*"))
        model_config = json.loads((plain / "config.json").read_text())
        model_config |= {"output_router_logits": asks, "router_aux_loss_coef": 1.0}
        (folder / "config.json").write_text(json.dumps(model_config))

    return str(once(f"balanced-{asks}", write))


def trained(processes: int, strategy: str | None = None, asks: bool = True, **more: Any) -> Finished:
    options = {"random_init": True, "learning_rate": 1e-3, "eval_dataset_name": "none", "max_eval_samples": None}
    return run(processes, "full", True, strategy, model_name_or_path=balanced(asks), **options | more)


def aux_losses(finished: Finished) -> Curve:
    """Held to the promise for gradient norms, as it is a mean like them."""
    return Curve(finished.series("loss"), finished.series("aux_loss"))


@pytest.mark.parametrize("strategy", mostly_long(OTHERS, ["fsdp2"]))
def test_every_strategy_balances_alike(strategy: str) -> None:
    file = strategy
    if strategy == "leaf":
        section = {"distributed_type": "DEEPSPEED", "num_processes": 2, "deepspeed_config": LEAF}
        file = written("balanced-leaf", section)
    alone, spread = trained(1), trained(2, file)
    assert len(spread.series("loss")) == STEPS
    assert curve(spread).agrees(curve(alone))
    assert aux_losses(spread).agrees(aux_losses(alone))


def test_it_trains_the_routers() -> None:
    """Controls: without the loss the curve is another, and its value is neither logged nor brought down."""
    asked, not_asked = trained(1), trained(1, asks=False)
    assert not curve(asked).agrees(curve(not_asked))
    assert asked.series("aux_loss")[-1] < asked.series("aux_loss")[0]
    assert "load-balancing loss: router_aux_loss_coef=1, over the global batch" in asked.output
    assert "aux_loss" not in not_asked.rows()[0]
    assert "load-balancing" not in not_asked.output
