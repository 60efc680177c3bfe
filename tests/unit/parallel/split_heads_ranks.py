"""The ranks of tests/unit/parallel/test_split_heads.py: a distillation with split vocabularies, and with full ones."""

from __future__ import annotations

import json
import sys
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import distributed, nn

from tests.rounding import relative
from trainers.data.layout import TopTokens
from trainers.objectives import distillation
from trainers.objectives.distillation import Divergence, Head, classes_of, compare_heads
from trainers.objectives.log_probs import VocabularyShard
from trainers.objectives.output_head import HeadRule

TOKENS, WIDTH, OTHER_WIDTH = 70, 5, 7
ROWS = {"equal": (97, 97), "teacher padded": (97, 103), "student padded": (103, 97)}
TEACHERS = {"loaded": None, "5 tokens": 5, "all but one": 96}
LOSS_TYPES = ("forward_kl", "reverse_kl", "jsd")
CONTROL = "nothing is summed"


class Case:
    """Random heads and inputs in fp64, equal on every rank."""

    def __init__(self, rows: str, recorded: int | None):
        torch.manual_seed(0)
        self.sizes, shared = ROWS[rows], min(ROWS[rows])
        self.layers = [nn.Linear(width, size, dtype=torch.float64)
                       for width, size in zip((WIDTH, OTHER_WIDTH), self.sizes, strict=True)]  # fmt: skip
        self.inputs = [3 * torch.randn(TOKENS, width, dtype=torch.float64) for width in (WIDTH, OTHER_WIDTH)]
        self.inputs[0].requires_grad_()
        self.labels = torch.randint(0, shared, (TOKENS,))
        self.rules = HeadRule(0.7, 2.0), HeadRule(1.3)
        with torch.no_grad():  # half of them are predicted
            self.labels[::2] = self.layers[0](self.inputs[0])[::2, :shared].argmax(-1)
        self.top: TopTokens | None = None
        if recorded is not None:
            with torch.no_grad():
                logits = self.rules[1](self.layers[1](self.inputs[1]))[:, :shared] / 1.7
                ids = logits.topk(recorded).indices
                classes, _ = classes_of(logits.log_softmax(-1), ids, VocabularyShard(0, shared))
            self.top = TopTokens(ids, classes, shared)

    def compared(self, divergence: Divergence, borders: list[int], rank: int, group: Any) -> dict[str, torch.Tensor]:
        """Loss, metrics, and gradients of the student's input and of some rows of its head.

        Args:
            divergence: the loss.
            borders: first token of each part, and the end of the student's last one.
            rank: number of the part.
            group: the ranks that share the vocabulary; None if this one has all of it.
        """
        heads = []
        for layer, hidden, rule, size in zip(self.layers, self.inputs, self.rules, self.sizes, strict=True):
            stop = size if rank == len(borders) - 2 else borders[rank + 1]
            own = nn.Linear(1, 1, dtype=torch.float64)
            own.weight, own.bias = (nn.Parameter(full.detach()[borders[rank] : stop]) for full in layer.parameters())
            heads.append(Head(hidden, own, rule, VocabularyShard(borders[rank], size, group)))
        teacher = heads[1] if self.top is None else self.top
        loss, _, gradients = compare_heads(heads[0], teacher, self.labels, divergence, True)
        again, metrics, _ = compare_heads(heads[0], teacher, self.labels, divergence, False)
        results = {"loss": loss, "again": again, "metrics": metrics}
        return results | {name: value for name, value in gradients._asdict().items() if value is not None}


def apart(case: Case, divergence: Divergence, rank: int, world: int) -> dict[str, float]:
    """The largest differences between the split heads and the full ones, relative to the largest value."""
    size = case.sizes[0]
    borders = [size * number // world for number in range(world + 1)]
    wanted = case.compared(divergence, [0, size], 0, None)
    results = case.compared(divergence, borders, rank, distributed.group.WORLD)
    part = slice(borders[rank], borders[rank + 1])
    wanted |= {name: wanted[name][part] for name in ("weight", "bias")}
    return {name: relative(results[name], wanted[name]) for name in wanted}


def main(store: str, rank: str, world: str, out: str) -> None:
    """One rank; the first one writes the largest differences of any."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=int(rank), world_size=int(world))
    results: dict[str, dict[str, float]] = {}
    with mock.patch.object(distillation, "LOGITS_PER_CHUNK", 1):  # 64 tokens, and 6
        for rows, (name, recorded), loss_type in product(ROWS, TEACHERS.items(), LOSS_TYPES):
            case = Case(rows, recorded)
            results[f"{rows}, {name}, {loss_type}"] = apart(case, divergence(loss_type), int(rank), int(world))
        with mock.patch.object(VocabularyShard, "reduce", lambda self, values, operation=None: values):
            results[CONTROL] = apart(Case("equal", None), divergence("jsd"), int(rank), int(world))
    everywhere: list[Any] = [None] * int(world)
    distributed.all_gather_object(everywhere, results)
    worst = {case: {name: max(one[case][name] for one in everywhere) for name in results[case]} for case in results}
    if rank == "0":
        Path(out).write_text(json.dumps(worst), encoding="utf-8")
    distributed.destroy_process_group()


def divergence(loss_type: str) -> Divergence:
    """At a temperature, with a share of the supervised loss."""
    return Divergence(loss_type, jsd_beta=0.3, distill_temperature=1.7, nll_weight=0.4)


if __name__ == "__main__":
    main(*sys.argv[1:])
