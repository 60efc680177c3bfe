"""From `tunesmith train` to the end of the first step, by phase: `python -m benchmarks.start [--json]`.

Held against the bare loop under `torchrun`, which trains the same first step of the embedded model, in turns. The bare
loop finds its tokens made; Tunesmith tokenises when its data cache is cold. The difference is the median of those of
the turns, warm cache against bare. With it: how long `tunesmith --help` takes.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.contenders import Bench, Broke, Case
from tests.launching import environment, flags
from trainers.monitor.startup_timer import read_start
from trainers.run.folder import RunFolder

COMMAND = ("-m", "app.cli")
GOAL = 1.5
"""Seconds that Tunesmith may take longer than the bare loop."""


def first_step(processes: int) -> Case:
    """One step of the embedded model, all weights."""
    return Case("embedded", False, processes, warm=1, timed=0)


def tunesmith(bench: Bench, case: Case, cold: bool) -> dict[str, float]:
    """Seconds of each phase of a foreground `tunesmith train`, in order, and their sum as `total`.

    Args:
        cold: without tokenised data.

    Raises:
        Broke: when it fails.
    """
    output, seen = bench.output(), dict[str, float]()
    options = {**bench.options(case), "num_processes": case.processes, "output_dir": output}
    if cold:
        options["cache_dir"] = bench.folder / f"{output.name}-cache"
    began = time.time()

    def note(line: str) -> None:
        name = line.partition(" ")[0]
        if name in ("checking", "run"):  # said before and after the check of the request
            seen.setdefault(name, time.time())

    bench.wait([*COMMAND, "train", *flags(options)], case.processes, output, note)
    phases, ended = _start_in(RunFolder(output))
    shutil.rmtree(output)
    launched = ended - sum(phases.values())
    before = {"command": seen["checking"] - began, "check": seen["run"] - seen["checking"],
              "launcher": launched - seen["run"]}  # fmt: skip
    return {**before, **phases, "total": ended - began}


def _start_in(run: RunFolder) -> tuple[dict[str, float], float]:
    """Phases of rank 0's start, and when it was over (seconds since the epoch)."""
    for line in run.log.read_text(encoding="utf-8").splitlines():
        stamp, _, rest = line.partition(" [rank 0] ")
        if phases := read_start(rest):
            return phases, datetime.fromisoformat(stamp).timestamp()
    raise Broke("the log has no line about the start")


def bare(bench: Bench, case: Case) -> dict[str, float]:
    """Seconds of the bare loop under `torchrun` to the end of its only step, which it tells in a file.

    Raises:
        Broke: when it fails.
    """
    output = bench.output()
    words = bench.other_words(case, "bare", bench.batches(case), output, torchrun=True)
    began = time.time()
    bench.wait(words, case.processes, output)
    return {"total": output.stat().st_mtime - began}


def help_seconds(repeats: int) -> float:
    """Median seconds of `tunesmith --help`."""
    taken = []
    for _ in range(repeats):
        began = time.perf_counter()
        subprocess.run([sys.executable, *COMMAND, "--help"], env=environment(), capture_output=True, check=True)
        taken.append(time.perf_counter() - began)
    return statistics.median(taken)


def measure(bench: Bench, processes: int, repeats: int) -> dict[str, Any]:
    """All three starts in turns, the first one changing, so that a drift of the machine hits all alike.

    Returns:
        `processes`; `starts`: median seconds of each phase for `cold`, `warm` and `bare`; `difference`: warm less bare.
    """
    case = first_step(processes)
    bench.batches(case)  # which also fills the cache that is warm
    ways = {
        "cold": lambda: tunesmith(bench, case, cold=True),
        "warm": lambda: tunesmith(bench, case, cold=False),
        "bare": lambda: bare(bench, case),
    }
    found: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
    names = list(ways)
    for turn in range(repeats):
        for name in names[turn % 3 :] + names[: turn % 3]:
            found[name].append(ways[name]())
            said = f"{processes} process(es), {name}: {found[name][-1]['total']:.2f} s"
            print(said, file=sys.stderr, flush=True)
    middle = {
        name: {phase: statistics.median(one[phase] for one in runs) for phase in runs[0]}
        for name, runs in found.items()
    }
    pairs = zip(found["warm"], found["bare"], strict=True)
    difference = statistics.median(mine["total"] - theirs["total"] for mine, theirs in pairs)
    return {"processes": processes, "starts": middle, "difference": difference}


def table(results: list[dict[str, Any]]) -> str:
    """Markdown: a row per phase, a column per start."""
    columns = [(one["processes"], name, phases) for one in results for name, phases in one["starts"].items()]
    lines = [
        "| seconds | " + " | ".join(f"{name}, {processes} process(es)" for processes, name, _ in columns) + " |",
        "|---" * (len(columns) + 1) + "|",
    ]
    for phase in results[0]["starts"]["warm"]:
        cells = [f"{phases[phase]:.2f}" if phase in phases else "" for _, _, phases in columns]
        lines.append(f"| {phase} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Prints a Markdown table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    try:
        with tempfile.TemporaryDirectory() as folder:
            bench = Bench(Path(folder))
            results = [measure(bench, processes, asked.repeats) for processes in asked.processes]
    except Broke as error:
        raise SystemExit(str(error)) from None
    told = {"help": help_seconds(asked.repeats), "starts": results,
            "versions": {name: version(name) for name in ("torch", "accelerate", "transformers")}}  # fmt: skip
    if asked.json:
        print(json.dumps(told, indent=2))
        return
    print(table(results), "\n")
    for one in results:
        print(f"{one['processes']} process(es): {one['difference']:+.2f} s against the bare loop (goal: {GOAL:+.1f})")
    print(f"tunesmith --help: {told['help']:.2f} s")


if __name__ == "__main__":
    main()
