"""What is wrong with the numbers of a run that did not fail. Each condition answers None unless it is plain to see."""

from __future__ import annotations

import math
import statistics
from typing import Any

from app.diagnosis.facts import Metrics
from app.diagnosis.plan import Plan
from trainers.strategy.pipeline_schedules import bubble

Facts = dict[str, Any]
LEAST_ROWS = 40
"""Rows below which a curve says nothing."""
FLAT = 0.02
"""Fall of the loss, as a fraction, that a flat one surely does not reach."""
LEARNED = 0.3
"""Loss below which a model has nothing to learn from its data."""
RISE = 0.05
"""Rise of the evaluation loss over its best, as a fraction."""
WAIT = 0.25
"""Fraction of training time spent waiting for data."""
WAITED_SECONDS = 3.0
IDLE = 0.3
"""Fraction of a step that a rank of a pipeline is idle."""
LOW_MFU = 0.15


def several_machines(metrics: Metrics, plan: Plan) -> bool:
    """Whether the run is on more than one machine."""
    return plan.machines > 1


def grew_before_the_end(metrics: Metrics, plan: Plan) -> bool:
    """Whether the last losses that were logged are far above the lowest."""
    losses = [value for _, value in metrics.column("loss")]
    return len(losses) > 1 and losses[-1] > 3 * min(losses) and losses[-1] > 1.5 * losses[0]


def loss_does_not_fall(metrics: Metrics, plan: Plan) -> Facts | None:
    """The loss at the end is surely within `FLAT` of that at the beginning, once the learning rate has risen."""
    losses = _after_warmup(metrics)
    if metrics.rows < LEAST_ROWS or len(losses) < LEAST_ROWS:
        return None
    quarter = len(losses) // 4
    early, late = losses[:quarter], losses[-quarter:]
    error = math.hypot(_standard_error(early), _standard_error(late))
    first, last = statistics.fmean(early), statistics.fmean(late)
    most, least = first - last + 2 * error, first - last - 2 * error
    if first < LEARNED or most > FLAT * first or least < -FLAT * first * 5:
        return None
    return {"first": f"{first:.4g}", "last": f"{last:.4g}", "rate": f"{plan.config.scaled_learning_rate():g}"}


def loss_rises(metrics: Metrics, plan: Plan) -> Facts | None:
    """The loss at the end is far above its lowest stretch, and above where it began."""
    points = metrics.column("loss")
    if metrics.rows < LEAST_ROWS or len(points) < LEAST_ROWS:
        return None
    losses, size = [value for _, value in points], max(8, len(points) // 8)
    windows = [statistics.median(losses[start : start + size]) for start in range(0, len(losses) - size + 1, size)]
    lowest = min(range(len(windows)), key=windows.__getitem__)
    last = min(statistics.median(losses[-size:]), windows[-1])
    if last < 1.5 * windows[lowest] or last < windows[0] or last - windows[lowest] < 0.5:
        return None
    step = int(points[min((lowest + 1) * size, len(points) - 1)][0])
    return {"step": step, "first": f"{windows[lowest]:.4g}", "last": f"{last:.4g}"}


def eval_rises(metrics: Metrics, plan: Plan) -> Facts | None:
    """The evaluation loss stays above its best to the end while the training loss still falls."""
    evals = metrics.column("eval_loss")
    best = min(range(len(evals)), key=lambda index: evals[index][1], default=0)
    if len(evals) - best < 3 or plan.config.load_best_model_at_end:
        return None
    (step, lowest), last = evals[best], evals[-1][1]
    after = [value for _, value in evals[best + 1 :]]
    if min(after) <= lowest or min(after[len(after) // 2 :]) < lowest * (1 + RISE) or last - lowest < 0.02:
        return None
    losses = metrics.column("loss")
    before = [value for at, value in losses if at <= step][-8:]
    at_end = [value for at, value in losses if at > step][-8:]
    if not before or not at_end or statistics.fmean(at_end) >= statistics.fmean(before):
        return None
    return {"step": int(step), "first": f"{lowest:.4g}", "last": f"{last:.4g}"}


def warmup_is_too_long(metrics: Metrics, plan: Plan) -> Facts | None:
    """The run ended before the learning rate had risen."""
    rates = metrics.column("learning_rate")
    steps, total = plan.config.warmup_steps, int(metrics.latest.get("step") or 0)
    if plan.config.max_steps is None or len(rates) < 10 or steps < max(total, plan.config.max_steps):
        return None
    return {"warmup": steps, "total": plan.config.max_steps, "reached": f"{rates[-1][1]:.2g}"}


def waits_for_data(metrics: Metrics, plan: Plan) -> Facts | None:
    """Much of the time of a run goes into waiting for its next batch."""
    waits = [value for _, value in metrics.column("data_wait")][1:]
    seconds = metrics.newest("elapsed_s")
    if len(waits) < 20 or seconds is None:
        return None
    share = statistics.median(waits)
    return {"share": f"{share:.0%}"} if share > WAIT and share * seconds > WAITED_SECONDS else None


def pipeline_is_idle(metrics: Metrics, plan: Plan) -> Facts | None:
    """The ranks of a pipeline wait for each other: too few micro-batches."""
    strategy = plan.strategy
    if strategy.pp_size == 1 or metrics.rows < 10:
        return None
    count = plan.config.accumulation_steps(strategy.data_parallel_size)
    share = bubble(strategy.pp_schedule, strategy.pp_size, count)
    return {"share": f"{share:.0%}", "count": count, "stages": strategy.pp_size} if share > IDLE else None


def batch_is_small(metrics: Metrics, plan: Plan) -> Facts | None:
    """A GPU does far less than it can, with memory to spare, on micro-batches that could be larger."""
    shares = [value for _, value in metrics.column("mfu")]
    memory = metrics.newest("memory_gib")
    if not plan.gpu_gib or len(shares) < 20 or memory is None:
        return None
    share = statistics.median(shares)
    count = plan.config.accumulation_steps(plan.strategy.data_parallel_size)
    spare = memory < 0.4 * plan.gpu_gib
    return {"share": f"{share:.1%}", "memory": f"{memory:.1f}"} if share < LOW_MFU and count > 1 and spare else None


def a_rank_is_slow(metrics: Metrics, plan: Plan) -> Facts | None:
    """One rank, and no other, was reported in at least three verdicts, and in a quarter of those that time allows."""
    seconds = metrics.newest("elapsed_s")
    if len(metrics.slow) != 1 or seconds is None:
        return None
    ((rank, count),) = metrics.slow.items()
    return {"rank": str(rank), "count": count} if count >= 3 and count >= seconds / 20 else None


def _after_warmup(metrics: Metrics) -> list[float]:
    """The losses from the first point on at which the learning rate has reached half its peak."""
    rates = dict(metrics.column("learning_rate"))
    peak = max(rates.values(), default=0.0)
    points = metrics.column("loss")
    first = next((index for index, (step, _) in enumerate(points) if rates.get(step, 0.0) >= peak / 2), len(points))
    return [value for _, value in points[first:]]


def _standard_error(values: list[float]) -> float:
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.inf
