"""Memory per rank as rows are split over more ranks: `python -m benchmarks.long_rows [--length 8192] [--ways sp cp]`.

A model of 24M parameters, all weights trained, one packed row per step; its 6 heads allow 2 or 3 ranks under sp. Memory
is the peak resident memory of each rank's process. The losses show that the work is equal.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path

from benchmarks.rows import write_chat
from benchmarks.shapes import model_folder
from tests.launching import ROOT, launch_well
from trainers.strategy.strategy import STRATEGIES_DIR

STEPS = 3
SITE = """
import atexit, json, os, resource, sys
words = sys.orig_argv
if any(word.endswith("trainers/train.py") for word in words) and "accelerate.commands.launch" not in words:
    def tell():
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        with open(os.path.join({folder!r}, os.environ.get("RANK", "0") + ".json"), "w") as file:
            json.dump(peak, file)
    atexit.register(tell)
"""


def strategy_file(name: str, ranks: int, folder: Path) -> str:
    """The strategy's file, changed to this many sequence shards; `single` for one process."""
    if ranks == 1:
        return "single"
    text = (STRATEGIES_DIR / f"{name}.yaml").read_text()
    file = folder / f"{name}-{ranks}.yaml"
    file.write_text(
        text.replace(f"{name}_size: 2", f"{name}_size: {ranks}").replace("processes: 2", f"processes: {ranks}")
    )
    return str(file)


def measure(name: str, ranks: int, length: int, folder: Path) -> str:
    """One line of the table."""
    inject, peaks = folder / "inject", folder / f"{name}-{ranks}"
    inject.mkdir(exist_ok=True)
    peaks.mkdir()
    (inject / "sitecustomize.py").write_text(SITE.format(folder=str(peaks)))
    options = {
        "model_name_or_path": model_folder("24M", folder), "dataset_name": folder / "train.jsonl", "method": "full",
        "max_length": length, "global_batch_size": 1, "max_steps": STEPS, "logging_steps": 1, "save_steps": 0,
        "hang_timeout": 0, "learning_rate": 1e-4, "cache_dir": folder / "cache",
    }  # fmt: skip
    run = launch_well(folder / f"run-{name}-{ranks}", ranks, options, strategy=strategy_file(name, ranks, folder),
                      timeout=3000, PYTHONPATH=f"{inject}{os.pathsep}{ROOT}")  # fmt: skip
    peak_gib = [json.loads((peaks / f"{rank}.json").read_text()) / 2**20 for rank in range(ranks)]
    seconds = run.rows("loss")[-1]["elapsed_s"] / STEPS
    losses = " ".join(f"{loss:.6f}" for loss in run.series("loss"))
    return (
        f"| {name} | {ranks} | {length} | {' '.join(f'{peak:.2f}' for peak in peak_gib)} | {seconds:.1f} | {losses} |"
    )


def main() -> None:
    """Prints a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--ways", nargs="+", choices=["sp", "cp"], default=["cp"])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    args = parser.parse_args()
    print("| strategy | ranks | tokens in a row | GiB of each rank | s per step | losses |\n|---|---|---|---|---|---|",
          flush=True)  # fmt: skip
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_chat(folder / "train.jsonl", 4000, seed=1)
        for strategy in args.ways:
            for ranks in args.ranks:
                print(measure(strategy, ranks, args.length, folder), flush=True)


if __name__ == "__main__":
    main()
