"""What each strategy sends, keeps and takes: `python -m benchmarks.parallelism [--strategies ddp tp] [--model 24M]`.

Bytes are the payload that a rank hands to a collective, not what the algorithm under it then moves: the whole tensor
of an all-reduce, a reduce-scatter or an all-to-all, the rank's own part of an all-gather, a broadcast's tensor on its
source, a message on its sender; nothing in a group of one. They are counted (see `benchmarks/traffic.py`), per step
and rank: the mean over the ranks, and over the steps after the first two. Under "control" stands the loop's own sum of
loss and requests; what is said between steps (rows of the metrics, saves) is not counted. Memory is that of the last
step, of each rank.

The second table sets them against formulas (`trainers/strategy/traffic.py`), where there are any. These leave out
the norm of the gradients and the sums of shared norms' gradients under tp (Qwen3), which are small, and what ZeRO 3
gathers, which depends on what it found room to keep.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.shapes import NAMES, empty_model, model_folder
from benchmarks.traffic import SITE
from tests.launching import ROOT, launch_well
from trainers.config.options import ConfigError
from trainers.strategy.pipeline_schedules import SCHEDULES
from trainers.strategy.strategy import Strategy, load_strategy, resolve
from trainers.strategy.traffic import Shape, Term, predicted

STRATEGIES = (
    "ddp", "fsdp1", "fsdp2", "hsdp", "zero1", "zero2", "zero3", "sp", "cp", "tp", "fsdp2_tp",
    "zero2_tp", "pp", "pp_interleaved", "pp_dp", "pp_fsdp2",
)  # fmt: skip
COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "broadcast", "send")
STEPS, WARM = 8, 2
OPTIONS = {
    "dataset_name": "embedded", "method": "full", "max_length": 128, "packing": True, "global_batch_size": 16,
    "per_device_train_batch_size": 4, "learning_rate": 1e-4, "max_train_samples": 2000, "mixed_precision": "no",
    "hang_timeout": 0, "logging_steps": 1, "save_steps": 0,
}  # fmt: skip


@dataclass(frozen=True)
class Measured:
    """One strategy's run.

    Args:
        ranks: what each rank counted over all steps: `sent`, `calls`, and its micro-batches in `steps`.
        memory: GiB of each rank.
        seconds: of a step, the median.
    """

    strategy: Strategy
    ranks: list[dict[str, Any]]
    memory: list[float]
    seconds: float

    @property
    def steps(self) -> int:
        """Those that were counted."""
        return len(self.ranks[0]["steps"]) - WARM

    def sent(self, collective: str) -> float:
        """Bytes per step, the mean over the ranks."""
        return statistics.mean(rank["sent"].get(collective, 0) for rank in self.ranks) / self.steps

    def expected(self, shape: Shape) -> list[Term]:
        """What the formulas say, per step, the mean over the ranks."""
        strategy = self.strategy
        kind = f"ZERO{strategy.zero_stage}" if strategy.zero_stage else strategy.distributed_type
        chunks = SCHEDULES[strategy.pp_schedule].chunks
        by_rank = [predicted(kind, strategy.sizes, chunks, shape, rank["steps"], WARM) for rank in self.ranks]
        return [
            Term(alike[0].collective, alike[0].words, statistics.mean(term.bytes for term in alike) / self.steps)
            for alike in zip(*by_rank, strict=True)
        ]


def sized(name: str, processes: int | None = None) -> Strategy:
    """A strategy for a number of processes; None: as many as its file says.

    Raises:
        ConfigError: when it cannot have that many.
    """
    strategy = load_strategy(name)
    return resolve(strategy, strategy.num_processes if processes is None else processes, "no")


def measure(folder: Path, strategy: Strategy, model: Path, steps: int = STEPS, **more: Any) -> Measured:
    """Trains a few steps and counts.

    Args:
        folder: a new one, for the run.
        more: options, in place of `OPTIONS`.
    """
    inject = folder / "inject"
    inject.mkdir(parents=True)
    (inject / "sitecustomize.py").write_text(SITE.format(folder=str(folder), warm=WARM))
    options = {**OPTIONS, "model_name_or_path": model, "max_steps": steps, **more}
    finished = launch_well(folder / "run", strategy.num_processes, options, strategy=strategy.name, timeout=3000,
                           PYTHONPATH=f"{inject}{os.pathsep}{ROOT}")  # fmt: skip
    ranks = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(strategy.num_processes)]
    rows = finished.rows()
    times = [after["elapsed_s"] - before["elapsed_s"] for before, after in pairwise(rows)]
    return Measured(strategy, ranks, rows[-1]["memory_gib_by_rank"], statistics.median(times[WARM - 1 :]))


def shown(size: float) -> str:
    """Bytes in decimal units, with three digits."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= factor:
            return f"{size / factor:.3g} {unit}" if size < 999.5 * factor else f"{size / factor:.0f} {unit}"
    return f"{size:.0f} B" if size else "0"


def first_row(found: Measured) -> list[str]:
    """What a strategy sends, keeps and takes."""
    kinds = {kind for rank in found.ranks for kind in rank["sent"]}
    others = sum(found.sent(kind) for kind in kinds - {*COLLECTIVES, "control"})
    return [
        found.strategy.name, str(found.strategy.num_processes), *(shown(found.sent(one)) for one in COLLECTIVES),
        shown(others), shown(found.sent("control")), " ".join(f"{one:.2f}" for one in found.memory),
        f"{found.seconds:.2f}",
    ]  # fmt: skip


def second_rows(found: Measured, shape: Shape) -> list[list[str]]:
    """Predicted against counted, a row for each collective that has a formula."""
    return [
        [found.strategy.name, term.collective, term.words, shown(term.bytes), shown(found.sent(term.collective)),
         f"{found.sent(term.collective) / term.bytes:.3f}" if term.bytes else "none"]
        for term in found.expected(shape)
    ]  # fmt: skip


def line(cells: Sequence[str]) -> str:
    """A row of a Markdown table."""
    return f"| {' | '.join(cells)} |"


def head(cells: Sequence[str]) -> str:
    """The first two lines of one."""
    return f"{line(cells)}\n|{'---|' * len(cells)}"


def main() -> None:
    """Prints two Markdown tables; the second one after all runs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategies", nargs="+", choices=STRATEGIES, default=STRATEGIES, metavar="NAME",
                        help=f"some of {', '.join(STRATEGIES)}; default: all")  # fmt: skip
    parser.add_argument("--model", choices=NAMES, default="embedded")
    parser.add_argument("--num_processes", type=int, help="for all of them; default: what each strategy's file says")
    parser.add_argument("--share_gpus", action="store_true",
                        help="start beside other runs on this machine; times then mean little")  # fmt: skip
    asked = parser.parse_args()
    try:
        strategies = [sized(name, asked.num_processes) for name in asked.strategies]
    except ConfigError as error:
        parser.error(str(error))
    rows: list[list[str]] = []
    with tempfile.TemporaryDirectory() as place:
        model = model_folder(asked.model, Path(place))
        shape = Shape.of(empty_model(model))
        columns = ["strategy", "processes", *COLLECTIVES, "others", "control", "GiB by rank", "s per step"]
        print(f"{asked.model}, {shape.parameters:,} parameters; bytes per step and rank\n\n{head(columns)}", flush=True)
        for strategy in strategies:
            found = measure(Path(place) / strategy.name, strategy, model, share_gpus=asked.share_gpus)
            print(line(first_row(found)), flush=True)
            rows += second_rows(found, shape)
    print(f"\n{head(['strategy', 'collective', 'formula', 'predicted', 'counted', 'counted / predicted'])}")
    print("\n".join(map(line, rows)))


if __name__ == "__main__":
    main()
