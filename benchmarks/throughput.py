"""Tokens per second of Tunesmith, a bare PyTorch loop and TRL: `python -m benchmarks.throughput [--quick] [--json]`.

All train the same weights on the same rows in the same order, in turns within one run of this program. A ratio is the
median of those of the turns; above 1 Tunesmith is faster. First and last loss show that equal work was done.
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

from benchmarks.contenders import Bench, Broke, Case, Measured

TOLERANCE = {"no": 2e-5, "bf16": 1e-2, "fp8": 5e-2}
"""Largest relative difference of the losses of equal work, by precision."""

UNCUT = 2048
"""Tokens of a row that cuts one of `Bench`'s 4,000 documents; 512 cut 369 of them."""


def cases(quick: bool) -> list[Case]:
    """The whole programme, or what fits in three minutes."""
    if quick:
        return [Case("embedded", False, 1, warm=5, timed=20)]
    return [
        Case(model, packing, processes, *((10, 60) if model == "embedded" else (1, 4)))
        for model in ("embedded", "24M")
        for processes in (1, 2)
        for packing in (False, True)
    ]


def tools(case: Case) -> list[str]:
    """TRL keeps packed documents apart with flash attention alone, which wants a GPU: packed it would do other work."""
    return ["tunesmith", "bare"] if case.packing else ["tunesmith", "bare", "trl"]


def measure(bench: Bench, case: Case, repeats: int) -> dict[str, Any]:
    """All contenders in turns, the first one changing, so that a drift of the machine hits all alike."""
    names = tools(case)
    found: dict[str, list[Measured]] = {name: [] for name in names}
    for turn in range(repeats):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            found[name].append(bench.run(case, name))
            print(f"{case.name}: {name} {found[name][-1].tokens_per_second:,.0f} tokens/s", file=sys.stderr, flush=True)
    own = found["tunesmith"]
    check_equal_work(case, {name: runs[0] for name, runs in found.items()})
    ratios = {
        name: statistics.median(mine.tokens_per_second / theirs.tokens_per_second
                                for mine, theirs in zip(own, runs, strict=True))
        for name, runs in found.items() if name != "tunesmith"
    }  # fmt: skip
    middle = {
        name: {key: statistics.median(getattr(run, key) for run in runs) for key in asdict(runs[0])}
        for name, runs in found.items()
    }
    return {**asdict(case), "ratios": ratios, "tools": middle}


def check_equal_work(case: Case, runs: dict[str, Measured]) -> None:
    """Stops where a contender's loss is another one: its speed would say nothing."""
    own = runs["tunesmith"]
    for name, run in runs.items():
        for mine, theirs in ((own.first_loss, run.first_loss), (own.last_loss, run.last_loss)):
            if abs(mine - theirs) > TOLERANCE[case.precision] * abs(mine):
                raise Broke(f"{case.name}: {name} has loss {theirs:.6f} where tunesmith has {mine:.6f}")


def packing_gain(bench: Bench, case: Case, repeats: int) -> float:
    """Tunesmith's tokens/s on packed rows over those in random order, padded to the longest of their micro-batch.

    Rows are long enough to leave the spread of lengths as it is, and as many slots stand in a micro-batch as in `case`.
    """
    apart = replace(case, grouped=False, max_length=UNCUT)
    together = replace(apart, packing=True, micro=case.micro * case.max_length // UNCUT, warm=2,
                       timed=max(4, case.timed // 5))  # fmt: skip
    gains = []
    for _ in range(repeats):
        plain, packed = (bench.run(one, "tunesmith").tokens_per_second for one in (apart, together))
        print(f"{case.model}: packed {packed:,.0f}, in random order {plain:,.0f} tokens/s", file=sys.stderr, flush=True)
        gains.append(packed / plain)
    return statistics.median(gains)


def table(results: list[dict[str, Any]]) -> str:
    """Markdown."""
    lines = ["| model | rows | processes | tool | tokens/s | Tunesmith is | peak MiB | loss, first to last |",
             "|---|---|---|---|---|---|---|---|"]  # fmt: skip
    for one in results:
        rows = "packed" if one["packing"] else "unpacked"
        for name, run in one["tools"].items():
            ratio = f"{one['ratios'][name]:.2f}x" if name in one["ratios"] else ""
            lines.append(
                f"| {one['model']} | {rows} | {one['processes']} | {name} | {run['tokens_per_second']:,.0f} "
                f"| {ratio} | {run['peak_mib']:,.0f} | {run['first_loss']:.5f} to {run['last_loss']:.5f} |"
            )
    return "\n".join(lines)


def main() -> None:
    """Prints a Markdown table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="under three minutes on two cores")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--repeats", type=int)
    asked = parser.parse_args()
    try:
        with tempfile.TemporaryDirectory() as folder:
            bench = Bench(Path(folder))
            repeats, programme = asked.repeats or (2 if asked.quick else 5), cases(asked.quick)
            results = [measure(bench, case, repeats) for case in programme]
            gains = {
                f"{case.model}, {case.processes} process(es)": packing_gain(bench, case, repeats)
                for case in programme
                if not case.packing
            }
    except Broke as error:
        raise SystemExit(str(error)) from None
    kinds = {name for one in results for name in one["ratios"]}
    ratios = {name: statistics.median(one["ratios"][name] for one in results if name in one["ratios"])
              for name in sorted(kinds)}  # fmt: skip
    ratios["packed"] = statistics.median(gains.values())
    machine = {name: version(name) for name in ("torch", "transformers", "trl")} | {"machine": platform.machine()}
    if asked.json:
        print(json.dumps({"ratios": ratios, "packed": gains, "cases": results, "versions": machine}, indent=2))
    else:
        print(table(results), "\n")
        print("\n".join(f"packed against rows in random order, {name}: {gain:.2f}x" for name, gain in gains.items()))
        print("medians:", *(f"{name} {value:.2f}" for name, value in ratios.items()))


if __name__ == "__main__":
    main()
