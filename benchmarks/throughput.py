"""Tokens per second of Tunesmith, a bare PyTorch loop and TRL: `python -m benchmarks.throughput [--quick] [--json]`.

All train the same weights on the same rows in the same order, in turns within one run of this program. A ratio is the
median over the turns, with an interval that contains the true one with 95 % confidence; only if all of it is above 1,
Tunesmith is said to be faster. First and last loss show that the work is equal.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import tempfile
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.contenders import Bench, Case, Measured, RunFailed
from benchmarks.intervals import LEAST_TURNS, Interval

TOLERANCE = {"no": 2e-5, "bf16": 1e-2, "fp8": 5e-2}
"""Largest relative difference of losses for equal work, by precision."""

UNCUT = 1024
"""Row length in tokens, the embedded model's positions, that truncates 40 of `Bench`'s 4,000 documents; 512: 349."""


def cases(quick: bool) -> list[Case]:
    """All cases, or one that takes some five minutes."""
    if quick:
        return [Case("embedded", False, 1, warm=5, timed=20)]
    return [
        Case(model, packing, processes, *((10, 60) if model == "embedded" else (1, 4)))
        for model in ("embedded", "24M")
        for processes in (1, 2)
        for packing in (False, True)
    ]


def tools(case: Case) -> list[str]:
    """The tools to compare; without TRL for packed rows, as it needs flash attention (a GPU) to separate documents."""
    return ["tunesmith", "bare"] if case.packing else ["tunesmith", "bare", "trl"]


def measure(bench: Bench, case: Case, turns: int, names: list[str]) -> dict[str, Any]:
    """Runs all contenders in rotating turns, so that drift of the machine affects all equally.

    Args:
        bench: runs them.
        case: what they train.
        turns: runs of each.
        names: the contenders, `tunesmith` among them.
    """
    runs_by_tool: dict[str, list[Measured]] = {name: [] for name in names}
    for turn in range(turns):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            runs_by_tool[name].append(bench.run(case, name))
            print(
                f"{case.name}: {name} {runs_by_tool[name][-1].tokens_per_second:,.0f} tokens/s",
                file=sys.stderr,
                flush=True,
            )
    own = runs_by_tool["tunesmith"]
    check_equal_work(case, {name: runs[0] for name, runs in runs_by_tool.items()})
    ratios = {
        name: Interval.of([ours.tokens_per_second / theirs.tokens_per_second
                           for ours, theirs in zip(own, runs, strict=True)])
        for name, runs in runs_by_tool.items() if name != "tunesmith"
    }  # fmt: skip
    medians = {
        name: {key: statistics.median(getattr(run, key) for run in runs) for key in asdict(runs[0])}
        for name, runs in runs_by_tool.items()
    }
    return {**asdict(case), "ratios": ratios, "tools": medians}


def check_equal_work(case: Case, runs: dict[str, Measured]) -> None:
    """Raises `RunFailed` if the loss of a contender differs: its speed would not be comparable."""
    own = runs["tunesmith"]
    for name, run in runs.items():
        for ours, theirs in ((own.first_loss, run.first_loss), (own.last_loss, run.last_loss)):
            if abs(ours - theirs) > TOLERANCE[case.precision] * abs(ours):
                raise RunFailed(f"{case.name}: {name} has loss {theirs:.6f} where tunesmith has {ours:.6f}")


def packing_gain(bench: Bench, case: Case, turns: int) -> Interval:
    """Tunesmith's tokens/s on packed rows, relative to rows in random order padded to the longest of their micro-batch.

    Rows are long enough to preserve the distribution of lengths, and a micro-batch has as many slots as in `case`.
    """
    apart = replace(case, grouped=False, max_length=UNCUT)
    together = replace(apart, packing=True, micro=case.micro * case.max_length // UNCUT, warm=2,
                       timed=max(4, case.timed // 5))  # fmt: skip
    gains = []
    for _ in range(turns):
        plain, packed = (bench.run(variant, "tunesmith").tokens_per_second for variant in (apart, together))
        print(f"{case.model}: packed {packed:,.0f}, in random order {plain:,.0f} tokens/s", file=sys.stderr, flush=True)
        gains.append(packed / plain)
    return Interval.of(gains)


def table(results: list[dict[str, Any]]) -> str:
    """Markdown."""
    lines = ["| model | rows | processes | tool | tokens/s | Tunesmith is | peak MiB | loss, first to last |",
             "|---|---|---|---|---|---|---|---|"]  # fmt: skip
    for result in results:
        rows = "packed" if result["packing"] else "unpacked"
        for name, run in result["tools"].items():
            ratio = f"{result['ratios'][name]}: {result['ratios'][name].verdict()}" if name in result["ratios"] else ""
            lines.append(
                f"| {result['model']} | {rows} | {result['processes']} | {name} | {run['tokens_per_second']:,.0f} "
                f"| {ratio} | {run['peak_mib']:,.0f} | {run['first_loss']:.5f} to {run['last_loss']:.5f} |"
            )
    return "\n".join(lines)


def main() -> None:
    """Prints a Markdown table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one case; some five minutes on two cores")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--turns", type=int, default=LEAST_TURNS)
    args = parser.parse_args()
    try:
        with tempfile.TemporaryDirectory() as folder:
            bench = Bench(Path(folder))
            programme = cases(args.quick)
            results = [measure(bench, case, args.turns, tools(case)) for case in programme]
            gains = {
                f"{case.model}, {case.processes} process(es)": packing_gain(bench, case, args.turns)
                for case in programme
                if not case.packing
            }
    except RunFailed as error:
        raise SystemExit(str(error)) from None
    machine = {name: version(name) for name in ("torch", "transformers", "trl")} | {"machine": platform.machine()}
    if args.json:
        print(json.dumps({"cases": results, "packed": gains, "versions": machine}, indent=2, default=asdict))
    else:
        print(table(results), "\n")
        print("\n".join(f"packed against rows in random order, {name}: {gain}" for name, gain in gains.items()))


if __name__ == "__main__":
    main()
