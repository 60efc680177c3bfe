"""From `tunesmith train` to the end of the first step, by phase: `python -m benchmarks.start [--json]`.

Compared, in turns, with the bare loop under `torchrun`, which trains the same first step of the embedded model. The
bare loop reads prepared tokens; Tunesmith tokenises if its data cache is cold. The difference is the median over the
turns of warm cache less bare loop. Also measures `tunesmith --help`.
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

from benchmarks.contenders import Bench, Case, RunFailed
from tests.launching import environment, flags
from trainers.monitor.startup_timer import read_start
from trainers.run.folder import RunFolder

COMMAND = ("-m", "app.cli")
GOAL = 1.5
"""Seconds that Tunesmith may take beyond the bare loop."""


def first_step(processes: int) -> Case:
    """One step of the embedded model, all weights."""
    return Case("embedded", False, processes, warm=1, timed=0)


def tunesmith(bench: Bench, case: Case, cold: bool) -> dict[str, float]:
    """Seconds of each phase of a foreground `tunesmith train`, in order, and their sum as `total`.

    Args:
        bench: runs the command.
        case: the training to start.
        cold: start without tokenised data.

    Raises:
        RunFailed: if it fails.
    """
    output, seen = bench.output(), dict[str, float]()
    options = {**bench.options(case), "num_processes": case.processes, "output_dir": output}
    if cold:
        options["cache_dir"] = bench.folder / f"{output.name}-cache"
    began = time.time()

    def note(line: str) -> None:
        name = line.partition(" ")[0]
        if name in ("checking", "run"):  # printed before and after the request is checked
            seen.setdefault(name, time.time())

    bench.wait([*COMMAND, "train", *flags(options)], case.processes, output, note)
    phases, ended = _start_in(RunFolder(output))
    shutil.rmtree(output)
    launched = ended - sum(phases.values())
    before = {"command": seen["checking"] - began, "check": seen["run"] - seen["checking"],
              "launcher": launched - seen["run"]}  # fmt: skip
    return {**before, **phases, "total": ended - began}


def _start_in(run: RunFolder) -> tuple[dict[str, float], float]:
    """Phases of rank 0's startup, and when it ended (seconds since the epoch)."""
    for line in run.log.read_text(encoding="utf-8").splitlines():
        stamp, _, message = line.partition(" [rank 0] ")
        if phases := read_start(message):
            return phases, datetime.fromisoformat(stamp).timestamp()
    raise RunFailed("the log has no line about the start")


def bare(bench: Bench, case: Case) -> dict[str, float]:
    """Seconds of the bare loop under `torchrun` until it has written the result of its only step.

    Raises:
        RunFailed: if it fails.
    """
    output = bench.output()
    argv = bench.other_argv(case, "bare", bench.batches(case), output, torchrun=True)
    began = time.time()
    bench.wait(argv, case.processes, output)
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
    """Measures all three starts in rotating turns, so that drift of the machine affects all equally.

    Returns:
        `processes`; `starts`: median seconds of each phase for `cold`, `warm` and `bare`; `difference`: warm less bare.
    """
    case = first_step(processes)
    bench.batches(case)  # also fills the warm cache
    starts = {
        "cold": lambda: tunesmith(bench, case, cold=True),
        "warm": lambda: tunesmith(bench, case, cold=False),
        "bare": lambda: bare(bench, case),
    }
    seconds: dict[str, list[dict[str, float]]] = {name: [] for name in starts}
    names = list(starts)
    for turn in range(repeats):
        for name in names[turn % 3 :] + names[: turn % 3]:
            seconds[name].append(starts[name]())
            progress = f"{processes} process(es), {name}: {seconds[name][-1]['total']:.2f} s"
            print(progress, file=sys.stderr, flush=True)
    medians = {
        name: {phase: statistics.median(run[phase] for run in runs) for phase in runs[0]}
        for name, runs in seconds.items()
    }
    pairs = zip(seconds["warm"], seconds["bare"], strict=True)
    difference = statistics.median(ours["total"] - theirs["total"] for ours, theirs in pairs)
    return {"processes": processes, "starts": medians, "difference": difference}


def table(results: list[dict[str, Any]]) -> str:
    """Markdown: a row per phase, a column per start."""
    columns = [(result["processes"], name, phases) for result in results for name, phases in result["starts"].items()]
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
    args = parser.parse_args()
    try:
        with tempfile.TemporaryDirectory() as folder:
            bench = Bench(Path(folder))
            results = [measure(bench, processes, args.repeats) for processes in args.processes]
    except RunFailed as error:
        raise SystemExit(str(error)) from None
    versions = {name: version(name) for name in ("torch", "accelerate", "transformers")}
    document = {"help": help_seconds(args.repeats), "starts": results, "versions": versions}
    if args.json:
        print(json.dumps(document, indent=2))
        return
    print(table(results), "\n")
    for result in results:
        against = f"{result['difference']:+.2f} s against the bare loop (goal: {GOAL:+.1f})"
        print(f"{result['processes']} process(es): {against}")
    print(f"tunesmith --help: {document['help']:.2f} s")


if __name__ == "__main__":
    main()
