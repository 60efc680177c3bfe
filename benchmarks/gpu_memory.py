"""Compares `tunesmith plan` with what a GPU's allocator reserves: `python -m benchmarks.gpu_memory [--json] [--tiny]`.

Real shapes with random weights. "Planned" is the total less CUDA's context, which no allocator counts; "reserved" is
torch's `max_memory_reserved` while training. A plan may be `OVER` too high and `UNDER` too low. `--tiny` runs two
narrow layers on the CPU, where there is nothing to compare: it shows that the program runs.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.rows import write_chat
from benchmarks.shapes import TINY, model_folder
from tests.launching import ROOT, environment, flags, launch
from trainers.run.gpus import find_gpus

OVER, UNDER = 0.07, 0.03
_ROOMY = 60 * 2**30
"""Bytes of a GPU on which the runs go side by side."""


@dataclass(frozen=True)
class Case:
    """What is planned and trained, packed and in bf16: rows of `length` tokens, `micro` of them at once."""

    model: str
    method: str
    length: int
    micro: int
    checkpointing: bool = False

    @property
    def name(self) -> str:
        more = ", checkpointing" if self.checkpointing else ""
        return f"{self.model}, {self.method}, {self.micro} x {self.length}{more}"


CASES = (
    Case("qwen3-0.6b", "full", 4096, 1),
    Case("qwen3-0.6b", "full", 4096, 2, checkpointing=True),
    Case("qwen3-1.7b", "lora", 2048, 2),
)


def options_of(case: Case, folder: Path, tiny: bool) -> dict[str, Any]:
    """Options of the run and of its plan."""
    model = model_folder(TINY + case.model if tiny else case.model, folder)
    return {
        "model_name_or_path": str(model), "dataset_name": str(folder / "rows.jsonl"), "eval_dataset_name": "none",
        "method": case.method, "packing": True, "max_length": 128 if tiny else case.length,
        "per_device_train_batch_size": case.micro, "global_batch_size": 2 * case.micro, "mixed_precision": "bf16",
        "gradient_checkpointing": case.checkpointing, "max_steps": 2 if tiny else 4, "logging_steps": 1,
        "save_steps": 0, "learning_rate": 1e-5, "share_gpus": True, "cache_dir": str(folder / "cache"),
    }  # fmt: skip


def planned_gib(options: dict[str, Any]) -> float:
    """The plan's peak in GiB, without the context of CUDA, or on a CPU the process, which are its overhead.

    Raises:
        RuntimeError: if there is no plan.
    """
    gpus = find_gpus()
    devices = ["--gpus", str(gpus[0].index)] if gpus else ["--num_processes", "1"]
    command = [sys.executable, "-m", "app.cli", "plan", "--strategies", "single", "--json", *devices, *flags(options)]
    done = subprocess.run(command, env=environment(), cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"plan: {(done.stderr.strip().splitlines() or ['no output'])[-1]}")
    (row,) = json.loads(done.stdout)["rows"]
    if not row["memory_gib"] or row["per_device_train_batch_size"] != options["per_device_train_batch_size"]:
        raise RuntimeError(f"plan: {row['reason'] or 'another micro-batch'}")
    return float(row["memory_gib"]["total"] - row["memory_gib"]["overhead"])


def used_gib(output: Path, options: dict[str, Any]) -> float:
    """The most that the allocator reserved while the run trained, in GiB; on a CPU the resident set.

    Raises:
        RuntimeError: if the run failed.
    """
    finished = launch(output, 1, options, by_hand=True)
    if finished.state.get("state") != "done":
        raise RuntimeError(f"train: {finished.state.get('cause') or finished.output[-300:]}")
    rows = finished.rows()
    key = "memory_reserved_gib_by_rank" if "memory_reserved_gib_by_rank" in rows[0] else "memory_gib_by_rank"
    return float(max(row[key][0] for row in rows))


def compare(case: Case, folder: Path, tiny: bool) -> dict[str, Any]:
    """Plans and trains a case.

    Returns:
        `name`, `planned_gib`, `reserved_gib`, `ratio` (the first over the second), and `reason`, None if that is within
        the limits; on a CPU it is not judged.
    """
    row: dict[str, Any] = {"name": case.name, "planned_gib": None, "reserved_gib": None, "ratio": None, "reason": None}
    try:
        options = options_of(case, folder, tiny)
        row["planned_gib"] = planned = planned_gib(options)
        row["reserved_gib"] = used = used_gib(folder / case.name.replace(" ", "-").replace(",", ""), options)
    except (RuntimeError, subprocess.SubprocessError) as error:
        return {**row, "reason": str(error)}
    row["ratio"] = round(planned / used, 4)
    return row if tiny else {**row, "reason": verdict(planned, used)}


def verdict(planned: float, used: float) -> str | None:
    """Why a plan is wrong; None if it is within the limits."""
    if planned > (1 + OVER) * used:
        return f"planned {planned:.2f} GiB, {planned / used - 1:.1%} above the {used:.2f} reserved; {OVER:.0%} may be"
    if planned < (1 - UNDER) * used:
        return f"planned {planned:.2f} GiB, {1 - planned / used:.1%} below the {used:.2f} reserved; {UNDER:.0%} may be"
    return None


def main(argv: Sequence[str]) -> int:
    """Prints a line per case, or JSON; exit status 1 if a plan is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--tiny", action="store_true", help="on the CPU, with tiny shapes")
    args = parser.parse_args(argv)
    gpus = find_gpus()
    if not gpus and not args.tiny:
        parser.error("there is no GPU; --tiny runs the program on the CPU")
    cases = CASES[:1] if args.tiny else CASES
    with tempfile.TemporaryDirectory() as path:
        folder = Path(path)
        write_chat(folder / "rows.jsonl", 40 if args.tiny else 400, seed=1)
        if args.tiny or gpus[0].memory < _ROOMY:
            rows = [compare(case, folder, args.tiny) for case in cases]
        else:
            for name in {case.model for case in cases}:  # before the threads, which would write the same folder
                model_folder(name, folder)
            with ThreadPoolExecutor(len(cases)) as pool:
                rows = list(pool.map(lambda case: compare(case, folder, args.tiny), cases))
    for row in [] if args.json else rows:
        print(
            f"{row['name']}: planned {row['planned_gib']}, reserved {row['reserved_gib']} GiB; {row['reason'] or 'ok'}"
        )
    if args.json:
        print(json.dumps({"rows": rows}, indent=1))
    return 1 if any(row["reason"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
