"""What a save costs the training: `python -m benchmarks.checkpoint [--models 24M 135M] [--strategies ddp fsdp2]`.

Weights and Adam's state. Tunesmith saves as it does, overlapping training, and once waited for; `torch.save` and
torch's distributed checkpoint (DCP) save the same from a plain loop, which waits. The last column holds the time in
which training stood still against 50 steps of the same model without any save.
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
PATIENCE = (
    "import os\nif 'RANK' in os.environ:\n    import trainers.loop\n    trainers.loop.SAVE_PATIENCE = {seconds}\n"
)
WAYS = {"Tunesmith": None, "Tunesmith, waited for": 1e9}


def seconds_between(run: Finished, first: int, last: int) -> float:
    """Wall time from the end of one logged step to that of another."""
    times: dict[int, datetime] = {}
    for line in run.run.log.read_text().splitlines():
        stamp, _, words = line.partition(" [rank 0] step ")
        if words:
            times.setdefault(int(words.split()[0]), datetime.fromisoformat(stamp))
    return (times[last] - times[first]).total_seconds()


def trained(folder: Path, model: Path, strategy: str, save_steps: int, patience: float | None = None) -> Finished:
    """One run of Tunesmith on two processes."""
    inject = folder / "inject"
    inject.mkdir(exist_ok=True)
    (inject / "sitecustomize.py").write_text("" if patience is None else PATIENCE.format(seconds=patience))
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
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", ROOT / "benchmarks/plain_saves.py"]
    words += ["--model", model, "--strategy", strategy, "--folder", folder / "plain", "--out", out]
    subprocess.run([sys.executable, *map(str, words)], env=environment(), check=True, stdout=subprocess.DEVNULL)
    shutil.rmtree(folder / "plain")
    return dict(json.loads(out.read_text()))


def measure(folder: Path, name: str, strategy: str) -> list[list[str]]:
    """The rows of one model and strategy."""
    model = model_folder(name, folder)
    step = seconds_between(trained(folder, model, strategy, 0), 1, STEPS - 1) / (STEPS - 2)
    found: dict[str, dict[str, float]] = {}
    for way, patience in WAYS.items():
        saves = trained(folder, model, strategy, EVERY, patience).rows("checkpoint_bytes")
        middle = {key: statistics.median(row[key] for row in saves if row["step"] < STEPS) for key in saves[0]}
        found[way] = {"gib": middle["checkpoint_bytes"] / 2**30, "written": middle["checkpoint_write_s"],
                      "stall": middle["checkpoint_stall_s"]}  # fmt: skip
    found |= plain(folder, model, strategy)
    return [
        [name, strategy, way, f"{one['gib']:.2f}", f"{one['written']:.2f}", f"{one['stall']:.2f}",
         f"{one['stall'] / (SAVE_STEPS * step):.1%}"]
        for way, one in found.items()
    ]  # fmt: skip


def main() -> None:
    """Prints a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", choices=NAMES, default=["24M", "135M"])
    parser.add_argument("--strategies", nargs="+", choices=["ddp", "fsdp2"], default=["ddp", "fsdp2"])
    asked = parser.parse_args()
    print(f"| model | strategy | saved by | GiB | written in s | stood still s | of {SAVE_STEPS} steps |")
    print("|---|---|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for name in asked.models:
            for strategy in asked.strategies:
                for row in measure(Path(folder), name, strategy):
                    print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()
