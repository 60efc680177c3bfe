"""What a run's ranks were planned to need, beside what they were measured to use."""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from typing import Any

from app.launch.foreground import CheckBroke
from app.plan.cases import counted_case
from app.plan.command import count
from app.plan.hardware import GIB
from app.plan.memory import rank_memory, shares_of
from app.runs.metrics import Curves
from app.runs.runs import gpu_ids
from app.runs.safe_read import stamp
from app.services.diagnosis import hardware_of
from trainers.config.mistakes import ConfigError
from trainers.config.parse import Request
from trainers.run.folder import RunFolder
from trainers.strategy.strategy import load_strategy, resolve

MOST_RANKS = 64
"""Ranks that are listed."""
NOTES = {
    "gpu": "Measured: the most that PyTorch used at one time, and the most that it reserved for itself. CUDA and NCCL "
           "take some more, which neither number counts.",
    "cpu": "Measured: the most memory that the process had when a step was logged; within a step it may have had more. "
           "It includes what Python, PyTorch and the libraries take in every process.",
}  # fmt: skip
"""What the numbers are, by kind of device."""

Planned = list[dict[str, float]]
"""Bytes by use on each rank."""


def planned_ranks(run: RunFolder) -> Planned:
    """What the planner expects of each rank of a run; counts the model, which takes some seconds.

    Raises:
        ConfigError: if the run's files cannot be read, or its model cannot be counted.
        CheckBroke: if the count crashed.
    """
    config = Request(config=str(run.config)).resolve()
    loaded = load_strategy(str(run.accelerate))
    strategy = resolve(loaded, loaded.num_processes, config.mixed_precision, config.pp_size, config.pp_schedule)
    planned_on = hardware_of(run, strategy)
    counted = count(config, planned_on, [(strategy, config)])
    case = counted_case(strategy, config, counted)
    if case.get("refused") or case["layer"] is None:
        raise ConfigError(f"the plan has no number for this run: {case.get('refused') or case['why']}")
    shares = shares_of(strategy, config, counted, case)
    by_stage = [
        rank_memory(strategy, config, counted, case, share, planned_on.kind == "gpu")[0]
        | {"runtime": float(counted["process_bytes"])}
        for share in shares
    ]
    # The pipeline is the outermost axis of the mesh.
    return [by_stage[rank * len(by_stage) // strategy.num_processes] for rank in range(strategy.num_processes)]


class PlannedMemory:
    """Plans of runs beside their metrics. One object serves a whole server, and counts one model at a time.

    Args:
        curves: cache of metrics.
    """

    MOST = 64

    def __init__(self, curves: Curves):
        self._curves, self._lock, self._counting = curves, threading.Lock(), threading.Lock()
        self._plans = OrderedDict[Any, Planned | str | None]()

    def view(self, run: RunFolder, plan: bool) -> dict[str, Any]:
        """Measured and planned memory.

        Args:
            run: the run.
            plan: whether to count the model, in the background, unless that has been done.

        Returns:
            `kind` (`gpu` or `cpu`), `counting`, `error` (why there is no plan, or empty), `planned` (whether there is
            one), `note`, `world`, and `rows` (see `compared`).
        """
        key = (run.path, stamp(run.config), stamp(run.accelerate))
        with self._lock:
            known = key in self._plans
            planned = self._plans.get(key)
            if plan and not known:
                self._plans[key] = None
                while len(self._plans) > self.MOST:
                    self._plans.popitem(last=False)
                threading.Thread(target=self._count, args=(run, key), daemon=True).start()
        view = _memory(run, planned, self._curves.peaks(run))
        return {**view, "counting": (known or plan) and planned is None, "rows": view["rows"][:MOST_RANKS]}

    def _count(self, run: RunFolder, key: Any) -> None:
        result: Planned | str = "the plan could not be made; run tunesmith plan to see why"
        try:
            with self._counting:
                result = _planned_or_reason(run)
        finally:
            with self._lock:
                self._plans[key] = result


def _planned_or_reason(run: RunFolder) -> Planned | str:
    try:
        return planned_ranks(run)
    except ConfigError as error:
        return "; ".join(error.lines)
    except CheckBroke as error:
        return error.cause


def memory_of(run: RunFolder, curves: Curves, plan: bool) -> dict[str, Any]:
    """Measured and planned memory of all ranks, as `PlannedMemory.view`; waits for the count.

    Args:
        run: the run.
        curves: cache of metrics.
        plan: whether to count the model, which takes some seconds.
    """
    planned = _planned_or_reason(run) if plan else []
    return _memory(run, planned, curves.peaks(run, seconds=math.inf))


def _memory(run: RunFolder, planned: Planned | str | None, peaks: dict[str, list[float | None]]) -> dict[str, Any]:
    kind = "gpu" if gpu_ids(run) else "cpu"
    ranks, error = (planned, "") if isinstance(planned, list) else ([], planned or "")
    rows = compared(ranks, peaks, kind)
    return {"kind": kind, "planned": bool(ranks), "error": error, "note": NOTES[kind], "world": len(rows), "rows": rows}


def compared(planned: Planned, peaks: dict[str, list[float | None]], kind: str) -> list[dict[str, Any]]:
    """A row per rank.

    Args:
        planned: bytes by use, by rank; empty without a plan.
        peaks: the largest value of each rank in GiB, by metric.
        kind: `gpu` or `cpu`.

    Returns:
        `rank`, `measured_gib` (see `NOTES`), `reserved_gib` (GPUs), `planned_gib`, `runtime_gib` (part of both numbers
        on a CPU) and `ratio`: planned by measured, on a CPU without the runtime. None where there is no such number.
    """
    measured, reserved = peaks.get("memory_gib", []), peaks.get("memory_reserved_gib", [])
    rows = []
    for rank in range(max(len(planned), len(measured))):
        uses = planned[rank] if rank < len(planned) else None
        gib = measured[rank] if rank < len(measured) else None
        runtime = uses["runtime"] / GIB if uses and kind == "cpu" else 0.0
        total = None
        if uses:
            left_out = ("runtime", "overhead") if kind == "gpu" else ("runtime",)
            total = sum(size for name, size in uses.items() if name not in left_out) / GIB
        known = total is not None and gib is not None and gib - runtime > 0
        rows.append({
            "rank": rank, "measured_gib": gib, "reserved_gib": reserved[rank] if rank < len(reserved) else None,
            "planned_gib": total, "runtime_gib": runtime if uses and kind == "cpu" else None,
            "ratio": (total - runtime) / (gib - runtime) if known else None,  # type: ignore[operator]
        })  # fmt: skip
    return rows
