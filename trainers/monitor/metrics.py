"""Rates, memory, MFU, and the metrics file: one JSON row per logged step and per evaluation."""

from __future__ import annotations

import json
import math
import re
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

import psutil
import torch

# Dense bf16/fp16 peak in FLOP/s from the vendors' data sheets; a device that is not here has no MFU.
_PEAKS = {
    "H100 80GB HBM3": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H200 NVL": 835e12,
    "H200": 989e12,
    "GH200": 989e12,
    "A100": 312e12,
    "L40": 181e12,
    "L40S": 362e12,
    "L4": 121e12,
}


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Matrix throughput of a device in FLOP/s; None where it is not known."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return None
    words = re.split(r"[\s-]", torch.cuda.get_device_name(device))
    return next((peak for known, peak in _PEAKS.items() if set(known.split()) <= set(words)), None)


def attention_width(shape: Any) -> int:
    """Attention heads times their size, over all layers of a model's config; 0 where it does not tell."""
    text = shape.get_text_config() if hasattr(shape, "get_text_config") else shape
    heads, layers = getattr(text, "num_attention_heads", None), getattr(text, "num_hidden_layers", None)
    hidden = getattr(text, "hidden_size", 0)
    size = getattr(text, "head_dim", None)
    return (int(heads * size) if heads and size else hidden) * (layers or 0)


def step_flops(tokens: int, matmul_parameters: tuple[int, int], attention_width: int, squared_lengths: float) -> float:
    """Model FLOPs of one step: recomputation is not counted.

    Args:
        tokens: real tokens.
        matmul_parameters: trained and frozen ones; 6 FLOPs per trained one and token, 4 per frozen one.
        attention_width: heads times their size, over all layers.
        squared_lengths: sum of squared document lengths; causal attention does half of the square.
    """
    trained, frozen = matmul_parameters
    return tokens * (6 * trained + 4 * frozen) + 6 * attention_width * squared_lengths


def memory_gib(device: torch.device) -> float:
    """Peak memory of this rank since the last call on a GPU, resident memory now on a CPU; in GiB."""
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        return peak / 2**30
    return psutil.Process().memory_info().rss / 2**30


class Window:
    """Time and tokens since the last logged step; saves and evaluations do not count against the rates."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Starts a new window."""
        self.began, self.paused, self.waited = time.perf_counter(), 0.0, 0.0
        self.steps = self.tokens = self.trained = 0
        self.flops = 0.0

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Time in here is waiting for data."""
        began = time.perf_counter()
        yield
        self.waited += time.perf_counter() - began

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Time in here is no training."""
        began = time.perf_counter()
        yield
        self.paused += time.perf_counter() - began

    def count(self, tokens: int, trained: int, flops: float) -> None:
        """One step done; the arguments are of the whole global batch."""
        self.steps, self.tokens, self.trained = self.steps + 1, self.tokens + tokens, self.trained + trained
        self.flops += flops

    def seconds(self) -> float:
        """Training time in the window."""
        return max(time.perf_counter() - self.began - self.paused, 1e-9)

    def rates(self, peak: float | None) -> dict[str, float | None]:
        """Rates of the window.

        Args:
            peak: FLOP/s of all devices together, None where it is not known.
        """
        seconds = self.seconds()
        return {
            "tokens_per_second": self.tokens / seconds,
            "trained_tokens_per_second": self.trained / seconds,
            "mfu": self.flops / seconds / peak if peak else None,
            "data_wait": self.waited / seconds,
        }


class RecentPace:
    """Time of a step and rate over the last logged windows, without the slowest and quickest of them.

    A window alone tells little: one save, one neighbour on the machine or one compilation makes it many times as long.
    """

    WINDOWS = 50
    TRIMMED = 0.1
    """Share of the windows that is left out at either end; at least one, of three or more."""

    def __init__(self) -> None:
        self._step_seconds = deque[float](maxlen=self.WINDOWS)
        self._rates = deque[float](maxlen=self.WINDOWS)

    def add(self, window: Window) -> None:
        """Takes a window in, when it is logged."""
        seconds = window.seconds()
        self._step_seconds.append(seconds / max(window.steps, 1))
        self._rates.append(window.tokens / seconds)

    @property
    def step_seconds(self) -> float:
        """Of a step to come."""
        return _trimmed_mean(self._step_seconds, self.TRIMMED)

    @property
    def tokens_per_second(self) -> float:
        """Real tokens of all ranks."""
        return _trimmed_mean(self._rates, self.TRIMMED)


def _trimmed_mean(values: Iterable[float], share: float) -> float:
    ordered = sorted(values)
    cut = max(1, round(share * len(ordered))) if len(ordered) > 2 else 0
    kept = ordered[cut : len(ordered) - cut]
    return sum(kept) / len(kept)


class MetricsFile:
    """Appends rows to `metrics.jsonl`; each is on disk as one whole line. Only rank 0 has one.

    Args:
        path: the file.
        attempt: number of this start of the run; it is in every row.
    """

    def __init__(self, path: Path, attempt: int):
        self.attempt = attempt
        _mend_last_line(path)
        self.file: TextIO = open(path, "a", encoding="utf-8")  # noqa: SIM115 - open as long as the run

    def write(self, row: dict[str, Any]) -> None:
        """One row; numbers that JSON has no word for become null."""
        whole = {"step": row["step"], "attempt": self.attempt, **row}
        clean = {key: None if isinstance(one, float) and not math.isfinite(one) else one for key, one in whole.items()}
        self.file.write(json.dumps(clean) + "\n")
        self.file.flush()


def _mend_last_line(path: Path) -> None:
    """A kill or a full disk may have cut the last row: a part of one is taken out, a whole one gets its end."""
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
