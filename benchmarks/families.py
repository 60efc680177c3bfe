"""Does a run do what its `--check` says? Every causal family of transformers: `python -m benchmarks.families`.

    python -m benchmarks.families [FAMILY ...] [--json FILE] [--share 1/3]

For a small random model of each family, full and LoRA, packed and unpacked, runs the check, then a real first step on
the CPU. Each family has a process of its own and a time limit. Exits with 1 if any case disagrees or was not judged.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import sys
import tempfile
import time
from collections import Counter
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tests.families import FAMILIES

SECONDS = 600
"""Time limit of one family, in seconds."""


def judge(family: str, seconds: float = SECONDS) -> dict[str, Any]:
    """Runs `verdicts` in a process of its own; if it dies or takes too long, there are no verdicts.

    Args:
        family: name of the family.
        seconds: the time limit.
    """
    result = in_own_process("tests.families", "verdicts", (family,), seconds)
    return result if "family" in result else {"family": family, "unknown": result["unknown"], "verdicts": []}


def in_own_process(module: str, function: str, arguments: tuple[Any, ...], seconds: float) -> dict[str, Any]:
    """What a function returns in a process of its own; `unknown`, the reason, if that dies or takes too long.

    Args:
        module: where the function is.
        function: its name; called with the arguments and a temporary folder.
        arguments: which can be pickled.
        seconds: the time limit.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.families", "deepspeed", "peft", "torch._dynamo"])  # slow imports
    with tempfile.TemporaryDirectory(prefix="families-") as name:
        folder = Path(name)
        process = context.Process(target=_write_result, args=(module, function, arguments, folder))
        process.start()
        process.join(seconds)
        if process.is_alive():
            process.kill()
            process.join()
            return {"unknown": f"not done after {seconds:g} s"}
        result_file = folder / "result.json"
        if not result_file.is_file():
            return {"unknown": f"its process ended with {process.exitcode}"}
        return dict(json.loads(result_file.read_text()))


def _write_result(module: str, function: str, arguments: tuple[Any, ...], folder: Path) -> None:
    import torch

    torch.set_num_threads(1)  # the matrices are small
    with (folder / "log.txt").open("w") as log:
        sys.stdout = sys.stderr = log
        result = getattr(importlib.import_module(module), function)(*arguments, folder)
    (folder / "result.json").write_text(json.dumps(result))


def table(results: list[dict[str, Any]]) -> str:
    """A line per family, method and packing; then the families that were not judged."""
    lines = []
    for verdict in (verdict for result in results for verdict in result["verdicts"]):
        rows = "packed" if verdict["packing"] else "unpacked"
        name = f"{verdict['family']:28} {verdict['method']:4} {rows:8}"
        end = f"AGREE  {verdict['check']}" if verdict["fault"] is None else f"WRONG  {verdict['fault']}"
        lines.append(f"{name} {end}")
        if verdict["fault"] is not None:
            lines += [f"    check: {verdict['check']}", f"    run:   {verdict['run']}"]
            lines += [f"    after {advice}: {outcome}" for advice, outcome in verdict["advice"]]
    lines += [f"{result['family']:28} NOT JUDGED  {result['unknown']}" for result in results if result["unknown"]]
    return "\n".join(lines)


def summary(results: list[dict[str, Any]]) -> str:
    """One line of totals."""
    every = [verdict for result in results for verdict in result["verdicts"]]
    faults = Counter(verdict["fault"] for verdict in every if verdict["fault"] is not None)
    disagreements = ", ".join(f"{fault} {count}" for fault, count in faults.most_common()) or "none"
    trained = sum(verdict["run"] == "ok" for verdict in every)
    unknown = sum(result["unknown"] is not None for result in results)
    return (
        f"{len(results)} families, {unknown} not judged; {len(every)} cases, {trained} train, "
        f"{sum(verdict['fault'] is None for verdict in every)} agree; disagreements: {disagreements}"
    )


def main() -> int:
    """Judges the families and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", metavar="FAMILY")
    parser.add_argument("--json", type=Path, metavar="FILE", help="the results and versions as JSON")
    parser.add_argument("--share", default="1/1", help="1/3: the first third of them")
    args = parser.parse_args()
    part, parts = map(int, args.share.split("/"))
    began, results = time.monotonic(), []
    for family in (args.families or FAMILIES)[part - 1 :: parts]:
        results.append(judge(family))
        print(table(results[-1:]), flush=True)
    if args.json:
        versions = {name: version(name) for name in ("torch", "transformers", "peft")}
        args.json.write_text(json.dumps({"at": f"{datetime.now():%F %T}", **versions, "results": results}, indent=1))
    print(f"{summary(results)}; {time.monotonic() - began:.0f} s")
    judged = all(result["unknown"] is None for result in results)
    return 0 if judged and all(v["fault"] is None for result in results for v in result["verdicts"]) else 1


if __name__ == "__main__":
    sys.exit(main())
