"""Compares runs: settings that differ, final metrics, and the best run for each metric."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from app.runs.metrics import Curves
from app.runs.runs import config_values, gpu_ids, run_of_id, strategy_name, true_state, world_size
from trainers.config.mistakes import ConfigError
from trainers.run.folder import RunFolder

MAX_RUNS = 8
FINAL = {
    "loss": "low", "eval_loss": "low", "eval_perplexity": "low", "eval_token_accuracy": "high", "step": "",
    "tokens": "", "elapsed_s": "low", "tokens_per_second": "high", "mfu": "high", "memory_gib": "low",
}  # fmt: skip
"""Metrics to compare, and whether a low or a high value is better."""


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


def compare(runs: Sequence[RunFolder], curves: Curves) -> dict[str, Any]:
    """Settings and final metrics of several runs.

    Args:
        runs: at least one.
        curves: cache of their metrics.

    Returns:
        `runs`: `id` and `state` of each; `settings`: a row `{name, values, differs}` per option; `metrics`: a row
        `{name, values, best}` per metric that any run has; `best` is the index of the best run, None where all values
        are equal or no direction is better.
    """
    values = [_settings(run) for run in runs]
    names = list(dict.fromkeys(name for setting in values for name in setting))
    settings = []
    for name in names:
        row = [setting.get(name) for setting in values]
        settings.append({"name": name, "values": row, "differs": len({_plain(value) for value in row}) > 1})
    newest = [curves.latest(run, seconds=1.0) for run in runs]
    metrics = []
    for name, better in FINAL.items():
        numbers = [_number(latest.get(name)) for latest in newest]
        if any(number is not None for number in numbers):
            metrics.append({"name": name, "values": numbers, "best": _best(numbers, better)})
    states = [{"id": run.id, "state": str(true_state(run).get("state"))} for run in runs]
    return {"runs": states, "settings": settings, "metrics": metrics}


def _settings(run: RunFolder) -> dict[str, Any]:
    gpus = ", ".join(map(str, gpu_ids(run)))
    return {"strategy": strategy_name(run), "processes": world_size(run), "gpus": gpus, **config_values(run)}


def _plain(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)


def _number(value: Any) -> float | None:
    return value if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300 else None


def _best(numbers: Sequence[float | None], better: str) -> int | None:
    known = [number for number in numbers if number is not None]
    if not better or len(set(known)) < 2:
        return None
    return numbers.index(min(known) if better == "low" else max(known))
