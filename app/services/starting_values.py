"""Initial values of a form: those of a preset, except options that describe its own data once other data is chosen."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from app.services.fields import as_texts
from trainers.config.fields import fields, text_of
from trainers.config.options import EMBEDDED, TrainConfig
from trainers.config.own_data import without_preset_data
from trainers.config.presets import find_preset

NAMING = ("dataset_name", "mix", "eval_dataset_name", "eval_share")
"""Options that choose data; changing one drops the preset's options about its own data, including later ones here."""


@lru_cache(maxsize=256)
def base_config(preset: str | None) -> TrainConfig:
    """The config of a preset, which may lack a teacher; without one, the defaults with the embedded model and no data.

    Raises:
        ConfigError: for an unknown preset.
    """
    if preset:
        entry = find_preset(preset)
        return TrainConfig.model_validate({**entry.options, "preset": entry.name})
    return TrainConfig.model_validate({"model_name_or_path": EMBEDDED})


def starting_values(preset: str | None, form_values: Mapping[str, Any] | None = None) -> dict[str, str]:
    """Text of every option from a preset, or from the defaults; empty for required options.

    Args:
        preset: its name.
        form_values: values of the form; only `NAMING` matters, and without them the data is the preset's.

    Raises:
        ConfigError: for an unknown preset, or a value that is not text.
    """
    start = {option.name: text_of(getattr(base_config(preset), option.name)) for option in fields()}
    if not preset:
        return start | {option.name: "" for option in fields() if option.default is None}
    _, dropped = _choose_data(preset, _texts(form_values or {}))
    return start | {option.name: option.default or "" for option in fields() if option.name in dropped}


def _choose_data(preset: str, texts: Mapping[str, str]) -> tuple[dict[str, str], set[str]]:
    """The options of `NAMING` that a form changed, and the preset's options that this drops."""
    values, base, chosen, dropped = find_preset(preset).options, base_config(preset), dict[str, str](), set[str]()
    for name in NAMING:
        preset_text = text_of(TrainConfig.model_fields[name].get_default() if name in dropped else getattr(base, name))
        if texts.get(name, preset_text) not in (preset_text, ""):
            chosen[name] = texts[name]
            remaining, _ = without_preset_data(values, chosen, preset)
            dropped = (values.keys() - remaining.keys()) | (dropped & set(NAMING))
    return chosen, dropped


def differences(form_values: Mapping[str, Any], preset: str | None) -> dict[str, str]:
    """The values of a form that differ from its preset, or from the defaults.

    Args:
        form_values: text or boolean by option; surrounding blanks are ignored.
        preset: its name.

    Raises:
        ConfigError: for an unknown preset, or a value that is not text.
    """
    return changed_texts(form_values, starting_values(preset, form_values))


def changed_texts(form_values: Mapping[str, Any], start: Mapping[str, str]) -> dict[str, str]:
    """The fields whose text differs from the start; blank means `none` for an optional field.

    Raises:
        ConfigError: for a value that is not text.
    """
    return {name: text for name, text in _texts(form_values).items() if text != start.get(name)}


def _texts(form_values: Mapping[str, Any]) -> dict[str, str]:
    blank = {option.name: "none" if option.optional else "" for option in fields()}
    return {name: text.strip() or blank.get(name, "") for name, text in as_texts(dict(form_values)).items()}


def follow_data(preset: str | None, before: Mapping[str, Any], form_values: Mapping[str, Any]) -> dict[str, str]:
    """New texts for unchanged fields after the form chose other data.

    Args:
        preset: its name.
        before: the previous values of `NAMING`.
        form_values: text or boolean by option, as filled in.

    Raises:
        ConfigError: for an unknown preset, or a value that is not text.
    """
    texts, old_texts = _texts(form_values), _texts(before)
    chosen = _choose_data(preset, old_texts)[0] if preset else {}
    chosen_now = {name: texts[name] for name in NAMING if name in texts}
    chosen_now = {name: text for name, text in chosen_now.items() if name in chosen or text != old_texts.get(name)}
    old, new = starting_values(preset, before), starting_values(preset, chosen_now)
    return {name: new[name] for name, text in texts.items() if text == old.get(name) != new.get(name)}
