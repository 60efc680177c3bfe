"""Rates, memory, and the metrics file: one JSON row per logged step and per evaluation."""

from __future__ import annotations

import json
import math
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

import psutil
import torch

from trainers.run.gpus import gpu_use


def memory_gib(device: torch.device) -> float:
    """Memory of this rank in GiB: on a GPU the peak since the last call, on a CPU the current resident set."""
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        return peak / 2**30
    return _resident_gib()


def _resident_gib() -> float:
    return psutil.Process().memory_info().rss / 2**30


def device_values(device: torch.device) -> dict[str, float | None]:
    """What a rank uses of its machine, for a row of metrics.

    Returns:
        `memory_gib` (see there); on a GPU also `memory_reserved_gib` (the peak that torch's allocator held then),
        `host_memory_gib` (the resident set), `gpu_percent` (recent use) and `gpu_power_w` (watts), both None where NVML
        does not report it.
    """
    if device.type != "cuda":
        return {"memory_gib": round(memory_gib(device), 4)}
    reserved = torch.cuda.max_memory_reserved(device) / 2**30  # first: `memory_gib` begins both peaks anew
    values = {"memory_gib": memory_gib(device), "memory_reserved_gib": reserved, "host_memory_gib": _resident_gib()}
    use = gpu_use(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
    return {**{name: round(value, 4) for name, value in values.items()}, **use}


def values_by_rank(by_rank: list[dict[str, float | None]]) -> dict[str, Any]:
    """The entries of a metrics row for `device_values` of all ranks: `memory_gib` of the fullest, and lists by rank."""
    lists = {f"{name}_by_rank": [values[name] for values in by_rank] for name in by_rank[0]}
    return {"memory_gib": max(value or 0.0 for value in lists["memory_gib_by_rank"]), **lists}


class Window:
    """Time and tokens since the last logged step; saves and evaluations do not count against the rates."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Starts a new window."""
        self.began = time.perf_counter()
        self.paused = 0.0
        self.waited = 0.0
        self.steps = self.tokens = self.trained = 0
        self.flops = 0.0

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Counts the time of the `with` block as waiting for data."""
        began = time.perf_counter()
        yield
        self.waited += time.perf_counter() - began

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Excludes the time of the `with` block from training time."""
        began = time.perf_counter()
        yield
        self.paused += time.perf_counter() - began

    def count(self, tokens: int, trained: int, flops: float) -> None:
        """Counts one step; the arguments cover the full global batch."""
        self.steps += 1
        self.tokens += tokens
        self.trained += trained
        self.flops += flops

    def seconds(self) -> float:
        """Training time in the window, in seconds."""
        return max(time.perf_counter() - self.began - self.paused, 1e-9)

    def rates(self, peak: float | None) -> dict[str, float | None]:
        """Rates of the window.

        Args:
            peak: FLOP/s of all devices together, or None if unknown.
        """
        seconds = self.seconds()
        return {
            "tokens_per_second": self.tokens / seconds,
            "trained_tokens_per_second": self.trained / seconds,
            "mfu": self.flops / seconds / peak if peak else None,
            "data_wait": self.waited / seconds,
        }


class RecentPace:
    """Trimmed mean of step time and token rate over the last logged windows.

    A single window is unreliable: a save, another process on the machine or a compilation makes it many times longer.
    """

    WINDOWS = 50
    TRIMMED = 0.1
    """Fraction of windows trimmed at each end; at least one if there are three or more."""

    def __init__(self) -> None:
        self._step_seconds = deque[float](maxlen=self.WINDOWS)
        self._rates = deque[float](maxlen=self.WINDOWS)

    def add(self, window: Window) -> None:
        """Adds a window when it is logged."""
        seconds = window.seconds()
        self._step_seconds.append(seconds / max(window.steps, 1))
        self._rates.append(window.tokens / seconds)

    @property
    def step_seconds(self) -> float:
        """Expected seconds per step."""
        return _trimmed_mean(self._step_seconds, self.TRIMMED)

    @property
    def tokens_per_second(self) -> float:
        """Real tokens per second over all ranks."""
        return _trimmed_mean(self._rates, self.TRIMMED)


def _trimmed_mean(values: Iterable[float], share: float) -> float:
    ordered = sorted(values)
    trim = max(1, round(share * len(ordered))) if len(ordered) > 2 else 0
    trimmed = ordered[trim : len(ordered) - trim]
    return sum(trimmed) / len(trimmed)


class MetricsFile:
    """Appends rows to `metrics.jsonl`, one complete line each. Rank 0 only.

    Args:
        path: the file.
        attempt: number of this start of the run; it is in every row.
    """

    def __init__(self, path: Path, attempt: int):
        self.attempt = attempt
        _mend_last_line(path)
        self.file: TextIO = open(path, "a", encoding="utf-8")  # noqa: SIM115 - open for the duration of the run

    def write(self, row: dict[str, Any]) -> None:
        """Appends one row; non-finite numbers become null."""
        full_row = {"step": row["step"], "attempt": self.attempt, **row}
        clean = {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in full_row.items()
        }
        self.file.write(json.dumps(clean) + "\n")
        self.file.flush()


def _mend_last_line(path: Path) -> None:
    """Repairs a last row cut off by a kill or a full disk: completes its newline, or removes it if it is partial."""
    if not path.exists():
        return
    with open(path, "rb+") as file:
        last = file.read().rpartition(b"\n")[2]
        if last:
            try:
                json.loads(last)
                file.write(b"\n")
            except ValueError:
                file.truncate(file.tell() - len(last))
