"""The draft that the Train and the Data page share: what was filled in, kept by the browser while one moves about.

The browser's copy is as little to be trusted as any other value; what does not fit the form of today is left out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from app.services.fields import as_texts, names
from app.services.form import Choices
from app.services.starting_values import differences, starting_values
from trainers.config.options import ConfigError
from trainers.config.parse import preset_names

LONGEST = 400_000
"""Letters of a draft; all options at their longest are fewer."""
_DEVICES = 1024


def read_draft(text: object) -> Choices | None:
    """The choices of a draft, or None for none.

    Args:
        text: JSON as `tunesmithDraft` in `ui/static/draft.js` keeps it: `{preset, strategy, devices, options}`.
    """
    if not isinstance(text, str) or not 0 < len(text) <= LONGEST:
        return None
    try:
        draft = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(draft, dict):
        return None
    preset = draft.get("preset") if draft.get("preset") in preset_names() else None
    strategy = draft.get("strategy")
    return Choices(
        preset,
        _differences(draft.get("options"), preset),
        strategy if isinstance(strategy, str) and 0 < len(strategy) < 4096 else None,
        *_devices(draft.get("devices")),
    )


def _differences(options: Any, preset: str | None) -> dict[str, str]:
    texts: dict[str, str] = {}
    for name, value in options.items() if isinstance(options, dict) else ():
        if name in names() and name != "preset" and isinstance(value, str | bool):
            try:
                texts.update(as_texts({name: value}))
            except ConfigError:
                continue
    # A page that has no field for a preset's evaluation data says nothing of them when it names others to train on.
    start = starting_values(preset)
    return {name: text for name, text in differences(texts, preset).items() if text != start[name]}


def _devices(value: Any) -> tuple[tuple[int, ...], int | None]:
    """GPU ids, or a number of processes."""
    if isinstance(value, list):
        return tuple(int(item) for item in value[:_DEVICES] if _is_count(item)), None
    return (), int(value) if _is_count(value) else None


def _is_count(value: Any) -> bool:
    return isinstance(value, str) and value.isascii() and value.isdigit() and len(value) <= 4


def write_draft(choices: Choices) -> str:
    """The JSON of a draft."""
    devices: Any = [str(index) for index in choices.gpus] or str(choices.num_processes or "")
    return json.dumps({
        "preset": choices.preset or "", "strategy": choices.strategy or "", "devices": devices,
        "options": choices.values,
    })  # fmt: skip


def with_data(draft: Choices | None, preset: str | None, shown: Mapping[str, Any]) -> Choices:
    """A draft with the data options of the Data page; what else was changed by hand stays.

    Args:
        draft: the one so far; None for none.
        preset: the preset from now on; None keeps the draft's.
        shown: text or boolean by data option.

    Raises:
        ConfigError: for an unknown preset, or a value that is no text.
    """
    before = draft or Choices(preset)
    now = preset or before.preset
    others = {name: text for name, text in before.values.items() if name not in shown}
    return replace(before, preset=now, values={**others, **differences(shown, now)})
