"""Metrics by rank, in few points that stay few as a run grows: what the small charts of a run's page show."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

METRICS = ("local_work", "memory_gib", "memory_reserved_gib", "host_memory_gib", "gpu_percent", "gpu_power_w")
"""Metrics of which a row has a list by rank, named `<metric>_by_rank`; the first that a run has is shown first."""
MOST_RANKS = 64
"""Ranks that are kept, from rank 0."""
FEW_RANKS = 8
"""Ranks that are shown unless all are asked for."""
MOST_POINTS = 128
"""Most points of a rank."""

Floats = NDArray[np.float64]


class RankTable:
    """Means of each metric over equally many steps, a power of two, and the largest value of each rank."""

    def __init__(self) -> None:
        self.world = 0
        self.rows = 0
        self.width = 1
        self.peaks: dict[str, Floats] = {}
        self._attempt = 0
        self._buckets: dict[int, dict[str, tuple[Floats, Floats]]] = {}
        """Sum and number of values by rank, by metric, by step divided by `width`."""

    def add(self, step: int, attempt: int, row: dict[str, Any]) -> None:
        """Adds the lists of a row; those that are no lists of numbers are left out."""
        values = {name: array for name in METRICS if (array := _by_rank(row.get(f"{name}_by_rank"))) is not None}
        if not values or attempt < self._attempt:
            return
        if attempt > self._attempt:  # it repeats the steps from here on
            self._attempt = attempt
            self._buckets = {key: bucket for key, bucket in self._buckets.items() if key < step // self.width}
        self.rows += 1
        bucket = self._buckets.setdefault(step // self.width, {})
        for name, array in values.items():
            self.world = max(self.world, len(row[f"{name}_by_rank"]))
            self.peaks[name] = _combined(np.fmax, self.peaks.get(name), array, np.nan)
            total, count = bucket.get(name, (None, None))
            known = np.isfinite(array)
            bucket[name] = _summed(total, np.where(known, array, 0.0)), _summed(count, known.astype(float))
        while len(self._buckets) > MOST_POINTS:
            self._merge_pairs()

    def _merge_pairs(self) -> None:
        self.width *= 2
        merged: dict[int, dict[str, tuple[Floats, Floats]]] = {}
        for key, bucket in self._buckets.items():
            into = merged.setdefault(key // 2, {})
            for name, (total, count) in bucket.items():
                before = into.get(name, (None, None))
                into[name] = _summed(before[0], total), _summed(before[1], count)
        self._buckets = merged

    def peak(self, name: str) -> list[float | None]:
        """The largest value of each rank."""
        return _plain(self.peaks[name]) if name in self.peaks else []

    def view(self, metric: str, every: bool, slow: Counter[int]) -> dict[str, Any]:
        """The curves of one metric.

        Args:
            metric: one of `METRICS`; another one stands for the first that the run has.
            every: whether to return all ranks that are kept, rather than `FEW_RANKS`.
            slow: how often each rank was reported as slow.

        Returns:
            `metrics` that the run has, and the `metric` that follows; `world`, `kept` (number of ranks with curves),
            `steps` (the last one of each point), `ranks` (`rank`, `values`, `mean`, `slow`: how often it was reported)
            in order, and `highest`: the rank with the highest mean, or None.
        """
        names = [name for name in METRICS if name in self.peaks]
        metric = metric if metric in names else next(iter(names), "")
        keys = sorted(key for key, bucket in self._buckets.items() if metric in bucket)
        ranks = min(self.world, MOST_RANKS)
        points = np.full((len(keys), ranks), np.nan)
        for number, key in enumerate(keys):
            total, count = self._buckets[key][metric]
            points[number, : len(total)] = np.where(count > 0, total / np.maximum(count, 1), np.nan)
        known = np.isfinite(points)
        means = np.where(known.any(0), np.where(known, points, 0.0).sum(0) / np.maximum(known.sum(0), 1), np.nan)
        chosen = list(range(ranks)) if every else _furthest(means, slow)
        return {
            "metrics": names, "metric": metric, "world": self.world, "kept": ranks,
            "steps": [(key + 1) * self.width - 1 for key in keys],
            "ranks": [{"rank": rank, "values": _plain(points[:, rank]), "mean": _plain(means[[rank]])[0],
                       "slow": slow[rank]} for rank in chosen],
            "highest": int(np.nanargmax(means)) if np.isfinite(means).any() else None,
        }  # fmt: skip


def _furthest(means: Floats, slow: Counter[int]) -> list[int]:
    """The ranks that were slow most often, then those furthest from the median."""
    middle = float(np.nanmedian(means)) if np.isfinite(means).any() else 0.0
    distance = np.nan_to_num(np.abs(means - middle))
    order = sorted(range(len(means)), key=lambda rank: (-slow[rank], -distance[rank], rank))
    return sorted(order[:FEW_RANKS])


def _by_rank(values: Any) -> Floats | None:
    """A list by rank as numbers, NaN for what is not one; None if it is no list of numbers."""
    if not isinstance(values, list) or not values:
        return None
    try:
        array = np.asarray(values[:MOST_RANKS], dtype=np.float64)
    except (TypeError, ValueError, OverflowError):
        return None
    return np.where(np.abs(array) < 1e15, array, np.nan) if array.ndim == 1 else None


def _summed(before: Floats | None, values: Floats) -> Floats:
    return _combined(np.add, before, values, 0.0)


def _combined(function: Any, before: Floats | None, values: Floats, blank: float) -> Floats:
    """The function of two arrays, the shorter of which is filled up with `blank`."""
    if before is None:
        return values
    size = max(len(before), len(values))
    arrays = [np.append(array, np.full(size - len(array), blank)) for array in (before, values)]
    combined: Floats = function(*arrays)
    return combined


def _plain(values: Floats) -> list[float | None]:
    return [float(f"{value:.5g}") if np.isfinite(value) else None for value in values.tolist()]
