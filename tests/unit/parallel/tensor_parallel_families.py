"""The ranks of tests/unit/parallel/test_tensor_parallel_families.py: every family, split over two and by one process.

Families change with each release of transformers, and what is accepted follows from plans and probes, not from a list.
"""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn
from transformers import AutoConfig, AutoModelForCausalLM

from tests.families import FAMILIES, REQUIRED
from tests.rounding import relative
from tests.unit.parallel.tensor_parallel_ranks import broken, together
from trainers.config.mistakes import ConfigError
from trainers.model.small_model import small_config
from trainers.objectives.loss_module import LossModule
from trainers.parallel import tensor as tensor_parallel
from trainers.strategy.tensor_plan import refusals

CONTROL = "qwen3, a block's input is not copied"


def models() -> Iterator[tuple[str, LossModule]]:
    """Small models of the families whose config alone does not refuse tensor parallelism, the same on every rank."""
    for family in FAMILIES:
        if (model := small_model(family)) is not None:
            for name, weight in model.named_parameters():  # biases are zero otherwise
                nn.init.normal_(weight, mean=1.0 if "norm" in name else 0.0, std=0.15)
            yield family, LossModule(model).eval()


def small_model(family: str) -> Any:
    """None if the config is refused, or the family has no small model (tests/unit/test_families.py names those)."""
    try:
        config = small_config(AutoConfig.for_model(family, **REQUIRED.get(family, {})))
        torch.manual_seed(0)
        plain = {"attn_implementation": "eager", "dtype": torch.float32}
        return None if refusals(config.get_text_config(), 2) else AutoModelForCausalLM.from_config(config, **plain)
    except Exception:  # families raise what they like
        return None


def batch(vocab_size: int) -> dict[str, Any]:
    """Rows of one document each, as for families that cannot be packed."""
    rows = torch.randint(3, vocab_size, (3, 8), generator=torch.Generator().manual_seed(1))
    chosen = torch.tensor([0, 1, 5, 9, 18])
    return {"input_ids": rows, "position_ids": torch.arange(8).expand(3, 8), "documents": None,
            "positions": chosen, "labels": rows.flatten()[chosen + 1]}  # fmt: skip


def compare(loss: LossModule, rank: int) -> str | tuple[float, bool]:
    """The largest relative difference of loss and gradients, and whether tokens are divided between blocks.

    Or why the model is refused. Collective.
    """
    expected, inputs = copy.deepcopy(loss), batch(loss.base.config.get_text_config().vocab_size)
    try:
        slices = tensor_parallel.split_model(loss, None, rank, 2, first=rank == 0)
    except ConfigError as error:
        return "; ".join(error.lines)
    values = []
    for model in (expected, loss):
        value, _ = model(**inputs)
        (value * 0.01).backward()
        values.append(value.detach())
    gradients = [
        {name: weight.grad for name, weight in model.model.named_parameters() if weight.grad is not None}
        for model in (expected, loss)
    ]
    full, _ = together(gradients[1], {name: slices[name] for name in gradients[1] if name in slices}, None)
    if full.keys() != gradients[0].keys():
        return float("inf"), False
    worst = max(relative(full[name], grad) for name, grad in gradients[0].items())
    return max(float(abs(values[1] / values[0] - 1)), worst), loss.tensor.shards is not None


def main(store: str, rank: str, out: str) -> None:
    """One rank; the first one writes the report."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=int(rank), world_size=2)
    report: dict[str, Any] = {}
    for family, loss in models():
        if family == "qwen3":
            with broken("a block's input is not copied"):
                report[CONTROL] = compare(copy.deepcopy(loss), int(rank))
        report[family] = compare(loss, int(rank))
    if rank == "0":
        Path(out).write_text(json.dumps(report), encoding="utf-8")
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
