"""What the address of the Train page asks the form to hold. Anyone can write one, so it gives ids, never paths."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from app.runs.runs import run_of_id
from app.services.fields import as_texts
from app.services.form import Choices, from_run
from trainers.config.presets import find_preset, preset_names
from trainers.config.yaml_file import read_yaml


def choices_of(query: Mapping[str, str], runs_dir: Path) -> Choices | None:
    """The choices of `?clone=RUN`, `?from_run=RUN` or `?preset=NAME`; None without one of them.

    A clone is like the run in every option. A run that starts from the result of another one has the same preset and
    method, and nothing else that was chosen there.

    Args:
        query: the values of the address.
        runs_dir: folder of run folders.

    Raises:
        ConfigError: when there is no such run or preset, or the config or strategy of the run cannot be read.
    """
    if query.get("clone"):
        return from_run(run_of_id(query["clone"], runs_dir))
    if query.get("from_run"):
        run = run_of_id(query["from_run"], runs_dir)
        options = read_yaml(run.config)
        name = str(options.get("preset") or "")
        values = {"from_run": run.id, **as_texts({"method": options.get("method", "full")})}
        return Choices(name if name in preset_names() else None, values)
    return Choices(find_preset(query["preset"]).name) if query.get("preset") else None
