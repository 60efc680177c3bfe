"""The draft shared by the Train and Data pages: the form's values, kept by the browser between pages.

The browser's copy is untrusted input; values that do not fit the current form are dropped.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from app.services.fields import as_texts, names
from app.services.form import Choices
from app.services.machines_form import MACHINES_FIELDS
from app.services.slurm_form import SLURM_FIELDS
from app.services.starting_values import changed_texts, differences, starting_values
from trainers.config.mistakes import ConfigError
from trainers.config.presets import find_preset, preset_names

MAX_LENGTH = 400_000
"""Characters of a draft; all options at their longest take fewer."""
_MAX_DEVICES = 1024
_MAX_JOB_TEXT = 1000


def read_draft(text: object, run_texts: Mapping[str, str] | None = None) -> Choices | None:
    """Parses a draft; None if the text is not one.

    Args:
        text: JSON as kept by `tunesmithDraft` in `ui/static/draft.js`: `{preset, strategy, devices, options, job}`.
        run_texts: initial texts of the form that resumes a run, by option; None if the form starts from a preset.
    """
    if not isinstance(text, str) or not 0 < len(text) <= MAX_LENGTH:
        return None
    try:
        draft = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(draft, dict):
        return None
    options = draft["options"] if isinstance(draft.get("options"), dict) else {}
    known = draft.get("preset") in preset_names()
    preset = find_preset(draft["preset"], options.get("method")).name if known else None
    strategy = draft.get("strategy")
    texts = _texts(options)
    return Choices(
        preset,
        _differences(texts, preset) if run_texts is None else changed_texts(texts, run_texts),
        strategy if isinstance(strategy, str) and 0 < len(strategy) < 4096 else None,
        *_devices(draft.get("devices")),
        _job(draft.get("job")),
    )


def _job(values: Any) -> dict[str, str]:
    """Where the run trains, and the options of SLURM's job or of several machines."""
    texts = values if isinstance(values, dict) else {}
    return {
        name: text
        for name in ("on", *SLURM_FIELDS, *MACHINES_FIELDS)
        if isinstance(text := texts.get(name), str) and len(text) <= _MAX_JOB_TEXT
    }


def _texts(options: Mapping[str, Any]) -> dict[str, str]:
    texts: dict[str, str] = {}
    for name, value in options.items():
        if name in names() and name != "preset" and isinstance(value, str | bool):
            try:
                texts.update(as_texts({name: value}))
            except ConfigError:
                continue
    return texts


def _differences(texts: Mapping[str, str], preset: str | None) -> dict[str, str]:
    # A page without fields for the evaluation data keeps the preset's when it chooses other training data.
    start = starting_values(preset)
    return {name: text for name, text in differences(texts, preset).items() if text != start[name]}


def _devices(value: Any) -> tuple[tuple[int, ...], int | None]:
    """GPU ids, or a number of processes."""
    if isinstance(value, list):
        return tuple(int(item) for item in value[:_MAX_DEVICES] if _is_count(item)), None
    return (), int(value) if _is_count(value) else None


def _is_count(value: Any) -> bool:
    return isinstance(value, str) and value.isascii() and value.isdigit() and len(value) <= 4


def write_draft(choices: Choices) -> str:
    """The JSON of a draft."""
    devices: Any = [str(index) for index in choices.gpus] or str(choices.num_processes or "")
    return json.dumps({
        "preset": choices.preset or "", "strategy": choices.strategy or "", "devices": devices,
        "options": choices.values, "job": choices.job,
    })  # fmt: skip


def with_data(draft: Choices | None, preset: str | None, form_values: Mapping[str, Any]) -> Choices:
    """Updates a draft with the data options of the Data page; keeps its other changes.

    Args:
        draft: the current draft; None for none.
        preset: the new preset; None keeps the draft's.
        form_values: text or boolean by data option.

    Raises:
        ConfigError: for an unknown preset, or a value that is not text.
    """
    current = draft or Choices(preset)
    new_preset = preset or current.preset
    others = {name: text for name, text in current.values.items() if name not in form_values}
    return replace(current, preset=new_preset, values={**others, **differences(form_values, new_preset)})
