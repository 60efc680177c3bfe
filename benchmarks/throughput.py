"""Tokens per second of Tunesmith, a bare PyTorch loop and TRL: `python -m benchmarks.throughput [--quick] [--json]`.

All train the same weights on the same rows in the same order, in turns within one run of this program. A ratio is the
median of those of the turns; above 1 Tunesmith is faster. First and last loss show that equal work was done.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.rows import Batches, batches_of, write_chat
from benchmarks.shapes import model_folder
from tests.launching import ROOT, SCRIPT, environment, flags
from trainers.config import TrainConfig
from trainers.run_folder import RunFolder

RATE = 1e-3
TOLERANCE = 2e-5
"""Largest relative difference of the losses of equal work."""


@dataclass(frozen=True)
class Case:
    """What is trained.

    Args:
        model: `embedded` (0.9M parameters) or `24M`.
        warm: steps before the clock starts.
        timed: steps after them.
    """

    model: str
    packing: bool
    processes: int
    warm: int
    timed: int
    micro: int = 8
    global_batch: int = 16
    max_length: int = 512

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.model}, {'packed' if self.packing else 'unpacked'}, {self.processes} process(es)"

    @property
    def steps(self) -> int:
        """All of them."""
        return self.warm + self.timed


@dataclass(frozen=True)
class Measured:
    """One run: tokens per second after the warm steps, peak memory of its largest process in MiB, losses."""

    tokens_per_second: float
    peak_mib: float
    first_loss: float
    last_loss: float


def cases(quick: bool) -> list[Case]:
    """The whole programme, or what fits in three minutes."""
    if quick:
        return [Case("embedded", packing, 1, warm=5, timed=20) for packing in (False, True)]
    return [
        Case(model, packing, processes, 10 if model == "embedded" else 2, (60 if model == "embedded" else 8))
        for model in ("embedded", "24M")
        for processes in (1, 2)
        for packing in (False, True)
    ]


class Bench:
    """Runs contenders on cases, in a folder of its own."""

    def __init__(self, folder: Path):
        self.folder, self.number = folder, 0
        self.data = write_chat(folder / "train.jsonl", 4000, seed=1)

    def options(self, case: Case) -> dict[str, Any]:
        """Tunesmith's options for a case."""
        return {
            "model_name_or_path": str(model_folder(case.model, self.folder)), "dataset_name": str(self.data),
            "method": "full", "max_length": case.max_length, "packing": case.packing,
            "global_batch_size": case.global_batch, "per_device_train_batch_size": case.micro,
            "learning_rate": RATE, "lr_scheduler_type": "constant", "max_steps": case.steps, "save_steps": 0,
            "logging_steps": min(case.warm, 10), "cache_dir": str(self.folder / "cache"),
        }  # fmt: skip

    def batches(self, case: Case) -> Path:
        """The case's batches as a file."""
        path = self.folder / f"{case.model}-{case.packing}.npz"
        return path if path.exists() else batches_of(TrainConfig(**self.options(case))).save(path)

    def run(self, case: Case, tool: str) -> Measured:
        """One contender, once."""
        self.number += 1
        batches, output = self.batches(case), self.folder / f"{self.number:03d}"
        seconds, peak, losses = (self._tunesmith if tool == "tunesmith" else self._other)(case, tool, batches, output)
        tokens = Batches.load(batches).tokens(case.warm, case.steps)
        return Measured(tokens / seconds, peak, *losses)

    def _tunesmith(self, case: Case, tool: str, batches: Path, output: Path) -> tuple[float, float, list[float]]:
        strategy = "single" if case.processes == 1 else "ddp"
        words = ["-m", "accelerate.commands.launch", "--config_file", ROOT / "accelerate_configs" / f"{strategy}.yaml"]
        words += ["--num_processes", case.processes, "--main_process_port", 0] if case.processes > 1 else []
        peak = _wait([*words, SCRIPT, *flags({**self.options(case), "output_dir": output})], case.processes, output)
        run = RunFolder(output)
        rows = [json.loads(line) for line in run.metrics.read_text().splitlines()]
        losses = {row["step"]: row["loss"] for row in rows if "loss" in row}
        ended = {}
        for line in run.log.read_text().splitlines():
            stamp, _, rest = line.partition(" [rank 0] step ")
            if rest:
                ended.setdefault(int(rest.split()[0]), datetime.fromisoformat(stamp))
        shutil.rmtree(output)
        seconds = (ended[case.steps] - ended[case.warm]).total_seconds()
        return seconds, peak, [losses[1], losses[case.steps]]

    def _other(self, case: Case, tool: str, batches: Path, output: Path) -> tuple[float, float, list[float]]:
        script = ROOT / "benchmarks" / {"bare": "bare_loop.py", "trl": "trl_sft.py"}[tool]
        options = {"model": model_folder(case.model, self.folder), "batches": batches, "micro": case.micro,
                   "steps": case.steps, "warm": case.warm, "rate": RATE, "out": output}  # fmt: skip
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", case.processes]
        words = [*(launcher if case.processes > 1 else []), script, *flags(options)]
        peak = _wait([*words, *(["--packed"] if case.packing else [])], case.processes, output)
        found = json.loads(output.read_text())
        return found["seconds"], peak, [found["first_loss"], found["last_loss"]]


def _wait(words: list[Any], processes: int, output: Path) -> float:
    """Runs python with these words to a good end; the peak memory of its largest process in MiB."""
    threads = max(1, (os.cpu_count() or 1) // processes)
    log = output.with_suffix(".log")
    with open(log, "wb") as file:
        command = [sys.executable, *map(str, words)]
        process = subprocess.Popen(
            command, env=environment(OMP_NUM_THREADS=str(threads)), stdout=file, stderr=subprocess.STDOUT
        )
        _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}:\n{log.read_text()[-3000:]}")
    return usage.ru_maxrss / 1024


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
            if abs(mine - theirs) > TOLERANCE * abs(mine):
                raise SystemExit(f"{case.name}: {name} has loss {theirs:.6f} where tunesmith has {mine:.6f}")


def packing_gain(results: list[dict[str, Any]]) -> float:
    """Packed over unpacked tokens/s of Tunesmith, the median over models and processes."""
    speed = {(one["model"], one["processes"], one["packing"]): one["tools"]["tunesmith"]["tokens_per_second"]
             for one in results}  # fmt: skip
    return statistics.median(value / speed[model, processes, False]
                             for (model, processes, packing), value in speed.items() if packing)  # fmt: skip


def table(results: list[dict[str, Any]]) -> str:
    """Markdown."""
    lines = ["| model | rows | processes | tool | tokens/s | Tunesmith is | peak MiB | loss, first to last |",
             "|---|---|---|---|---|---|---|---|"]  # fmt: skip
    for one in results:
        for name, run in one["tools"].items():
            ratio = f"{one['ratios'][name]:.2f}x" if name in one["ratios"] else ""
            rows = "packed" if one["packing"] else "unpacked"
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
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder))
        results = [measure(bench, case, asked.repeats or (2 if asked.quick else 5)) for case in cases(asked.quick)]
    kinds = {name for one in results for name in one["ratios"]}
    ratios = {name: statistics.median(one["ratios"][name] for one in results if name in one["ratios"])
              for name in sorted(kinds)}  # fmt: skip
    ratios["packed"] = packing_gain(results)
    machine = {name: version(name) for name in ("torch", "transformers", "trl")} | {"machine": platform.machine()}
    if asked.json:
        print(json.dumps({"ratios": ratios, "cases": results, "versions": machine}, indent=2))
    else:
        print(table(results), "\n", *(f"{name}: {value:.2f}" for name, value in ratios.items()))


if __name__ == "__main__":
    main()
