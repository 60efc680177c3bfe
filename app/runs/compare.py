"""Several runs side by side: what differs in their settings, how they ended, and their curves on one axis."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from app.runs.runs import config_values, gpu_ids, run_of_id, strategy_name, true_state, world_size
from app.runs.metrics import Curves
from trainers.config.options import ConfigError
from trainers.run.folder import RunFolder

MOST_RUNS = 8
FINAL = {
    "loss": "low", "eval_loss": "low", "eval_perplexity": "low", "eval_token_accuracy": "high", "step": "",
    "tokens": "", "elapsed_s": "low", "tokens_per_second": "high", "mfu": "high", "memory_gib": "low",
}  # fmt: skip
"""Metrics that are set side by side, and which end of each is the better one."""


def chosen_runs(names: Any, runs_dir: Path) -> tuple[list[RunFolder], list[str]]:
    """The runs of comma-separated ids, each once, and a line for each that cannot be shown.

    Args:
        names: whatever a stranger sent.
        runs_dir: folder of run folders.
    """
    text = names if isinstance(names, str) else ""
    wanted = list(dict.fromkeys(name for name in text[:4000].split(",") if name))
    runs, refused = [], []
    for name in wanted[:MOST_RUNS]:
        try:
            runs.append(run_of_id(name, runs_dir))
        except ConfigError as error:
            refused += error.mistakes
    if len(wanted) > MOST_RUNS:
        refused.append(f"{len(wanted)} runs were named; at most {MOST_RUNS} are compared, the first ones")
    return runs, refused


def compare(runs: Sequence[RunFolder], curves: Curves) -> dict[str, Any]:
    """Settings and final metrics.

    Args:
        runs: at least one.
        curves: keeps what was read of their metrics.

    Returns:
        `runs`: `id` and `state` of each; `settings`: a row `{name, values, differs}` per option; `metrics`: a row
        `{name, values, best}` per metric that any run has, `best` being the index of the best run, or None where all
        are alike or none is better.
    """
    values = [_settings(run) for run in runs]
    names = list(dict.fromkeys(name for one in values for name in one))
    settings = []
    for name in names:
        row = [one.get(name) for one in values]
        settings.append({"name": name, "values": row, "differs": len({_plain(value) for value in row}) > 1})
    newest = [curves.latest(run, patience=1.0) for run in runs]
    metrics = []
    for name, better in FINAL.items():
        numbers = [_number(one.get(name)) for one in newest]
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
