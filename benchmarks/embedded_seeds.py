"""What the embedded presets learn, on the held-out test split, over seeds: `python -m benchmarks.embedded_seeds`.

Each run is `tunesmith train PRESET --seed N` on two processes, then `trainers.tools.score`. A preset that builds on
another run has one of the same seed, in a row of its own. As a control, a preset that learns from pairs is trained a
second time with chosen and rejected swapped, one that distils with the base as its teacher, and one that samples with a
random reward. Prints a table.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from trainers.config.objectives import PREFERENCE
from trainers.config.options import EMBEDDED
from trainers.config.parse import Request
from trainers.config.presets import find_preset

ROOT = Path(__file__).resolve().parent.parent
SWAPPED = ("--columns", "chosen=rejected,rejected=chosen")
RANDOM = ("--reward_funcs", "benchmarks/random_reward.py:random_reward")


def run(argv: list[str]) -> str:
    """Standard output of one of the project's programs."""
    return subprocess.run([sys.executable, "-m", *argv], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout


def score(model: str, flags: list[str]) -> dict[str, Any]:
    """Scores a model folder; see `trainers.tools.score`."""
    (scores,) = json.loads(run(["trainers.tools.score", "--model", model, *flags]))
    return dict(scores)


def measure(preset: str, seed: int, folder: Path, more: tuple[str, ...], flags: list[str]) -> dict[str, Any]:
    """Trains and scores one preset with one seed.

    Args:
        preset: its name.
        seed: the seed.
        folder: where the run is written.
        more: further options.
        flags: of the scoring program.

    Returns:
        The scores, and `seconds` of training.
    """
    argv = ["app.cli", "train", preset, "--seed", str(seed), "--output_dir", str(folder), "--json", "--quiet", *more]
    document = json.loads(run(argv))
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return score(document["export_dir"], flags) | {"seconds": max(row.get("elapsed_s", 0) for row in rows)}


def line(name: str, seed: object, row: dict[str, Any]) -> str:
    """A row of the table."""
    accuracy = row.get("preference_accuracy", row.get("reward_accuracy"))
    preferred, match = ("" if value is None else f"{value:.3f}" for value in (accuracy, row.get("exact_match")))
    seconds = f"{row['seconds']:.1f}" if seed != "" else ""
    return f"| {name} | {seed} | {seconds} | {row['eval_loss']:.4f} | {match} | {preferred} |"


def main() -> None:
    """Prints a row per preset and seed, and one of the base model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--presets", nargs="+", default=["tiny-lora", "tiny-full", "tiny-dpo"])
    arguments = parser.parse_args()
    print("| preset | seed | training s | eval loss | exact match, test | preference accuracy, test |")
    print("|---|---|---|---|---|---|", flush=True)
    print(line("(base)", "", score("trainers/embedded/base", ["--preferences"])), flush=True)
    print(line("(base, new head)", "", score("trainers/embedded/base", ["--reward"])), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for preset in arguments.presets:
            distils = find_preset(preset).options.get("objective") == "distill"
            spec = Request(preset, options={"teacher": EMBEDDED} if distils else {}).resolve().objective_spec
            pairs, first = PREFERENCE in spec.formats, find_preset(preset).first
            flags = ["--reward"] if spec.scalar_head else ["--preferences"] if pairs else []
            for seed in arguments.seeds:
                built_on: tuple[str, ...] = ()
                if first is not None:
                    output = Path(folder) / f"{preset}-{seed}-first"
                    more = tuple(text for name, value in first.options.items() for text in (f"--{name}", str(value)))
                    print(line(" ".join((first.method, *more)), seed, measure(first.method, seed, output, more, flags)))
                    built_on = (f"--{first.used_as}", str(output / "model"))
                trained = {preset: built_on}
                trained |= {f"{preset}, labels swapped": SWAPPED} if pairs else {}
                trained |= {f"{preset}, the base as teacher": ("--teacher", EMBEDDED)} if distils else {}
                trained |= {f"{preset}, a random reward": (*built_on, *RANDOM)} if spec.samples else {}
                for number, (name, more) in enumerate(trained.items()):
                    output = Path(folder) / f"{preset}-{seed}-{number}"
                    print(line(name, seed, measure(preset, seed, output, more, flags)), flush=True)


if __name__ == "__main__":
    main()
