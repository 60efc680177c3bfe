"""Compares runs: options that differ, measures, the best run by one of them, and the spread over seeds."""

from __future__ import annotations

import csv
import io
import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from app.runs.metrics import AXES, EVAL, Curves
from app.runs.runs import config_values, gpu_ids, run_of_id, strategy_name, true_state, world_size
from trainers.config.byte_text import byte_text
from trainers.config.labels import LABELS
from trainers.config.mistakes import ConfigError
from trainers.run.folder import RunFolder

MAX_RUNS = 8
"""Most runs that a page compares."""


class Measure(NamedTuple):
    """A number by which runs are compared.

    Attributes:
        label: in words.
        metric: the logged metric.
        pick: how one number is made of its values: `last`, `recent`, `best`, `median` or `max`.
        better: `low` or `high`; empty where neither is better.
        unit: unit of the number.
    """

    label: str
    metric: str
    pick: str
    better: str
    unit: str = ""

    @property
    def digits(self) -> int:
        """Significant digits that say something: losses are compared more finely than speed and memory."""
        return 4 if self.unit else 5


MEASURES = {
    "best_eval_loss": Measure("Best evaluation loss", "eval_loss", "best", "low"),
    "last_eval_loss": Measure("Last evaluation loss", "eval_loss", "last", "low"),
    "best_eval_token_accuracy": Measure("Best token accuracy", "eval_token_accuracy", "best", "high"),
    "last_eval_token_accuracy": Measure("Last token accuracy", "eval_token_accuracy", "last", "high"),
    "best_eval_reward_accuracy": Measure("Best preference accuracy", "eval_reward_accuracy", "best", "high"),
    "last_eval_reward_accuracy": Measure("Last preference accuracy", "eval_reward_accuracy", "last", "high"),
    "best_eval_reward": Measure("Best reward", "eval_reward", "best", "high"),
    "last_eval_reward": Measure("Last reward", "eval_reward", "last", "high"),
    "loss": Measure("Last training loss", "loss", "last", "low"),
    "recent_loss": Measure("Recent training loss", "loss", "recent", "low"),
    "tokens_per_second": Measure("Speed", "tokens_per_second", "median", "high", "tokens/s"),
    "peak_memory": Measure("Peak memory", "memory_gib", "max", "low", "GiB"),
    "step": Measure("Steps", "step", "last", ""),
    "tokens": Measure("Tokens", "tokens", "last", ""),
    "time": Measure("Time trained", "elapsed_s", "last", "", "s"),
}
PICKS = {
    "last": "the last value", "recent": "mean of the last 10 logged steps", "best": "the best of all evaluations",
    "median": "median of all steps", "max": "peak of all steps",
}  # fmt: skip
_RECENT = 10
_IDENTITY = ("seed", "gpus", "runs_dir")
"""Settings in which the runs of one group may differ."""
_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n")


def chosen_runs(names: Any, runs_dir: Path) -> tuple[list[RunFolder], list[str]]:
    """The runs of comma-separated ids without duplicates, and an error for each id that cannot be shown.

    Args:
        names: untrusted input.
        runs_dir: folder of run folders.
    """
    text = names if isinstance(names, str) else ""
    run_ids = list(dict.fromkeys(run_id for run_id in text[:4000].split(",") if run_id))
    runs, errors = [], []
    for run_id in run_ids[:MAX_RUNS]:
        try:
            runs.append(run_of_id(run_id, runs_dir))
        except ConfigError as error:
            errors += error.lines
    if len(run_ids) > MAX_RUNS:
        errors.append(f"{len(run_ids)} runs were requested; only the first {MAX_RUNS} are compared")
    return runs, errors


def compare(
    runs: Sequence[RunFolder], curves: Curves, by: str | None = None, seconds: float = math.inf
) -> dict[str, Any]:
    """Settings and measures of several runs.

    Args:
        runs: at least one.
        curves: cache of their metrics.
        by: the measure that decides; default: the first that any run has.
        seconds: how long to read the metrics of each run for; the next call reads on.

    Returns:
        `runs`: `id` and `state` of each; `more`: whether metrics are still unread; `settings`: a row
        `{name, label, values, differs}` per option; `measures`: a row `{name, label, unit, pick, better, values, steps,
        best}` per measure that any run has, where `best` lists the indices of the best runs, of which several are
        equal; `by`; `verdict`: which run is the best by it, in words; `groups`: a row `{runs, seeds, label, unfinished,
        values}` for runs that differ in the seed only, where `values` has `{runs, mean, min, max, std}` by measure.

    Raises:
        ConfigError: for an unknown measure, or one in which no value is better than another.
    """
    if by is not None and not (by in MEASURES and MEASURES[by].better):
        known = ", ".join(name for name, measure in MEASURES.items() if measure.better)
        raise ConfigError(f"by={str(by)[:50]!r} is not a measure; use one of {known}")
    settings = _settings([_values(run) for run in runs])
    states = [{"id": run.id, "state": str(true_state(run).get("state"))} for run in runs]
    tables = [curves.columns(run, seconds) for run in runs]
    picked = {name: [_pick(table, measure) for table in tables] for name, measure in MEASURES.items()}
    measures = [_row(name, pairs) for name, pairs in picked.items() if any(pairs)]
    decisive = [row["name"] for row in measures if row["better"]]
    by = by or (decisive[0] if decisive else None)
    row = next((row for row in measures if row["name"] == by), None)
    groups = _groups(states, settings, measures)
    return {
        "runs": states, "more": any(map(curves.has_more, runs)), "settings": settings, "measures": measures, "by": by,
        "verdict": _verdict(states, row, by) + _other_objectives(settings, row) + _verdict_over_seeds(groups, by),
        "groups": groups,
    }  # fmt: skip


def measured(run: RunFolder, name: str) -> float | None:
    """One measure of a run; None while it has none, or for an unknown one, as the name may come from a file."""
    pair = _pick(Curves().columns(run, math.inf), MEASURES[name]) if name in MEASURES else None
    return pair[0] if pair else None


def beyond_spread(scores: Sequence[Sequence[float]], better: str) -> int | None:
    """Index of the group whose every value is better than every value of all other groups; None without one.

    Args:
        scores: the values of each group, one for each seed.
        better: `low` or `high`.

    A group of a single value has no spread, so that nothing is known to be beyond it.
    """
    if len(scores) < 2 or min(map(len, scores)) < 2:
        return None
    sign = 1 if better == "low" else -1
    signed = [[sign * score for score in group] for group in scores]
    best = min(range(len(signed)), key=lambda index: max(signed[index]))
    others = (min(group) for index, group in enumerate(signed) if index != best)
    return best if max(signed[best]) < min(others) else None


def _values(run: RunFolder) -> dict[str, Any]:
    gpus = ", ".join(map(str, gpu_ids(run)))
    return {"strategy": strategy_name(run), "processes": world_size(run), "gpus": gpus, **config_values(run)}


def _settings(values: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    labels = {"strategy": "Strategy", "processes": "Processes", "gpus": "GPUs", "preset": "Preset", **LABELS}
    rows = []
    for name in dict.fromkeys(name for settings in values for name in settings):
        row = [settings.get(name) for settings in values]
        differs = len({_plain(value) for value in row}) > 1
        rows.append({"name": name, "label": labels.get(name, ""), "values": row, "differs": differs})
    return rows


def _plain(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)


# -- measures --------------------------------------------------------------------------------------------------------


def _pick(tables: tuple[dict[str, Any], ...], measure: Measure) -> tuple[float, int | None] | None:
    """A run's number and the step it is of, if it is of one; None where nothing was logged."""
    table = tables[measure.metric in EVAL]
    known = np.isfinite(table[measure.metric])
    steps, values = table["step"][known], table[measure.metric][known]
    if not len(values):
        return None
    if measure.pick == "median":
        return float(np.median(values)), None
    if measure.pick == "recent":
        return float(np.mean(values[-_RECENT:])), int(steps[-1])
    if measure.pick == "last":
        index = len(values) - 1
    else:
        index = int(np.argmax(values) if measure.pick == "max" or measure.better == "high" else np.argmin(values))
    return float(values[index]), int(steps[index]) if measure.metric not in ("step", *AXES) else None


def measure_text(value: float | None, digits: int = 5) -> str:
    """A measure with so many significant digits, or as a whole number; a dash for None."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if value == int(value) or abs(value) >= 10 ** (digits - 1) else f"{value:,.{digits}g}"


def measure_texts(values: Sequence[float | None], measure: Measure) -> list[str]:
    """Values of one measure, all with as many decimals: so many significant digits of the largest."""
    if measure.unit == "GiB":
        return ["-" if value is None else byte_text(value * 2**30) for value in values]
    digits, unit = measure.digits, f" {measure.unit}" if measure.unit else ""
    texts = [measure_text(value, digits) for value in values]
    decimals = max(len(text.partition(".")[2]) for text in texts)
    largest = max((abs(value) for value in values if value), default=1.0)
    decimals = min(decimals, max(0, digits - 1 - math.floor(math.log10(largest))))
    return [
        text if value is None else f"{text if 'e' in text else f'{value:,.{decimals}f}'}{unit}"
        for text, value in zip(texts, values, strict=True)
    ]


def _row(name: str, pairs: Sequence[tuple[float, int | None] | None]) -> dict[str, Any]:
    measure, values = MEASURES[name], [pair[0] if pair else None for pair in pairs]
    # equal if they read alike
    read = [None if value is None else float(f"{value:.{measure.digits}g}") for value in values]
    known = [value for value in read if value is not None]
    best = {"low": min, "high": max}[measure.better](known) if measure.better and len(known) > 1 else None
    winners = [index for index, value in enumerate(read) if best is not None and value == best]
    return {
        "name": name, "label": measure.label, "unit": measure.unit, "pick": PICKS[measure.pick],
        "better": measure.better, "values": values, "steps": [pair[1] if pair else None for pair in pairs],
        "best": winners if len(winners) < len(known) else [],
    }  # fmt: skip


def _verdict(states: Sequence[dict[str, Any]], row: dict[str, Any] | None, by: str | None) -> str:
    """Which run is the best and how that was decided, in one or two sentences."""
    if row is None:
        return f"None of these runs has a value for {MEASURES[by].label.lower()}." if by else "No metrics yet."
    label, ids = row["label"].lower(), [state["id"] for state in states]
    known = [index for index, value in enumerate(row["values"]) if value is not None]
    missing = [run_id for index, run_id in enumerate(ids) if index not in known]
    first = known[0] if not row["best"] else row["best"][0]
    (number,) = measure_texts([row["values"][first]], MEASURES[row["name"]])
    at = f" at step {row['steps'][first]:,}" if row["steps"][first] is not None and len(row["best"]) < 2 else ""
    how = {"low": "lower is better", "high": "higher is better"}[row["better"]]
    if len(known) == 1:
        text = f"Only {ids[first]} has a value for {label}: {number}{at}."
    elif not row["best"]:
        text = f"All are equal in {label}: {number}."
    else:
        names = " and ".join(ids[index] for index in row["best"])
        leads = "share first place in" if len(row["best"]) > 1 else "leads in"
        text = f"{names} {leads} {label}: {number}{at} ({row['pick']}; {how})."
    unfinished = [state["id"] for index, state in enumerate(states) if index in known and state["state"] != "done"]
    text += f" Not finished: {', '.join(unfinished)}." if unfinished else ""
    return text + (f" Without a value: {', '.join(missing)}." if missing and len(known) != 1 else "")


def _other_objectives(settings: Sequence[dict[str, Any]], row: dict[str, Any] | None) -> str:
    """That losses of different objectives are no match; empty where that does not matter."""
    objectives = next((each for each in settings if each["name"] == "objective" and each["differs"]), None)
    if objectives is None or row is None or MEASURES[row["name"]].metric not in ("loss", "eval_loss"):
        return ""
    names = ", ".join(dict.fromkeys(str(value) for value in objectives["values"]))
    return f" But they train for different objectives ({names}), whose losses say nothing about each other."


def _verdict_over_seeds(groups: Sequence[dict[str, Any]], by: str | None) -> str:
    """Which group of seeds is the best beyond the spread; empty for fewer than two groups with a spread."""
    spreads = [(group["label"], group["values"][by]) for group in groups if by in group["values"]]
    if by is None or len(spreads) < 2:
        return ""
    best = beyond_spread([(spread["min"], spread["max"]) for _, spread in spreads], MEASURES[by].better)
    if best is None:
        return " Over seeds, none is the best beyond the spread."
    return f" Over seeds, {spreads[best][0]} is the best: every seed of it is better than every other run with seeds."


# -- spread over seeds -----------------------------------------------------------------------------------------------


def _groups(
    states: Sequence[dict[str, Any]], settings: Sequence[dict[str, Any]], measures: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    seeds = next((row["values"] for row in settings if row["name"] == "seed"), [None] * len(states))
    compared = [row for row in settings if row["differs"] and row["name"] not in _IDENTITY]
    members: dict[str, list[int]] = {}
    for index in range(len(states)):
        members.setdefault(_plain([row["values"][index] for row in compared]), []).append(index)
    groups = []
    for indices in members.values():
        if len({_plain(seeds[index]) for index in indices}) < 2:
            continue
        label = ", ".join(f"{row['name']} {row['values'][indices[0]]}" for row in compared)
        groups.append({
            "runs": [states[index]["id"] for index in indices], "seeds": [seeds[index] for index in indices],
            "label": label or "all settings alike",
            "unfinished": [states[index]["id"] for index in indices if states[index]["state"] != "done"],
            "values": {row["name"]: spread for row in measures if (spread := _spread(row, indices))},
        })  # fmt: skip
    return groups


def _spread(row: dict[str, Any], indices: Sequence[int]) -> dict[str, Any] | None:
    """Mean, range and sample standard deviation; None for fewer than two values."""
    known = [row["values"][index] for index in indices if row["values"][index] is not None]
    if len(known) < 2:
        return None
    std = statistics.stdev(known)
    return {"runs": len(known), "mean": statistics.fmean(known), "min": min(known), "max": max(known), "std": std}


# -- CSV -------------------------------------------------------------------------------------------------------------


def as_csv(comparison: dict[str, Any]) -> str:
    """The comparison as CSV: a row per run, with its measures, their steps, and all its settings.

    Text that a spreadsheet would run as a formula gets an apostrophe in front; a value that a run has not is empty.
    """
    measures, settings = comparison["measures"], comparison["settings"]
    columns: list[tuple[str, Sequence[Any]]] = []
    for row in measures:
        columns.append((f"{row['name']} ({row['unit']})" if row["unit"] else row["name"], row["values"]))
        if any(step is not None for step in row["steps"]):
            columns.append((f"{row['name']} at step", row["steps"]))
    columns += [(row["name"], row["values"]) for row in settings]
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(_cell(name) for name in ("run", "state", *(name for name, _ in columns)))
    for index, run in enumerate(comparison["runs"]):
        writer.writerow(_cell(value) for value in (run["id"], run["state"], *(cells[index] for _, cells in columns)))
    return text.getvalue()


def _cell(value: Any) -> Any:
    if value is None or (isinstance(value, int | float) and not isinstance(value, bool)):
        return value
    if isinstance(value, bool):
        return str(value).lower()
    text = value if isinstance(value, str) else _plain(value)
    return f"'{text}" if text.lstrip(" ").startswith(_FORMULA) else text
