"""Traffic, memory and step time of strategies: `python -m benchmarks.parallelism [--strategies ddp tp] [--model 24M]`.

Bytes are the payload that a rank passes to a collective, not what the algorithm then moves: the full tensor of an
all-reduce, a reduce-scatter or an all-to-all, the rank's own shard of an all-gather, the tensor of a broadcast on its
source, a message on its sender; nothing in a group of one. They are counted (see `benchmarks/collectives.py`) per step
and rank: the mean over the ranks and over the steps after the first two. "control" is the loop's own sum of loss and
requests; communication between steps (metrics, saves) is not counted. Memory is that of each rank in the last step.

`python -m benchmarks.traffic` compares the bytes with formulas.
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

from app.plan.speed import traffic_kind
from benchmarks.collectives import SITE
from benchmarks.shapes import NAMES, empty_model, model_folder
from tests.launching import ROOT, launch_well
from trainers.config.mistakes import ConfigError
from trainers.strategy.pipeline_schedules import SCHEDULES
from trainers.strategy.strategy import Strategy, load_strategy, resolve
from trainers.strategy.traffic import ModelSizes, Term, predicted

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
        seconds: median time of a step.
    """

    strategy: Strategy
    ranks: list[dict[str, Any]]
    memory: list[float]
    seconds: float

    @property
    def steps(self) -> int:
        """Number of counted steps."""
        return len(self.ranks[0]["steps"]) - WARM

    def sent(self, collective: str) -> float:
        """Bytes per step, the mean over the ranks."""
        return statistics.mean(rank["sent"].get(collective, 0) for rank in self.ranks) / self.steps

    def wire(self) -> float:
        """Bytes per step that a rank sends as a result, in rings and without the loop's own sums: the mean."""
        wires = [sum(rank["wire"].values()) - rank["wire"].get("control", 0) for rank in self.ranks]
        return statistics.mean(wires) / self.steps

    def calls(self, collective: str) -> float:
        """Calls per step, the mean over the ranks."""
        return statistics.mean(rank["calls"].get(collective, 0) for rank in self.ranks) / self.steps

    def expected(self, sizes: ModelSizes) -> list[Term]:
        """What the formulas predict per step, as the mean over the ranks."""
        strategy = self.strategy
        chunks = SCHEDULES[strategy.pp_schedule].chunks
        by_rank = [predicted(traffic_kind(strategy), strategy.sizes, chunks, sizes, rank["steps"], WARM)
                   for rank in self.ranks]  # fmt: skip
        return [
            Term(alike[0].collective, alike[0].formula,
                 *(statistics.mean(getattr(term, name) for term in alike) / self.steps for name in ("bytes", "wire")),
                 calls=statistics.mean(term.calls for term in alike) / self.steps)
            for alike in zip(*by_rank, strict=True)
        ]  # fmt: skip


def sized(name: str, processes: int | None = None) -> Strategy:
    """A strategy for a number of processes; None: the number in its file.

    Raises:
        ConfigError: if it does not support that number.
    """
    strategy = load_strategy(name)
    return resolve(strategy, strategy.num_processes if processes is None else processes, "no")


def measure(folder: Path, strategy: Strategy, model: Path, steps: int = STEPS, **more: Any) -> Measured:
    """Trains a few steps and counts the traffic.

    Args:
        folder: a new folder for the run.
        strategy: the strategy to measure.
        model: folder of the model.
        steps: number of steps.
        more: options that override `OPTIONS`.
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


def format_bytes(size: float) -> str:
    """Bytes in decimal units, with three digits."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= factor:
            return f"{size / factor:.3g} {unit}" if size < 999.5 * factor else f"{size / factor:.0f} {unit}"
    return f"{size:.0f} B" if size else "0"


def first_row(measured: Measured) -> list[str]:
    """A row of the table: traffic, memory and step time of a strategy."""
    kinds = {kind for rank in measured.ranks for kind in rank["sent"]}
    others = sum(measured.sent(kind) for kind in kinds - {*COLLECTIVES, "control"})
    return [
        measured.strategy.name, str(measured.strategy.num_processes),
        *(format_bytes(measured.sent(collective)) for collective in COLLECTIVES), format_bytes(others),
        format_bytes(measured.sent("control")), " ".join(f"{gib:.2f}" for gib in measured.memory),
        f"{measured.seconds:.2f}",
    ]  # fmt: skip


def line(cells: Sequence[str]) -> str:
    """A row of a Markdown table."""
    return f"| {' | '.join(cells)} |"


def head(cells: Sequence[str]) -> str:
    """The header of a Markdown table."""
    return f"{line(cells)}\n|{'---|' * len(cells)}"


def main() -> None:
    """Prints a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategies", nargs="+", choices=STRATEGIES, default=STRATEGIES, metavar="NAME",
                        help=f"some of {', '.join(STRATEGIES)}; default: all")  # fmt: skip
    parser.add_argument("--model", choices=NAMES, default="embedded")
    parser.add_argument(
        "--num_processes",
        type=int,
        help="number of processes for all strategies; default: that of each strategy's file",
    )
    parser.add_argument("--share_gpus", action="store_true",
                        help="start even if other runs use the GPUs; times are then unreliable")  # fmt: skip
    args = parser.parse_args()
    try:
        strategies = [sized(name, args.num_processes) for name in args.strategies]
    except ConfigError as error:
        parser.error(str(error))
    with tempfile.TemporaryDirectory() as folder:
        model = model_folder(args.model, Path(folder))
        sizes = ModelSizes.of(empty_model(model))
        columns = ["strategy", "processes", *COLLECTIVES, "others", "control", "GiB by rank", "s per step"]
        print(f"{args.model}, {sizes.parameters:,} parameters; bytes per step and rank\n\n{head(columns)}", flush=True)
        for strategy in strategies:
            measured = measure(Path(folder) / strategy.name, strategy, model, share_gpus=args.share_gpus)
            print(line(first_row(measured)), flush=True)


if __name__ == "__main__":
    main()
