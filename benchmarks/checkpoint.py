"""Cost of saving checkpoints: `python -m benchmarks.checkpoint [--models 24M 135M] [--strategies ddp fsdp2]`.

Saves weights and Adam's state: with Tunesmith, overlapping training and synchronously; with `torch.save` and torch's
distributed checkpoint (DCP), synchronously from a plain loop. The last column is the time in which training was
blocked, relative to 50 steps of the same model without a save.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from datetime import datetime
from pathlib import Path

from benchmarks.shapes import NAMES, model_folder
from tests.launching import ROOT, Finished, environment, launch_well

STEPS, EVERY, SAVE_STEPS = 18, 6, 50
SET_TIMEOUT = (
    "import os\nif 'RANK' in os.environ:\n    import trainers.loop\n    trainers.loop.SAVE_TIMEOUT = {seconds}\n"
)
VARIANTS = {"Tunesmith": None, "Tunesmith, synchronous": 1e9}


def seconds_between(run: Finished, first: int, last: int) -> float:
    """Wall time between the ends of two logged steps."""
    times: dict[int, datetime] = {}
    for line in run.run.log.read_text().splitlines():
        stamp, _, message = line.partition(" [rank 0] step ")
        if message:
            times.setdefault(int(message.split()[0]), datetime.fromisoformat(stamp))
    return (times[last] - times[first]).total_seconds()


def trained(folder: Path, model: Path, strategy: str, save_steps: int, timeout: float | None = None) -> Finished:
    """One run of Tunesmith on two processes."""
    inject = folder / "inject"
    inject.mkdir(exist_ok=True)
    (inject / "sitecustomize.py").write_text("" if timeout is None else SET_TIMEOUT.format(seconds=timeout))
    options = {
        "model_name_or_path": model, "dataset_name": "embedded", "method": "full", "max_length": 128,
        "global_batch_size": 16, "per_device_train_batch_size": 8, "learning_rate": 1e-4, "max_train_samples": 2000,
        "max_steps": STEPS, "logging_steps": 1, "hang_timeout": 0, "save_steps": save_steps,
    }  # fmt: skip
    output = folder / "run"
    shutil.rmtree(output, ignore_errors=True)
    return launch_well(output, 2, options, strategy=strategy, timeout=3000,
                       PYTHONPATH=f"{inject}{os.pathsep}{ROOT}")  # fmt: skip


def plain(folder: Path, model: Path, strategy: str) -> dict[str, dict[str, float]]:
    """Gigabytes and seconds of `torch.save` and DCP."""
    out = folder / "plain.json"
    argv = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", ROOT / "benchmarks/plain_saves.py"]
    argv += ["--model", model, "--strategy", strategy, "--folder", folder / "plain", "--out", out]
    subprocess.run([sys.executable, *map(str, argv)], env=environment(), check=True, stdout=subprocess.DEVNULL)
    shutil.rmtree(folder / "plain")
    return dict(json.loads(out.read_text()))


def measure(folder: Path, name: str, strategy: str) -> list[list[str]]:
    """The rows of one model and strategy."""
    model = model_folder(name, folder)
    step = seconds_between(trained(folder, model, strategy, 0), 1, STEPS - 1) / (STEPS - 2)
    results: dict[str, dict[str, float]] = {}
    for variant, timeout in VARIANTS.items():
        saves = trained(folder, model, strategy, EVERY, timeout).rows("checkpoint_bytes")
        median = {key: statistics.median(row[key] for row in saves if row["step"] < STEPS) for key in saves[0]}
        results[variant] = {"gib": median["checkpoint_bytes"] / 2**30, "written": median["checkpoint_write_s"],
                      "stall": median["checkpoint_stall_s"]}  # fmt: skip
    results |= plain(folder, model, strategy)
    return [
        [name, strategy, variant, f"{result['gib']:.2f}", f"{result['written']:.2f}", f"{result['stall']:.2f}",
         f"{result['stall'] / (SAVE_STEPS * step):.1%}"]
        for variant, result in results.items()
    ]  # fmt: skip


def main() -> None:
    """Prints a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", choices=NAMES, default=["24M", "135M"])
    parser.add_argument("--strategies", nargs="+", choices=["ddp", "fsdp2"], default=["ddp", "fsdp2"])
    args = parser.parse_args()
    print(f"| model | strategy | saved by | GiB | written in s | blocked s | of {SAVE_STEPS} steps |")
    print("|---|---|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for name in args.models:
            for strategy in args.strategies:
                for row in measure(Path(folder), name, strategy):
                    print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()
