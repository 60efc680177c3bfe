"""What a save costs the training: `python -m benchmarks.checkpoint_stall [--processes 2] [--strategies ddp fsdp2]`.

A model of 135M fp32 weights with Adam is trained three ways: without saves, with saves that are waited for, and with
saves that overlap training, as Tunesmith makes them. The first row of a strategy is what its others are held against.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
from datetime import datetime
from pathlib import Path

from tests.launching import ROOT, Finished, launch_well

STEPS, EVERY = 18, 6
WAITING = "import os\nif 'RANK' in os.environ:\n    import trainers.loop\n    trainers.loop.SAVE_PATIENCE = 1e9\n"
WAYS = ("no save", "waited for", "overlapped")


def model_folder(folder: Path) -> Path:
    """SmolLM2-135M's shape with the embedded model's tokenizer; its weights are made from the seed."""
    shape = json.loads((ROOT / "tests/unit/architectures/smollm2-135m.json").read_text())["config"]
    model = Path(shutil.copytree(ROOT / "trainers/embedded/base", folder / "model"))
    (model / "model.safetensors").unlink()
    (model / "config.json").write_text(json.dumps({**shape, "architectures": ["LlamaForCausalLM"]}))
    return model


def seconds_between(run: Finished, first: int, last: int) -> float:
    """Wall time from the end of one logged step to that of another."""
    times = {}
    for line in run.run.log.read_text().splitlines():
        stamp, _, words = line.partition(" [rank 0] step ")
        if words:
            times.setdefault(int(words.split()[0]), datetime.fromisoformat(stamp))
    return (times[last] - times[first]).total_seconds()


def measure(folder: Path, model: Path, strategy: str, processes: int, way: str) -> list[str]:
    """One run; the cells of its row."""
    inject = folder / "inject"
    inject.mkdir(exist_ok=True)
    (inject / "sitecustomize.py").write_text(WAITING if way == "waited for" else "")
    options = {
        "model_name_or_path": model, "dataset_name": "embedded", "random_init": True, "max_length": 128,
        "global_batch_size": 2 * processes, "per_device_train_batch_size": 1, "learning_rate": 1e-4,
        "max_train_samples": 200, "max_steps": STEPS, "logging_steps": 1, "hang_timeout": 0,
        "save_steps": 0 if way == "no save" else EVERY,
    }  # fmt: skip
    output = folder / f"{strategy}-{way.replace(' ', '-')}"
    done = launch_well(output, processes, options, strategy=strategy, timeout=3000,
                       PYTHONPATH=f"{inject}{os.pathsep}{ROOT}")  # fmt: skip
    saves = [row for row in done.rows("checkpoint_bytes") if row["step"] < STEPS]
    shutil.rmtree(output / "checkpoints")
    shutil.rmtree(output / "model")
    cells = [strategy, way, f"{seconds_between(done, 1, STEPS - 1):.1f}"]
    if not saves:
        return [*cells, "", "", ""]
    middle = {key: statistics.median(row[key] for row in saves) for key in saves[0] if key.startswith("checkpoint_")}
    return [*cells, f"{middle['checkpoint_bytes'] / 2**30:.2f}", f"{middle['checkpoint_write_s']:.2f}",
            f"{middle['checkpoint_stall_s']:.2f}"]  # fmt: skip


def main() -> None:
    """Prints a Markdown table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--strategies", nargs="+", default=["ddp", "fsdp2"])
    asked = parser.parse_args()
    print(f"| strategy | saves | s for {STEPS - 2} steps | GiB | written in s | training stood still s |")
    print("|---|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        model = model_folder(Path(folder))
        for strategy in asked.strategies:
            for way in WAYS:
                row = measure(Path(folder), model, strategy, asked.processes, way)
                print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()
