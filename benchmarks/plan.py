"""Compares `tunesmith plan` with real runs: `python -m benchmarks.plan [--strategies ddp fsdp2]`.

On the CPU, with the 24M model, all weights trained. "Resting" is the bytes of all tensors of a rank between two steps,
each storage once: weights, optimizer state, and gradients if they are kept. "Peak" is the peak resident memory of the
process (`VmHWM`), startup included, on the fullest rank.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from app.plan.command import count
from app.plan.estimate import Row, candidate, plan_row
from app.plan.hardware import GIB, Hardware
from benchmarks.parallelism import head, line
from benchmarks.shapes import NAMES, model_folder
from tests.launching import ROOT, launch_well
from trainers.config.validation import build
from trainers.strategy.strategy import load_strategy

STRATEGIES = ("single", "ddp", "fsdp1", "fsdp2", "zero1", "zero2", "zero3", "tp", "cp", "sp", "pp", "pp_interleaved")
STEPS = 3
OPTIONS: dict[str, Any] = {
    "dataset_name": "embedded", "method": "full", "max_length": 512, "packing": True, "global_batch_size": 16,
    "per_device_train_batch_size": 4, "max_train_samples": 2000, "max_steps": STEPS, "logging_steps": 1,
    "save_steps": 0, "hang_timeout": 0,
}  # fmt: skip
SITE = """import os
if 'ACCELERATE_MIXED_PRECISION' in os.environ:
    from benchmarks.plan import start
    start({folder!r})
"""
"""A `sitecustomize.py` that counts in every rank."""


def tensor_bytes() -> int:
    """Bytes of all CPU tensors of this process, each storage once."""
    import torch

    gc.collect()
    storages: dict[int, int] = {}
    for tensor in gc.get_objects():
        if (
            issubclass(type(tensor), torch.Tensor)
            and tensor.device.type == "cpu"
            and not hasattr(tensor, "device_mesh")
        ):
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def start(folder: str) -> None:
    """Records this rank's tensor bytes after each step, and its peak memory."""
    from trainers import loop

    module: Any = loop
    inner: Callable[..., Any] = module.train_step
    file = Path(folder) / f"rank-{os.environ.get('RANK', '0')}.json"

    def stepped(*arguments: Any) -> Any:
        result = inner(*arguments)
        status = Path("/proc/self/status").read_text().split()
        peak = int(status[status.index("VmHWM:") + 1]) * 1024
        file.write_text(json.dumps({"resting": tensor_bytes(), "peak": peak}))
        return result

    module.train_step = stepped


def measure(folder: Path, name: str, model: Path, **more: Any) -> tuple[Row, dict[str, float]]:
    """The plan of a strategy, and the measured memory of its fullest rank.

    Args:
        folder: a new folder for the run.
        name: name of the strategy.
        model: folder of the model.
        more: options that override `OPTIONS`.
    """
    inject = folder / "inject"
    inject.mkdir(parents=True)
    (inject / "sitecustomize.py").write_text(SITE.format(folder=str(folder)))
    options = {**OPTIONS, "model_name_or_path": str(model), **more}
    strategy = load_strategy(name)
    hardware = Hardware("cpu", strategy.num_processes, 64 * GIB)
    able = candidate(strategy, build(options), hardware)
    planned = plan_row(*able, count(build(options), hardware, [able]), hardware)
    micro = {"per_device_train_batch_size": planned.micro_batch}
    launch_well(folder / "run", strategy.num_processes, {**options, **micro}, strategy=name, timeout=3000,
                PYTHONPATH=f"{inject}{os.pathsep}{ROOT}")  # fmt: skip
    ranks = [json.loads(file.read_text()) for file in folder.glob("rank-*.json")]
    return planned, {key: max(rank[key] for rank in ranks) for key in ("resting", "peak")}


def cells(planned: Row, measured: dict[str, float]) -> list[str]:
    """A row of the table."""
    memory = planned.memory or {}
    persistent, gradients = memory["weights"] + memory["optimizer"], memory["gradients"]
    return [
        planned.strategy, str(planned.sizes.world), f"{persistent / GIB:.3f}", f"{gradients / GIB:.3f}",
        f"{measured['resting'] / GIB:.3f}", f"{planned.total / GIB:.2f}", f"{measured['peak'] / GIB:.2f}",
        f"{planned.total / measured['peak']:.2f}",
    ]  # fmt: skip


def main() -> None:
    """Prints a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategies", nargs="+", default=STRATEGIES, metavar="NAME")
    parser.add_argument("--model", choices=NAMES, default="24M")
    args = parser.parse_args()
    print(head(["strategy", "processes", "planned weights and optimizer", "gradients", "resting", "planned total",
                "peak", "planned / peak"]))  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        model = model_folder(args.model, Path(folder))
        for name in args.strategies:
            print(line(cells(*measure(Path(folder) / name, name, model))), flush=True)


if __name__ == "__main__":
    main()
