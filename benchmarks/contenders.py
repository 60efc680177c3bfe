"""Runs Tunesmith, a bare PyTorch loop and TRL on the same weights and rows, each run in a process of its own."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil

from benchmarks.rows import Batches, batches_of, write_chat
from benchmarks.shapes import model_folder
from tests.launching import ROOT, SCRIPT, environment, flags
from trainers.config.options import TrainConfig
from trainers.run.folder import RunFolder
from trainers.run.gpus import gpu_count

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node")
_SPARE_STEPS = 1000
"""Steps beyond those measured: a run is stopped after measuring, so that it saves and exports nothing."""


class RunFailed(RuntimeError):
    """A run failed.

    Args:
        cause: one line.
        output: the end of its output.
    """

    def __init__(self, cause: str, output: str = ""):
        self.cause = cause
        super().__init__(f"{cause}\n{output}".strip())


@dataclass(frozen=True)
class Case:
    """The training that is measured.

    Args:
        model: one of `benchmarks.shapes.NAMES`.
        packing: whether rows are packed.
        processes: number of ranks.
        warm: warm-up steps.
        timed: timed steps after them.
        micro: rows per micro-batch.
        global_batch: rows per step.
        max_length: tokens per row.
        rate: learning rate.
        grouped: whether unpacked rows are grouped by length.
    """

    model: str
    packing: bool
    processes: int
    warm: int
    timed: int
    micro: int = 8
    global_batch: int = 16
    max_length: int = 512
    method: str = "full"
    precision: str = "no"
    checkpointing: bool = False
    compiled: bool = False
    rate: float = 1e-3
    grouped: bool = True

    @property
    def name(self) -> str:
        """Display name."""
        labels = [self.model, *([self.method] if self.method != "full" else []), self.rows]
        labels += [self.precision] if self.precision != "no" else []
        labels += ["checkpointing"] * self.checkpointing + ["compiled"] * self.compiled
        return ", ".join([*labels, f"{self.processes} process(es)"])

    @property
    def rows(self) -> str:
        """How rows are made."""
        return "packed" if self.packing else "unpacked" if self.grouped else "unpacked in random order"

    @property
    def steps(self) -> int:
        """Warm-up and timed steps."""
        return self.warm + self.timed


@dataclass(frozen=True)
class Measured:
    """Result of one run: tokens per second after the warm-up steps, peak memory, first and last loss.

    `peak_mib` is PyTorch's peak memory on the GPU; without a GPU, the resident memory of the largest process.
    """

    tokens_per_second: float
    peak_mib: float
    first_loss: float
    last_loss: float


class Bench:
    """Runs contenders on cases, in a folder of its own.

    Args:
        folder: an empty folder.
        deadline: `time.monotonic()` at which a run is killed; None for no limit.
    """

    def __init__(self, folder: Path, deadline: float | None = None):
        self.folder = folder
        self.deadline = deadline
        self.number = 0
        self.data = write_chat(folder / "train.jsonl", 4000, seed=1)

    def options(self, case: Case) -> dict[str, Any]:
        """Tunesmith's options for a case."""
        return {
            "model_name_or_path": str(model_folder(case.model, self.folder)), "dataset_name": str(self.data),
            "method": case.method, "max_length": case.max_length, "packing": case.packing,
            "group_by_length": case.grouped,
            "global_batch_size": case.global_batch, "per_device_train_batch_size": case.micro,
            "learning_rate": case.rate, "lr_scheduler_type": "constant", "max_steps": case.steps, "save_steps": 0,
            "mixed_precision": case.precision, "gradient_checkpointing": case.checkpointing,
            "torch_compile": case.compiled, "logging_steps": math.gcd(case.warm, case.timed),
            "cache_dir": str(self.folder / "cache"),
        }  # fmt: skip

    def batches(self, case: Case) -> Path:
        """The case's batches as a file."""
        shape = (case.packing, case.grouped, case.global_batch, case.micro, case.max_length, case.steps)
        path = self.folder / f"{case.model}-{'-'.join(map(str, shape))}.npz"
        return path if path.exists() else batches_of(TrainConfig(**self.options(case))).save(path)

    def run(self, case: Case, tool: str) -> Measured:
        """Runs one contender once.

        Raises:
            RunFailed: if it fails, or the deadline has passed.
        """
        batches, output = self.batches(case), self.output()
        seconds, peak, losses = (self._tunesmith if tool == "tunesmith" else self._other)(case, tool, batches, output)
        return Measured(Batches.load(batches).tokens(case.warm, case.steps) / seconds, peak, *losses)

    def output(self) -> Path:
        """A path that no run has used."""
        self.number += 1
        return self.folder / f"{self.number:03d}"

    def other_argv(self, case: Case, tool: str, batches: Path, output: Path, torchrun: bool) -> list[Any]:
        """Python's arguments for the bare loop or TRL, started by `torchrun` or as a plain script."""
        script = ROOT / "benchmarks" / {"bare": "bare_loop.py", "trl": "trl_sft.py"}[tool]
        options = {"model": model_folder(case.model, self.folder), "batches": batches, "micro": case.micro,
                   "steps": case.steps, "warm": case.warm, "rate": case.rate, "method": case.method,
                   "out": output}  # fmt: skip
        conditions = {
            "--packed": case.packing,
            "--bf16": case.precision == "bf16",
            "--checkpointing": case.checkpointing,
        }
        switches = [word for word, wanted in conditions.items() if wanted]
        return [*([*TORCHRUN, case.processes] if torchrun else []), script, *flags(options), *switches]

    def wait(self, argv: list[Any], processes: int, output: Path, on_line: Callable[[str], None] | None = None) -> int:
        """Runs Python with these arguments; returns the peak resident memory of its largest process in KiB.

        Args:
            argv: Python's arguments.
            processes: number of processes that share the cores.
            output: the path at which the result is written.
            on_line: called with each line that it prints.

        Raises:
            RunFailed: if it fails, or the deadline has passed.
        """
        remaining = None if self.deadline is None else self.deadline - time.monotonic()
        if remaining is not None and remaining <= 0:
            raise RunFailed("no time left")
        env = environment(OMP_NUM_THREADS=str(max(1, (os.cpu_count() or 1) // processes)))
        process = subprocess.Popen(
            [sys.executable, *map(str, argv)], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            encoding="utf-8", errors="replace",
        )  # fmt: skip
        assert process.stdout is not None
        timed_out = threading.Event()
        timer = threading.Timer(remaining or 0, _end, [process.pid, timed_out])
        if remaining is not None:
            timer.start()
        printed = []
        for line in process.stdout:
            printed.append(line)
            if on_line is not None:
                on_line(line)
        _, status, usage = os.wait4(process.pid, 0)
        timer.cancel()
        process.returncode = os.waitstatus_to_exitcode(status)
        if timed_out.is_set():
            raise RunFailed("stopped at the deadline")
        if process.returncode != 0:
            text = "".join(printed)
            raise RunFailed(cause_of(text, process.returncode), text[-3000:])
        return usage.ru_maxrss

    def _tunesmith(self, case: Case, tool: str, batches: Path, output: Path) -> tuple[float, float, list[float]]:
        strategy, run = "single" if case.processes == 1 else "ddp", RunFolder(output)
        argv = ["-m", "accelerate.commands.launch", "--config_file", ROOT / "accelerate_configs" / f"{strategy}.yaml"]
        argv += ["--num_processes", case.processes, "--main_process_port", 0] if case.processes > 1 else []
        options = {**self.options(case), "max_steps": case.steps + _SPARE_STEPS, "output_dir": output}

        def stop(line: str) -> None:
            if line.startswith(f"step {case.steps} "):
                run.ask_stop(save=False)

        resident = self.wait([*argv, SCRIPT, *flags(options)], case.processes, output, stop) / 1024
        rows = [json.loads(line) for line in run.metrics.read_text().splitlines()]
        losses = {row["step"]: row["loss"] for row in rows if "loss" in row}
        peak = max(row["memory_gib"] for row in rows if "memory_gib" in row) * 1024
        ended: dict[int, datetime] = {}
        for line in run.log.read_text().splitlines():
            stamp, _, message = line.partition(" [rank 0] step ")
            if message:
                ended.setdefault(int(message.split()[0]), datetime.fromisoformat(stamp))
        shutil.rmtree(output)
        seconds = (ended[case.steps] - ended[case.warm]).total_seconds()
        return seconds, peak if gpu_count() else resident, [losses[1], losses[case.steps]]

    def _other(self, case: Case, tool: str, batches: Path, output: Path) -> tuple[float, float, list[float]]:
        argv = self.other_argv(case, tool, batches, output, torchrun=case.processes > 1)
        resident = self.wait(argv, case.processes, output) / 1024
        result = json.loads(output.read_text())
        return result["seconds"], result["gpu_peak_mib"] or resident, [result["first_loss"], result["last_loss"]]


def cause_of(text: str, status: int) -> str:
    """One line on why a run failed, from its output, ignoring the errors of its launcher."""
    if re.search(r"OutOfMemoryError|out of memory", text):
        return "out of memory"
    if missing := re.search(r"^(?:\[rank\d+\]: )?ModuleNotFoundError: No module named '([\w.]+)'", text, re.MULTILINE):
        return f"needs {missing[1]}, which is not installed"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    launchers = ("subprocess.CalledProcessError", "torch.distributed.elastic")
    raised = [line for line in lines if re.match(r"(\[rank\d+\]: )?[\w.]*(Error|Exception)\b", line)]
    own = [line for line in raised if not line.startswith(launchers)]
    first = lines.index(_TRACEBACK) if _TRACEBACK in lines else len(lines)
    last = own[-1:] or lines[max(first - 1, 0) : first] or ["it printed nothing"]
    return f"exit status {status}: {last[0][:200]}"


_TRACEBACK = "Traceback (most recent call last):"


def _end(pid: int, timed_out: threading.Event) -> None:
    """Kills a process and its descendants, in any session."""
    timed_out.set()
    try:
        processes = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
