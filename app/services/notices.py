"""How the runs that a browser watches have ended."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from app.console import clean, shortened
from app.diagnosis.advice import diagnose
from app.runs.runs import run_of_id, true_state
from trainers.config.mistakes import ConfigError
from trainers.run.folder import END_STATES, RunFolder

MOST_RUNS = 100
"""Most runs that one request may ask about."""
_MOST_CHARS = 300
"""Most characters of a cause."""


def run_ends(request: Mapping[str, Any], runs_dir: Path) -> dict[str, Any]:
    """How those of the given runs that are over have ended.

    Args:
        request: untrusted; `runs` holds the ids, separated by line ends.
        runs_dir: folder of run folders.

    Returns:
        `ended`: a row `{id, state, cause}` for each run that is not live; `state` is empty if there is no such run.

    Raises:
        ConfigError: unless `runs` is a text of at most `MOST_RUNS` ids.
    """
    text = request.get("runs")
    if not isinstance(text, str):
        raise ConfigError("runs is not a text; give the ids of runs, one per line")
    ids = text.split("\n", MOST_RUNS)
    if len(ids) > MOST_RUNS:
        raise ConfigError(f"runs has more than {MOST_RUNS} lines; ask about at most {MOST_RUNS} runs at a time")
    return {"ended": [row for run_id in dict.fromkeys(ids) if (row := _end_of(run_id, runs_dir))]}


def _end_of(run_id: str, runs_dir: Path) -> dict[str, str] | None:
    """The row of a run; None while it is live."""
    try:
        run = run_of_id(run_id, runs_dir)
    except ConfigError:
        return {"id": run_id, "state": "", "cause": ""}
    state = true_state(run)
    if state["state"] not in END_STATES:
        return None
    return {"id": run_id, "state": state["state"], "cause": _cause(run, state)}


def _cause(run: RunFolder, state: Mapping[str, Any]) -> str:
    """Why it failed or stopped, in a sentence."""
    from app.runs.metrics import Curves  # imports numpy

    diagnoses = diagnose(run, Curves()) if state["state"] == "failed" else []
    text = diagnoses[0].cause if diagnoses else state.get("cause")
    return shortened(clean(str(text)), _MOST_CHARS) if text else ""
