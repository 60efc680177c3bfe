"""Drops the options of a preset that describe its data when the user supplies other data. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_EVALUATION = ("eval_dataset_name", "eval_split", "max_eval_samples")
_DATA = ("dataset_query", "dataset_config_name", "dataset_split", "dataset_format", "columns", "sample_by",
         "max_train_samples", "eval_share", *_EVALUATION)  # fmt: skip
_WHEN = ("eval_steps", "eval_on_start", "eval_generate_steps")
"""When to evaluate; meaningless without evaluation data."""
DESCRIBING = ("dataset_name", *_DATA, *_WHEN)
"""All options that may be dropped."""


def without_preset_data(
    preset: Mapping[str, Any], chosen: Mapping[str, Any], name: str
) -> tuple[dict[str, Any], list[str]]:
    """Removes the values of a preset that describe data which the run does not use.

    Args:
        preset: Values of the preset.
        chosen: Values given by the user, which override the preset's.
        name: Name of the preset.

    Returns:
        The remaining values, and a line that lists what was removed (no line if nothing was).
    """
    # Other training data replaces all data options; other evaluation data only those of evaluation.
    own = ["mix"] if _set(chosen, "mix") and str(chosen["mix"]) != str(preset.get("mix")) else []
    own += [key for key in ("dataset_name", "eval_dataset_name") if _replaced(preset, chosen, key)]
    if not own:
        return dict(preset), []
    described = _EVALUATION if own == ["eval_dataset_name"] else _DATA
    described = ("dataset_name", *described) if "mix" in own else described
    described = ("mix", *described) if "dataset_name" in own else described
    gone = [key for key in described if key in preset and key not in chosen]
    left = {key: value for key, value in preset.items() if key not in gone}
    evaluates = any(_set({**left, **chosen}, key) for key in ("eval_dataset_name", "eval_share"))
    if not evaluates:
        gone += [key for key in _WHEN if key in left and key not in chosen]
        left = {key: value for key, value in left.items() if key not in gone}
    if not gone or (own == ["eval_dataset_name"] and not evaluates):  # the user wants no evaluation
        return left, []
    hint = "; --eval_share 0.05 holds rows out for evaluation" if "eval_dataset_name" in gone and not evaluates else ""
    return left, [f"{own[0]}={chosen[own[0]]} instead of preset {name}'s: its {', '.join(gone)} left out{hint}"]


def _replaced(preset: Mapping[str, Any], chosen: Mapping[str, Any], key: str) -> bool:
    if key == "dataset_name" and _set(preset, "mix") and _set(chosen, key):
        return True
    return key in preset and key in chosen and str(chosen[key]) != str(preset[key])


def _set(values: Mapping[str, Any], key: str) -> bool:
    return str(values.get(key, "none")).lower() not in ("", "none", "null", "0", "0.0")
