"""Reports a sweep: a row for each trial, its spread over seeds, and which is the best."""

from __future__ import annotations

import shlex
import statistics
from collections.abc import Sequence
from typing import Any

from app.console import clean, counted, report, show_table
from app.sweep.record import SweepFolder, SweepRecord, Trial, ranked, true_state


def document_of(folder: SweepFolder, record: SweepRecord) -> dict[str, Any]:
    """The JSON document of a sweep."""
    order = ranked(record.trials, record.better)
    best = _best(record, order)
    return {
        "sweep": folder.id, "sweep_dir": str(folder.path), "state": true_state(record), "started_at": record.started_at,
        "search": record.search, "measure": record.measure, "better": record.better, "seeds": record.seeds,
        "rungs": record.rungs if record.halving else [], "steps": record.steps,
        "trials": [_row(record, trial) for trial in record.trials],
        "runs": [
            {"id": run.id, "run_dir": str(folder.run(run).path), "trial": trial.number, "options": trial.values,
             "seed": run.seed, "metric": run.scores[-1] if run.scores else None, "state": run.state, "step": run.step,
             "cause": run.cause, "gone": folder.is_gone(run)}
            for trial in record.trials for run in trial.runs
        ],
        "leader": order[0].number if order else None,
        "best": best.number if best else None,
        "spread": _spread(order[0]) if order else None,
        "verdict": verdict_of(record),
    }  # fmt: skip


def _row(record: SweepRecord, trial: Trial) -> dict[str, Any]:
    cause = next((run.cause for run in trial.runs if run.cause), None)
    return {"number": trial.number, "options": trial.values, "state": trial.state, "cause": cause,
            "steps": sum(run.step for run in trial.runs), "spread": _spread(trial)}  # fmt: skip


def _spread(trial: Trial) -> dict[str, Any] | None:
    """Mean, range and standard deviation over the seeds, at the last rung that all of them reached."""
    scores = trial.scores(trial.last_rung) if trial.last_rung >= 0 else None
    if not scores:
        return None
    std = statistics.stdev(scores) if scores[1:] else None
    return {"runs": len(scores), "mean": statistics.fmean(scores), "min": min(scores), "max": max(scores), "std": std}


def _best(record: SweepRecord, order: Sequence[Trial]) -> Trial | None:
    """The trial that is better than all others with every seed; None where the spread is larger than the difference.

    Trials are compared where both of them were measured: with one that is cut, at the rung after which it was.
    """
    from app.runs.compare import beyond_spread  # it imports numpy, which takes a while

    if len(order) < 2:
        return None
    leader = order[0]
    for other in order[1:]:
        pair = [trial.scores(other.last_rung) or [] for trial in (leader, other)]
        if beyond_spread(pair, record.better) != 0:
            return None
    return leader


def verdict_of(record: SweepRecord) -> str:
    """Which trial leads, and whether by more than the spread over seeds, in one or two sentences."""
    order = ranked(record.trials, record.better)
    if not order:
        return "No trial has been measured."
    leader, measure = order[0], record.measure
    mean = leader.mean(leader.last_rung)
    seeds = f", mean of {len(record.seeds)} seeds" if record.seeds[1:] else ""
    lead = f"Trial {leader.number}, {settings(leader)}, leads in {measure}: {mean:.5g}{seeds}."
    if len(order) == 1:
        return f"Only trial {leader.number}, {settings(leader)}, has been measured: {measure} {mean:.5g}{seeds}."
    if not record.seeds[1:]:
        return f"{lead} Each point has one seed, so it is unknown how much of this is chance: --seeds 3 tells."
    if _best(record, order):
        return f"{lead} It is the best: every seed of it is better than every seed of any other trial."
    return f"{lead} None is the best beyond the spread over seeds."


def standing(record: SweepRecord) -> tuple[str, str, str]:
    """The settings that lead, their score, and whether they are the best, each in a few words."""
    order = ranked(record.trials, record.better)
    if not order:
        return "nothing measured yet", "-", "-"
    single = "unknown: one seed for each point"
    best = single if not record.seeds[1:] else "yes" if _best(record, order) else "no"
    return settings(order[0]), f"{order[0].mean(order[0].last_rung):.5g}", best


def settings(trial: Trial) -> str:
    """The values of a trial as text."""
    return ", ".join(f"{name}={value}" for name, value in trial.values.items()) or "as given"


def compared_runs(folder: SweepFolder, record: SweepRecord) -> list[str]:
    """Ids of the runs to compare, the best trials first, as many as a page shows; without those that are gone."""
    from app.runs.compare import MAX_RUNS  # it imports numpy, which takes a while

    measured = [run for trial in ranked(record.trials, record.better) for run in trial.runs if run.scores]
    return [run.id for run in measured if not folder.is_gone(run)][:MAX_RUNS]


def comparison_of(folder: SweepFolder, record: SweepRecord) -> dict[str, str]:
    """The query of the Compare page for the best runs of a sweep; empty if there are none to compare."""
    runs = compared_runs(folder, record)
    return {"runs": ",".join(runs), "by": record.measure} if runs else {}


def table_of(record: SweepRecord) -> tuple[list[str], list[list[str]]]:
    """Headers and rows of the trials, the best first, and those without a score last."""
    order = ranked(record.trials, record.better)
    names = [axis.option for axis in record.axes]
    headers = ["trial", *names, "state", "steps", record.measure, "spread", "cause"]
    rows = []
    for trial in [*order, *(trial for trial in record.trials if trial not in order)]:
        entry = _row(record, trial)
        spread = entry["spread"]
        mean = f"{spread['mean']:.5g}" if spread else "-"
        ends = f"{spread['min']:.5g} to {spread['max']:.5g}" if spread and spread["runs"] > 1 else ""
        values = [trial.values[name] for name in names]
        rows.append([str(trial.number), *values, trial.state, str(entry["steps"]), mean, ends, entry["cause"] or ""])
    return headers, rows


def show(folder: SweepFolder, record: SweepRecord) -> None:
    """Prints the trials, the best first, and what can be done next."""
    headers, rows = table_of(record)
    if not any(row[-2] for row in rows):
        headers, rows = headers[:-2] + headers[-1:], [row[:-2] + row[-1:] for row in rows]
    show_table(headers, rows, ["cause", "spread", "steps"] if "spread" in headers else ["cause", "steps"])
    runs = sum(len(trial.runs) for trial in record.trials)
    report(f"{folder.id} is {true_state(record)}: {counted(runs, 'run', 'runs')}, {record.steps:,} steps")
    report(clean(verdict_of(record)))
    if gone := [run.id for trial in record.trials for run in trial.runs if folder.is_gone(run)]:
        report(clean(f"gone     {', '.join(gone)}: deleted or moved; what was measured stays"))
    if names := compared_runs(folder, record):
        argv = ["tunesmith", "runs", "compare", *names, "--runs_dir", str(folder.path.parent), "--by", record.measure]
        report(f"compare  {clean(shlex.join(argv))}")
    if true_state(record) in ("stopped", "interrupted"):
        report(f"go on    tunesmith sweep resume {shlex.quote(str(folder.path))}")
