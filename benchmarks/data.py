"""Speed of tokenising, packing and batching chat rows: `python -m benchmarks.data [--rows 1000000] [--workers 1 2]`.

Each measurement is a process of its own, first with an empty cache, then with a full one. Memory is the peak of private
memory over all processes together; pages of mapped files, which the system can reclaim, do not count.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import psutil

from benchmarks.rows import write_chat
from tests.launching import ROOT, environment
from trainers.config.options import TrainConfig

BATCHES = 200


def measured_here(data: Path, cache: Path, workers: int) -> dict[str, float]:
    """Seconds of each phase, in this process; tokens are computed or read from the cache."""
    from trainers.data.batches import TrainPlan
    from trainers.data.packing import pack
    from trainers.data.prepare import prepare
    from trainers.data.rows import Rows

    config = TrainConfig(
        model_name_or_path="embedded", dataset_name=str(data), max_length=2048, global_batch_size=16,
        dataset_num_proc=workers, cache_dir=str(cache),
    )  # fmt: skip
    began = time.perf_counter()
    documents = prepare(config, "train")
    prepared = time.perf_counter()
    efficiency = pack(documents.lengths, config.max_length).efficiency
    packing = time.perf_counter() - prepared
    import torch  # noqa: F401 - already imported in a training run

    ready = time.perf_counter()
    rows = Rows(documents, config.max_length, True)
    plan = TrainPlan(rows, config, 1)
    plan.batch(0, 0)
    first = time.perf_counter() - ready
    steps = range(1, min(BATCHES, plan.steps_per_epoch))
    ready = time.perf_counter()
    for step in steps:
        plan.batch(step, 0)
    each = (time.perf_counter() - ready) / max(len(steps), 1)
    return {
        "rows": documents.report.rows, "tokens": int(documents.lengths.sum()), "prepare_s": prepared - began,
        "pack_s": packing, "efficiency": efficiency, "first_batch_s": first, "batch_ms": 1000 * each,
    }  # fmt: skip


def own_memory(process: psutil.Process, alone: bool = False) -> float:
    """Anonymous resident memory of a process and, unless `alone`, its descendants in MiB."""
    total = 0
    for member in [process, *([] if alone else process.children(recursive=True))]:
        with contextlib.suppress(psutil.Error, OSError, IndexError):
            status = Path(f"/proc/{member.pid}/status").read_text()
            total += int(status.partition("RssAnon:")[2].split()[0])
    return total / 1024


def measured(data: Path, cache: Path, workers: int) -> dict[str, float]:
    """Runs `measured_here` in a new process, and adds its peak memory."""
    argv = [sys.executable, "-m", "benchmarks.data", "--here", str(data), str(cache), "--workers", str(workers)]
    child = subprocess.Popen(argv, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, text=True)
    peak, ended = 0.0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not ended.wait(0.1):
            with contextlib.suppress(psutil.Error):
                peak = max(peak, own_memory(psutil.Process(child.pid)))

    watcher = threading.Thread(target=watch)
    watcher.start()
    output = child.communicate()[0]
    ended.set()
    watcher.join()
    if child.returncode != 0:
        raise SystemExit(f"the measurement ended with {child.returncode}")
    return {**json.loads(output.splitlines()[-1]), "peak_mib": peak}


def row(cells: dict[str, float], workers: int, state: str) -> str:
    """One line of the table."""
    values = [
        f"{cells['rows']:,}", str(workers), state, f"{cells['prepare_s']:.1f}",
        f"{cells['rows'] / cells['prepare_s']:,.0f}", f"{cells['pack_s']:.2f}", f"{cells['efficiency']:.2%}",
        f"{cells['first_batch_s']:.2f}", f"{cells['batch_ms']:.2f}", f"{cells['peak_mib']:,.0f}",
    ]  # fmt: skip
    return f"| {' | '.join(values)} |"


def arguments() -> Any:
    """The command line; `--here` is internal."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[10_000, 1_000_000])
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--here", type=Path, nargs=2, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    """Prints a Markdown table."""
    args = arguments()
    if args.here:
        print(json.dumps(measured_here(*args.here, args.workers[0])))
        return
    print("| rows | workers | cache | tokenised in s | rows/s | packed in s | efficiency | first batch s | batch ms "
          "| peak MiB |\n|---|---|---|---|---|---|---|---|---|---|", flush=True)  # fmt: skip
    for count in args.rows:
        with tempfile.TemporaryDirectory() as folder:
            data = write_chat(Path(folder) / "train.jsonl", count, seed=1)
            for workers in args.workers:
                cache = Path(folder) / f"cache-{workers}"
                for state in ("empty", "full"):
                    print(row(measured(data, cache, workers), workers, state), flush=True)


if __name__ == "__main__":
    main()
