"""One epoch of a stream, and what mixes and streams cost per step: `python -m benchmarks.stream [--megabytes 1000]`.

The first table streams generated rows, a tenth of which is text, through a limit of disk space, without training.
Memory is without pages of mapped files: the peaks of the reading process in either half of the epoch, and of all
processes, of which those that tokenise come and go; disk is what the cache folder takes at most. The second
one trains the embedded model on chat rows that are read in full, mixed and streamed, in turn.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import yaml

from benchmarks.data import own_memory
from benchmarks.rows import write_chat
from tests.launching import ROOT, environment, launch_well
from trainers.config.options import TrainConfig

MIB = 1 << 20
TURNS = 3
STEPS = 150


class Alone:
    """The ranks of a run with a single process."""

    is_main = False

    def gather(self, value: Any) -> list[Any]:
        """The value of this rank."""
        return [value]


def write_text(path: Path, megabytes: int) -> Path:
    """Writes rows of 400 words each, with nine times as much in a field that is not used."""
    rng = random.Random(0)
    vocabulary = ["".join(rng.choices("abcdefghijklmnop", k=rng.randint(2, 8))) for _ in range(2000)]
    with path.open("w", encoding="utf-8") as file:
        while file.tell() < megabytes * 1_000_000:
            for _ in range(100):
                text = " ".join(rng.choices(vocabulary, k=400))
                file.write(json.dumps({"text": text, "note": "x" * (9 * len(text))}) + "\n")
    return path


def streamed_here(data: Path, cache: Path, limit: int, window: int) -> dict[str, float]:
    """Reads one epoch in this process."""
    from trainers.data.prepare import prepare
    from trainers.data.stream_plan import StreamPlan
    from trainers.tools.preflight import plan_training

    config = TrainConfig(
        model_name_or_path="embedded", dataset_name=str(data), cache_dir=str(cache), max_length=1024,
        global_batch_size=16, max_steps=10**9, dataset_streaming=True, streaming_window=window, streaming_cache=limit,
    )  # fmt: skip
    began, disk, peak, done, me = time.perf_counter(), 0.0, 0.0, threading.Event(), psutil.Process()

    def watch() -> None:
        nonlocal disk, peak
        while not done.wait(0.2):
            disk, peak = max(disk, _size_of(cache) / MIB), max(peak, own_memory(me))

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    plan = plan_training(config, prepare(config, "train"), 1)
    assert isinstance(plan, StreamPlan)
    stream = plan.streamed_rows[0].stream
    first, memory, tokens, step = time.perf_counter() - began, ([0.0], [0.0]), 0, 0
    while (epochs := plan.epochs(step)) < 1:
        plan.agree(step, Alone())
        tokens += plan.batch(step, 0).tokens
        step += 1
        if step % 50 == 0:
            memory[epochs >= 0.5].append(own_memory(me, alone=True))
    done.set()
    watcher.join()
    seconds = time.perf_counter() - began
    return {
        "rows": stream.rows, "tokens": tokens, "windows": len(stream.windows(0)), "first_s": first,
        "seconds": seconds, "disk_mib": disk, "memory_before": max(memory[0]), "memory_after": max(memory[1]),
        "memory_peak": peak,
    }  # fmt: skip


def _size_of(folder: Path) -> int:
    total = 0
    for root, _, names in os.walk(folder):  # which passes over folders that are removed meanwhile
        for name in names:
            with suppress(OSError):
                total += os.path.getsize(os.path.join(root, name))
    return total


def epoch_table(megabytes: int, limit: int, window: int) -> None:
    """Streams generated rows in a new process, and prints the row of the table."""
    with tempfile.TemporaryDirectory() as folder:
        data = write_text(Path(folder) / "rows.jsonl", megabytes)
        options = ["--limit", str(limit), "--window", str(window), "--here", str(data), f"{folder}/cache"]
        argv = [sys.executable, "-m", "benchmarks.stream", *options]
        done = subprocess.run(argv, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, text=True, check=True)
    cells = json.loads(done.stdout.splitlines()[-1])
    print(
        "| MB | rows | windows | limit MiB | disk MiB | memory MiB, 1st half | 2nd half | of all | first s | MB/s |"
        "\n|---|---|---|---|---|---|---|---|---|---|\n"
        f"| {megabytes:,} | {cells['rows']:,} | {cells['windows']} | {limit} | {cells['disk_mib']:,.0f} "
        f"| {cells['memory_before']:,.0f} | {cells['memory_after']:,.0f} | {cells['memory_peak']:,.0f} "
        f"| {cells['first_s']:.1f} | {megabytes / cells['seconds']:.2f} |\n",
        flush=True,
    )


def wait_table(turns: int) -> None:
    """Trains in turn on rows that are read in full, mixed, and streamed; prints the share of time spent waiting."""
    waits: dict[str, list[float]] = {"read in full": [], "mix": [], "stream": []}
    rates: dict[str, list[float]] = {name: [] for name in waits}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data = str(write_chat(folder / "chat.jsonl", 40_000, seed=1))
        sources = [{"dataset_name": data, "name": "a", "weight": 3}, {"dataset_name": data, "name": "b"}]
        (folder / "mix.yaml").write_text(yaml.safe_dump({"sources": sources}))
        common = {
            "model_name_or_path": "embedded", "eval_dataset_name": "none", "max_length": 256, "global_batch_size": 8,
            "per_device_train_batch_size": 4, "max_steps": STEPS, "learning_rate": 1e-4, "logging_steps": 1,
            "cache_dir": f"{folder}/cache",
        }  # fmt: skip
        kinds: dict[str, dict[str, Any]] = {
            "read in full": {"dataset_name": data},
            "mix": {"mix": str(folder / "mix.yaml"), "dataset_name": "none"},
            "stream": {"dataset_name": data, "dataset_streaming": True, "streaming_window": 500},
        }
        for turn in range(turns):
            for kind, own in kinds.items():
                finished = launch_well(folder / f"{kind}-{turn}", 1, {**common, **own}, strategy="single", timeout=600)
                rows = finished.rows("loss")[1:]
                waits[kind].append(100 * statistics.fmean(row["data_wait"] for row in rows))
                rates[kind].append(statistics.median(row["tokens_per_second"] for row in rows))
    print("| data | waiting for data, % of the time | tokens/s |\n|---|---|---|")
    for kind, values in waits.items():
        spread = f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"
        print(f"| {kind} | {spread} | {statistics.median(rates[kind]):,.0f} |", flush=True)


def main() -> None:
    """Prints both tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=1000)
    parser.add_argument("--limit", type=int, default=100, help="MiB")
    parser.add_argument("--window", type=int, default=5000, help="rows")
    parser.add_argument("--turns", type=int, default=TURNS, help="0 for the first table alone")
    parser.add_argument("--here", type=Path, nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.here:
        print(json.dumps(streamed_here(*args.here, args.limit, args.window)))
        return
    epoch_table(args.megabytes, args.limit, args.window)
    if args.turns:
        wait_table(args.turns)


if __name__ == "__main__":
    main()
