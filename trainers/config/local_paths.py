"""Local paths in a config. Imports no torch."""

from __future__ import annotations

import os
from pathlib import Path

from trainers.config.objective_file import split_objective
from trainers.config.options import EMBEDDED, TrainConfig
from trainers.config.remote_data import absolute_url, is_url

INPUT_PATHS = (
    "model_name_or_path", "from_run", "teacher", "teacher_log_probs", "recorded_answers", "dataset_name", "mix",
    "eval_dataset_name", "chat_template", "reward_schema",
)  # fmt: skip
"""Options that may name a file or folder to read."""
OUTPUT_FOLDERS = ("cache_dir", "runs_dir", "output_dir", "resume_from_checkpoint")
"""Options that name a folder of runs, checkpoints or prepared data."""


def absolute_paths(config: TrainConfig) -> TrainConfig:
    """Returns the config with local paths made absolute, so that a saved config works from any folder."""
    names = [name for name in INPUT_PATHS if name != "from_run"]  # which may be the name of a run
    local = {name: value for name in names if (value := getattr(config, name)) and value != EMBEDDED}
    absolute = {name: str(Path(value).expanduser().absolute()) for name, value in local.items() if is_local(value)}
    absolute |= {name: absolute_url(value) for name, value in local.items() if is_url(value)}
    if parts := split_objective(config.objective):
        absolute["objective"] = f"{parts[0].absolute()}:{parts[1]}"
    rewards = [
        f"{parts[0].absolute()}:{parts[1]}" if (parts := split_objective(name)) else name
        for name in config.reward_funcs
    ]
    return config.model_copy(update={**absolute, "reward_funcs": rewards})


def is_local(value: str) -> bool:
    """Returns whether the value is a local path: it exists, or is a glob pattern."""
    if is_url(value):
        return False
    path = Path(os.path.expanduser(value))
    try:
        there = path.exists()
    except OSError:  # e.g. a name of 300 letters
        there = False
    return there or any(mark in value for mark in "*?[")
