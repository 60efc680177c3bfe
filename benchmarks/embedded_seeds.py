"""Exact match of the embedded presets on the held-out test split, over seeds: `python benchmarks/embedded_seeds.py`.

Each run is `tunesmith train PRESET --seed N` on two processes, then generation. Prints a table.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def run(argv: list[str]) -> str:
    """Standard output of one of the project's programs."""
    return subprocess.run([sys.executable, "-m", *argv], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout


def measure(preset: str, seed: int, folder: Path) -> dict[str, float]:
    """Trains and scores one preset with one seed."""
    output = folder / f"{preset}-{seed}"
    argv = ["app.cli", "train", preset, "--seed", str(seed), "--output_dir", str(output), "--json", "--quiet"]
    document = json.loads(run(argv))
    rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    seconds = max(row["elapsed_s"] for row in rows if "elapsed_s" in row)
    (score,) = json.loads(run(["trainers.tools.score", "--model", document["export_dir"], "--split", "test"]))
    return {"seconds": seconds, "eval_loss": score["eval_loss"], "exact_match": score["exact_match"]}


def main() -> None:
    """Prints a row per preset and seed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--presets", nargs="+", default=["tiny-lora", "tiny-full"])
    arguments = parser.parse_args()
    print("| preset | seed | training s | eval loss | exact match, test |\n|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for preset in arguments.presets:
            for seed in arguments.seeds:
                row = measure(preset, seed, Path(folder))
                values = f"{row['seconds']:.1f} | {row['eval_loss']:.4f} | {row['exact_match']:.3f}"
                print(f"| {preset} | {seed} | {values} |", flush=True)


if __name__ == "__main__":
    main()
