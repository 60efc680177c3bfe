"""Compares `tunesmith plan` with runs on the CPU: `python -m benchmarks.plan [--strategies ddp] [--teacher 24M]`.

"Measured" is the peak of `RssAnon` in /proc/self/status while a rank trains, read every few milliseconds by a thread of
that rank, less its value once all modules are imported and the process group exists. "Planned" is the sum of all uses
without that baseline, which is part of `overhead`. "Allocated" is the peak of what glibc has handed out (`mallinfo2`).
It includes pages that were never written, and misses the pages of the model's file that writing copied.
"Load", "wrap" and "save" are the peaks while the model is loaded, wrapped, and saved and exported. "Rest" is the bytes
of all tensors between two steps, each storage once. All are in GiB, and of the fullest rank.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import importlib
import json
import os
import re
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from app.accelerate_launch import COMPACT_HEAP
from app.plan.command import count
from app.plan.estimate import Row, candidate, plan_row
from app.plan.hardware import GIB, Hardware
from benchmarks.parallelism import head, line
from benchmarks.shapes import model_folder
from tests.launching import ROOT, launch_well
from trainers.config.validation import build
from trainers.strategy.strategy import load_strategy

STRATEGIES = (
    "single", "ddp", "fsdp1", "fsdp1_grad_op", "fsdp2", "hsdp", "zero1", "zero2", "zero3", "tp", "cp", "sp", "pp",
    "pp_interleaved",
)  # fmt: skip
LENGTHS = {"24M": 128, "135M": 64, "360M": 64, "360M-16": 64}
"""Row length by model: activations and weights should both count."""
OPTIONS: dict[str, Any] = {
    "dataset_name": "embedded", "method": "full", "packing": True, "global_batch_size": 8,
    "per_device_train_batch_size": 2, "max_train_samples": 2000, "max_steps": 2, "logging_steps": 1, "save_steps": 0,
    "hang_timeout": 0,
}  # fmt: skip
_PERIOD = 0.005
_IMPORTS = ("transformers.models.llama.modeling_llama", "torch._dynamo")
"""Modules that a rank imports only after its process group exists."""
_NO_GAPS, _M_MMAP_THRESHOLD = "BENCHMARK_NO_GAPS", -3
SITE = """import os
if 'ACCELERATE_MIXED_PRECISION' in os.environ:
    from benchmarks.plan import start
    start({folder!r})
"""
"""A `sitecustomize.py` that samples in every rank."""


class _Heap(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    _fields_ = [
        (name, ctypes.c_size_t) for name in
        ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
    ]  # fmt: skip


def _mallinfo() -> Callable[[], Any]:
    function = ctypes.CDLL(None).mallinfo2
    function.restype, function.argtypes = _Heap, []
    return function


def anonymous_bytes() -> int:
    """`RssAnon` of this process: resident pages that no file backs."""
    found = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="ascii"))
    assert found
    return int(found[1]) * 1024


def tensor_bytes() -> int:
    """Bytes of all CPU tensors of this process, each storage once."""
    import torch

    gc.collect()
    storages: dict[int, int] = {}
    for tensor in gc.get_objects():
        # A DTensor has no storage of its own; its local tensor is listed too.
        local = issubclass(type(tensor), torch.Tensor) and not hasattr(tensor, "device_mesh")
        if local and tensor.device.type == "cpu":
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


@dataclass
class Sampler:
    """Samples this process from a thread, and keeps the peaks of each phase.

    Args:
        file: file that the peaks are written to, as `{phase: [anonymous bytes, allocated bytes]}`. "rest" has the bytes
            of tensors in place of the latter.
        phase: current phase.
    """

    file: Path
    phase: str = "load"
    peaks: dict[str, tuple[int, int]] = field(default_factory=dict)
    baseline: int = 0
    lock: Any = field(default_factory=threading.Lock)

    def run(self) -> None:
        """Samples until the process ends."""
        heap = _mallinfo()
        start = heap()
        allocated_before = start.uordblks + start.hblkhd
        while True:
            phase, resident, state = self.phase, anonymous_bytes() - self.baseline, heap()
            before = self.peaks.get(phase, (0, 0))
            allocated = state.uordblks + state.hblkhd - allocated_before
            self.peaks[phase] = (max(resident, before[0]), max(allocated, before[1]))
            if phase == "save" and self.peaks[phase] != before:
                self.write()
            time.sleep(_PERIOD)

    def write(self) -> None:
        """Writes the peaks."""
        with self.lock:
            self.file.with_suffix(".tmp").write_text(json.dumps(dict(self.peaks)))
            self.file.with_suffix(".tmp").replace(self.file)


def start(folder: str) -> None:
    """Samples this rank, by phase."""
    from trainers import loop
    from trainers.monitor.startup_timer import StartupTimer

    if os.environ.get(_NO_GAPS):
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 2**20)
    module: Any = loop
    train_step, ended = module.train_step, StartupTimer.ended
    sampler = Sampler(Path(folder) / f"rank-{os.environ.get('RANK', '0')}.json")

    def mark(self: StartupTimer, phase: str) -> None:
        ended(self, phase)
        if phase == "processes":
            zero = ("deepspeed",) if os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true" else ()
            for name in (*_IMPORTS, *zero):
                importlib.import_module(name)
            sampler.baseline = anonymous_bytes()
            threading.Thread(target=sampler.run, daemon=True).start()
        elif phase == "model":
            sampler.phase = "wrap"

    def step(*arguments: Any) -> Any:
        sampler.phase = "train"
        result = train_step(*arguments)
        sampler.phase = "save"
        sampler.peaks["rest"] = (anonymous_bytes() - sampler.baseline, tensor_bytes())
        sampler.write()
        return result

    StartupTimer.ended = mark  # type: ignore[method-assign]
    module.train_step = step


def plan(names: Sequence[str], options: dict[str, Any]) -> tuple[list[Row], float]:
    """The plans of strategies, from one count of the model, and the baseline that they contain."""
    config, able = build(options), []
    for name in names:
        strategy = load_strategy(name)
        hardware = Hardware("cpu", strategy.num_processes, 64 * GIB)
        able.append((*candidate(strategy, config, hardware), hardware))
    counted = count(config, able[0][2], [one[:2] for one in able])
    rows = [plan_row(strategy, fitted, counted, hardware) for strategy, fitted, hardware in able]
    return rows, counted["process_bytes"]


def measure(folder: Path, row: Row, options: dict[str, Any]) -> dict[str, list[int]]:
    """The fullest rank's peaks by phase: anonymous bytes above the baseline, allocated bytes (at rest, of tensors).

    Args:
        folder: a new folder for the run.
        row: the plan of a strategy.
        options: the run's options.
    """
    inject = folder / "inject"
    inject.mkdir(parents=True)
    (inject / "sitecustomize.py").write_text(SITE.format(folder=str(folder)))
    micro = {"per_device_train_batch_size": row.micro_batch}
    launch_well(folder / "run", row.sizes.world, {**options, **micro}, strategy=row.strategy, timeout=3000,
                PYTHONPATH=f"{inject}{os.pathsep}{ROOT}")  # fmt: skip
    ranks = [json.loads(file.read_text()) for file in folder.glob("rank-*.json")]
    shutil.rmtree(folder)
    return {phase: max(rank[phase] for rank in ranks if phase in rank) for phase in ranks[0]}


def cells(planned: Row, measured: dict[str, list[int]], process_bytes: float) -> list[str]:
    """A row of the table."""
    memory = planned.memory or {}
    expected, (used, allocated) = planned.total - process_bytes, measured["train"]
    others = (f"{measured.get(phase, [0])[0] / GIB:.2f}" for phase in ("load", "wrap", "save"))
    return [
        planned.strategy, str(planned.sizes.world),
        *(f"{(memory[use] - process_bytes * (use == 'overhead')) / GIB:.2f}" for use in memory),
        f"{expected / GIB:.2f}", f"{used / GIB:.2f}", f"{allocated / GIB:.2f}", f"{expected / used:.2f}", *others,
        f"{measured['rest'][1] / GIB:.2f}",
    ]  # fmt: skip


def main() -> None:
    """Prints a Markdown table, in GiB."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategies", nargs="+", default=STRATEGIES, metavar="NAME")
    parser.add_argument("--no_gaps", action="store_true", help="map each tensor of 1 MiB or more by itself")
    parser.add_argument("--model", choices=LENGTHS, default="24M")
    parser.add_argument("--teacher", choices=LENGTHS, help="distil from a model of this size")
    args = parser.parse_args()
    name, tunables = next(iter(COMPACT_HEAP.items()))
    if name not in os.environ:  # glibc reads them when a program starts, and the ranks are forked
        os.execve(  # noqa: S606 - this program again
            sys.executable, [sys.executable, "-m", "benchmarks.plan", *sys.argv[1:]], {**os.environ, name: tunables}
        )
    if args.no_gaps:
        os.environ[_NO_GAPS] = "1"  # for the ranks
    with tempfile.TemporaryDirectory() as folder:
        model = model_folder(args.model, Path(folder))
        options = {**OPTIONS, "model_name_or_path": str(model), "max_length": LENGTHS[args.model]}
        if args.teacher:
            teacher = model_folder(args.teacher, Path(folder) / "teacher")
            options |= {"objective": "distill", "teacher": str(teacher)}
        rows, process_bytes = plan(args.strategies, options)
        columns = ("planned", "measured", "allocated", "planned / measured", "load", "wrap", "save", "rest")
        print(head(["strategy", "processes", *next(row.memory for row in rows if row.memory), *columns]))
        for row in (row for row in rows if row.memory):
            print(line(cells(row, measure(Path(folder) / row.strategy, row, options), process_bytes)), flush=True)


if __name__ == "__main__":
    main()
