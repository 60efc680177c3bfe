"""The memory of a micro-batch on a mesh, from the few cases that were counted, and why a model cannot be split so."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Mapping
from typing import Any

from trainers.config.options import TrainConfig
from trainers.strategy.mesh import heads_mistake
from trainers.strategy.pipeline_schedules import SCHEDULES
from trainers.strategy.strategy import Strategy


def case_of(strategy: Strategy, config: TrainConfig) -> str:
    """The case that `trainers/tools/memory_estimate.py` counts, as `tp:cp:sp:stages:rows`."""
    sizes = strategy.sizes
    return f"{sizes.tp}:{sizes.cp}:{sizes.sp}:{_stages(strategy)}:{config.per_device_train_batch_size}"


def counted_case(strategy: Strategy, config: TrainConfig, counted: Mapping[str, Any]) -> dict[str, Any]:
    """The counts for a strategy: of its own case if that was counted, otherwise derived from the basis.

    Args:
        strategy: the resolved strategy.
        config: the config, with the micro-batch.
        counted: the counts of `trainers/tools/memory_estimate.py`.
    """
    cases, sizes = counted["cases"], strategy.sizes
    if counted.get("limits") and (reason := split_mistake(strategy, counted)):
        return {"refused": reason}
    if (name := case_of(strategy, config)) in cases:
        return dict(cases[name])
    rows = config.per_device_train_batch_size / sizes.sequence_shards
    by_tp: dict[int, dict[float, Mapping[str, Any]]] = {}
    for name, case in cases.items():
        tp, cp, sp, stages, count = map(int, name.split(":"))
        if stages == 1 and "refused" not in case:
            by_tp.setdefault(tp, {})[count / (cp * sp)] = case
    # Linear in the tokens of a micro-batch, and then in each rank's share of the matrices.
    points = {1 / tp: _between(by_rows, rows) for tp, by_rows in by_tp.items()}
    return _between(points, 1 / sizes.tp)


def split_mistake(strategy: Strategy, counted: Mapping[str, Any]) -> str | None:
    """Why a model cannot be split over the strategy's mesh; None if it can."""
    limits, sizes = counted["limits"], strategy.sizes
    stages = _stages(strategy)
    for axis, size in {"tp": sizes.tp, "cp": sizes.cp, "sp": sizes.sp, "ep": sizes.ep, "stages": stages}.items():
        if size > 1 and (reason := limits[axis].get(str(size), f"{axis}={size} is more than this planner tries")):
            return str(reason)
    if sizes.sp > 1 and (reason := heads_mistake(sizes, counted["heads"], "the model")):
        return reason
    return None


def _stages(strategy: Strategy) -> int:
    return strategy.pp_size * SCHEDULES[strategy.pp_schedule].chunks if strategy.pp_size > 1 else 1


def _between(points: Mapping[float, Mapping[str, Any]], where: float) -> dict[str, Any]:
    """The counts on the line through the two points around `where`, or the two nearest; None stays None."""
    places = sorted(points)
    if unknown := [case for case in points.values() if case["layer"] is None]:
        return dict(unknown[0])
    if len(places) == 1:
        return dict(points[places[0]])
    index = min(max(bisect(places, where), 1), len(places) - 1)
    start, end = places[index - 1], places[index]
    low, high, share = points[start], points[end], (where - start) / (end - start)
    return {name: max(0.0, value + share * (high[name] - value)) for name, value in low.items()}
