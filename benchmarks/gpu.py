"""Speed and memory on one GPU: `python -m benchmarks.gpu [--only WORD ...] [--budget SECONDS] [--json]`.

Real shapes (Qwen3 0.6B and 1.7B, Llama 3.1 8B) with random weights, so nothing is downloaded; under nine minutes. Each
run is a process of its own: if one runs out of memory, lacks a package or exceeds the budget, that is reported and the
others continue. Tokens/s count real input. MFU counts, per token, 6 FLOPs per trained parameter in a matrix product, 4
per frozen one, and attention within documents, without recomputation, relative to the device's dense bf16 peak, even
for fp8. Full fine-tuning of the 8B model is left out: weights, gradients and Adam's state take 120 GiB in fp32.

Without a GPU, or with `--tiny`, each model is replaced by two narrow layers, to test that the program runs.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from benchmarks.bare_loop import with_adapters
from benchmarks.contenders import Bench, Case, Measured, RunFailed
from benchmarks.rows import Batches
from benchmarks.shapes import TINY, empty_model, model_folder
from benchmarks.throughput import check_equal_work
from tests.launching import ROOT
from trainers.model.sizes import matmul_parameters
from trainers.monitor.mfu import attention_width, peak_flops, step_flops

BUDGET = 530.0
PACKAGES = ("torch", "transformers", "accelerate", "peft", "bitsandbytes", "torchao", "trl")
RESULTS = ROOT / "benchmarks" / "results"


@dataclass(frozen=True)
class Planned:
    """A case and the tools that run it: those that would do different work, or certainly not fit, are left out."""

    case: Case
    tools: tuple[str, ...]


def programme(tiny: bool) -> list[Planned]:
    """The cases to run, most important first."""
    packed = {"packing": True, "processes": 1, "micro": 1, "max_length": 4096, "precision": "bf16", "rate": 1e-5}
    llama = Case("llama-3.1-8b", warm=3, timed=9, global_batch=4, method="lora", **packed)
    qwen = Case("qwen3-1.7b", warm=3, timed=9, global_batch=8, **packed)
    small = Case("qwen3-0.6b", warm=3, timed=12, global_batch=8, **packed)
    # TRL separates packed documents only with flash attention.
    chat = replace(qwen, packing=False, max_length=2048, micro=8, global_batch=32, method="lora", timed=12)
    planned = [
        Planned(llama, ("tunesmith", "bare")),
        Planned(chat, ("tunesmith", "trl", "bare")),
        Planned(replace(llama, method="qlora", micro=2, max_length=2048, checkpointing=True), ("tunesmith", "bare")),
        Planned(replace(llama, compiled=True), ("tunesmith",)),
        Planned(qwen, ("tunesmith", "bare")),
        Planned(replace(qwen, compiled=True), ("tunesmith",)),
        Planned(replace(qwen, compiled=True, precision="fp8"), ("tunesmith",)),
        Planned(small, ("tunesmith", "bare")),
        Planned(replace(llama, checkpointing=True), ("tunesmith", "bare")),
    ]
    return (
        [_tiny(entry) for entry in planned if entry.case.precision == "fp8" or not entry.case.compiled]
        if tiny
        else planned
    )


def _tiny(planned: Planned) -> Planned:
    case = planned.case
    small = replace(case, model=TINY + case.model, warm=1, timed=2, micro=1, global_batch=2, max_length=128)
    return replace(planned, case=replace(small, compiled=False))


def measure(bench: Bench, planned: Planned) -> dict[str, Any]:
    """Runs the contenders of a case; if one fails, its cause is recorded.

    Returns:
        The case's fields, its `name`, and per tool either `failed` or the fields of `Measured`, `mfu` (None if the
        device's peak is unknown) and `ratio`, Tunesmith's tokens/s over the tool's.
    """
    case, runs, tools = planned.case, dict[str, Measured](), dict[str, dict[str, Any]]()
    for tool in planned.tools:
        try:
            runs[tool] = bench.run(case, tool)
            if "tunesmith" in runs:
                check_equal_work(case, {"tunesmith": runs["tunesmith"], tool: runs[tool]})
            tools[tool] = asdict(runs[tool]) | {"mfu": mfu(bench, case, runs[tool].tokens_per_second)}
        except RunFailed as error:
            tools[tool] = {"failed": error.cause}
            print(error, file=sys.stderr, flush=True)
        print(f"{case.name}: {tool} {_cells(tools[tool])}", file=sys.stderr, flush=True)
    own = tools.get("tunesmith", {}).get("tokens_per_second")
    for tool, run in tools.items():
        if own and tool != "tunesmith" and "tokens_per_second" in run:
            run["ratio"] = own / run["tokens_per_second"]
    return {**asdict(case), "name": case.name, "tools": tools}


def mfu(bench: Bench, case: Case, tokens_per_second: float) -> float | None:
    """Model FLOPs utilisation, relative to the GPU's bf16 peak; None if that is unknown."""
    peak = peak_flops(torch.device("cuda"), torch.bfloat16) if torch.cuda.is_available() else None
    return flops_per_token(bench, case) * tokens_per_second / peak if peak else None


def flops_per_token(bench: Bench, case: Case) -> float:
    """Model FLOPs per token over the timed steps."""
    model = empty_model(model_folder(case.model, bench.folder))
    with torch.device("meta"):
        parameters = matmul_parameters(model if case.method == "full" else with_adapters(model))
    batches = Batches.load(bench.batches(case))
    tokens, squares = (count(case.warm, case.steps) for count in (batches.tokens, batches.squared_lengths))
    return step_flops(tokens, (*parameters, 0), attention_width(model.config), squares) / tokens


def _cells(run: dict[str, Any]) -> str:
    """Tokens/s, MFU, peak memory, ratio and losses as cells of the table."""
    if "failed" in run:
        return f"not measured: {run['failed'].replace('|', '/')} | | | |"
    share = f"{run['mfu']:.1%}" if run["mfu"] is not None else "unknown"
    ratio = f"{run['ratio']:.2f}x" if "ratio" in run else ""
    losses = f"{run['first_loss']:.4f} to {run['last_loss']:.4f}"
    return f"{run['tokens_per_second']:,.0f} | {share} | {run['peak_mib'] / 1024:.2f} | {ratio} | {losses}"


def table(results: list[dict[str, Any]]) -> str:
    """Markdown."""
    size = "sequence x micro-batch"
    heads = ("case", size, "tool", "tokens/s", "MFU", "peak GiB", "Tunesmith is", "loss, first to last")
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for result in results:
        size = f"{result['max_length']:,} x {result['micro']}"
        lines += [f"| {result['name']} | {size} | {tool} | {_cells(run)} |" for tool, run in result["tools"].items()]
    return "\n".join(lines)


def goals(results: list[dict[str, Any]]) -> list[str]:
    """The goals for an H100, and the results."""
    lora = _best(results, "tokens_per_second", method="lora", packing=True, model="llama-3.1-8b")
    share = _best(results, "mfu", method="lora", packing=True, model="llama-3.1-8b")
    memory = _best(results, "peak_mib", method="qlora", model="llama-3.1-8b")
    over_trl = [result["tools"]["trl"]["ratio"] for result in results if "ratio" in result["tools"].get("trl", {})]
    return [
        _goal("8B LoRA, packed 4,096, tokens/s", lora, 14000, "at least", ",.0f"),
        _goal("8B LoRA, packed 4,096, MFU", share, 0.45, "at least", ".1%"),
        _goal("8B QLoRA, 2,048 x 2, peak GiB", memory and memory / 1024, 7.4, "at most", ".2f"),
        _goal("unpacked chat data, over TRL", over_trl[0] if over_trl else None, 1.5, "at least", ".2f"),
    ]


def _best(results: list[dict[str, Any]], key: str, **wanted: Any) -> float | None:
    """Tunesmith's largest value over the cases that match."""
    matching = [result for result in results if all(result[name] == value for name, value in wanted.items())]
    values = [result["tools"].get("tunesmith", {}).get(key) for result in matching]
    return max((value for value in values if value is not None), default=None)


def _goal(label: str, got: float | None, wanted: float, side: str, form: str) -> str:
    if got is None:
        return f"- {label}: {side} {wanted:{form}}; not measured"
    reached = got >= wanted if side == "at least" else got <= wanted
    return f"- {label}: {side} {wanted:{form}}; {'reached' if reached else 'missed'} with {got:{form}}"


def machine() -> dict[str, str]:
    """Device and versions."""
    versions = {"device": torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU ({platform.machine()})"}
    versions |= {"cuda": str(torch.version.cuda), "python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = "not installed"
    return versions


def report(results: list[dict[str, Any]], about: dict[str, str], command: str, tiny: bool) -> str:
    """The result file: the results, the machine and the command."""
    today = datetime.now(UTC).date().isoformat()
    versions = ", ".join(f"{name} {value}" for name, value in about.items() if name != "device")
    heading = f"# {about['device']}, {today}\n\n`{command}`\n\n{versions}\n\n{table(results)}\n"
    return heading + ("" if tiny else "\n" + "\n".join(goals(results)) + "\n")


def main(argv: Sequence[str]) -> None:
    """Prints the report and, for real shapes, writes it to a file; or prints JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="WORD", help="only cases whose names contain one of these"
    )
    parser.add_argument("--budget", type=float, default=BUDGET, help="seconds after which runs are stopped")
    parser.add_argument(
        "--tiny", action="store_true", help="two narrow layers for each model; the default without a GPU"
    )
    parser.add_argument("--out", type=Path, help="folder of the result file (default: benchmarks/results)")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    tiny = args.tiny or not torch.cuda.is_available()
    chosen = [entry for entry in programme(tiny) if not args.only or any(word in entry.case.name for word in args.only)]
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder), time.monotonic() + args.budget)
        results = [measure(bench, entry) for entry in chosen]
    about = machine()
    if args.json:
        print(json.dumps({"machine": about, "cases": results}, indent=2))
    text = report(results, about, " ".join(["python -m benchmarks.gpu", *argv]), tiny)
    if not args.json:
        print(text)
    results_folder = args.out or (None if tiny else RESULTS)
    if results_folder is not None:
        results_folder.mkdir(parents=True, exist_ok=True)
        device = re.sub(r"[^a-z0-9]+", "-", about["device"].lower()).strip("-")
        (results_folder / f"{datetime.now(UTC).date().isoformat()}-{device}.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
