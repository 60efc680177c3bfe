"""Presets that leave an option to the user."""

from __future__ import annotations

from trainers.config.objectives import OBJECTIVES
from trainers.config.presets import find_preset


def left_to_the_user(preset: str) -> dict[str, str]:
    """A value for each option without which a preset does not start."""
    objective = find_preset(preset).options.get("objective", "sft")
    return {"teacher": "embedded"} if OBJECTIVES[objective].teacher else {}
