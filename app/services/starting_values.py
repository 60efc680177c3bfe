"""What a form starts from: a preset's values, without those that describe its data once others are named."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from app.services.fields import as_texts, fields, text_of
from trainers.config.options import EMBEDDED, TrainConfig
from trainers.config.own_data import without_preset_data
from trainers.config.parse import preset_path, read_yaml
from trainers.config.validation import build

NAMING = ("dataset_name", "eval_dataset_name", "eval_share")
"""The options that decide which others describe data that are not used; each may go by those before it."""


@lru_cache(maxsize=256)
def base_config(preset: str | None) -> TrainConfig:
    """The config of a preset, or of the defaults on the model and data that ship.

    Raises:
        ConfigError: for an unknown preset.
    """
    if preset:
        return build({**_values(preset), "preset": preset})
    return build({"model_name_or_path": EMBEDDED, "dataset_name": EMBEDDED})


@lru_cache(maxsize=256)
def _values(preset: str) -> dict[str, Any]:
    return read_yaml(preset_path(preset))


def starting_values(preset: str | None, shown: Mapping[str, Any] | None = None) -> dict[str, str]:
    """Text of every option that a preset, or the default, gives; empty for what must be given.

    Args:
        preset: its name.
        shown: texts of the form, of which `NAMING` count; without them the data are the preset's.

    Raises:
        ConfigError: for an unknown preset, or a value that is no text.
    """
    start = {one.name: text_of(getattr(base_config(preset), one.name)) for one in fields()}
    if not preset:
        return start | {one.name: "" for one in fields() if one.default is None}
    _, gone = _named_data(preset, _texts(shown or {}))
    return start | {one.name: one.default or "" for one in fields() if one.name in gone}


def _named_data(preset: str, texts: Mapping[str, str]) -> tuple[dict[str, str], set[str]]:
    """Which of `NAMING` a form chose, and the preset's options that go with that."""
    values, base, chosen, gone = _values(preset), base_config(preset), dict[str, str](), set[str]()
    for name in NAMING:
        given = text_of(TrainConfig.model_fields[name].get_default() if name in gone else getattr(base, name))
        if texts.get(name, given) not in (given, ""):
            chosen[name] = texts[name]
            left, _ = without_preset_data(values, chosen, preset)
            gone = (values.keys() - left.keys()) | (gone & set(NAMING))
    return chosen, gone


def differences(shown: Mapping[str, Any], preset: str | None) -> dict[str, str]:
    """What a filled form says that its preset, or the default, does not.

    Args:
        shown: text or boolean by option; blanks around a text do not count.
        preset: its name.

    Raises:
        ConfigError: for an unknown preset, or a value that is no text.
    """
    return changed_texts(shown, starting_values(preset, shown))


def changed_texts(shown: Mapping[str, Any], start: Mapping[str, str]) -> dict[str, str]:
    """The fields whose text is another than at the start; a blank one means none where that is a value.

    Raises:
        ConfigError: for a value that is no text.
    """
    return {name: text for name, text in _texts(shown).items() if text != start.get(name)}


def _texts(shown: Mapping[str, Any]) -> dict[str, str]:
    blank = {one.name: "none" if one.optional else "" for one in fields()}
    return {name: text.strip() or blank.get(name, "") for name, text in as_texts(dict(shown)).items()}


def follow_data(preset: str | None, before: Mapping[str, Any], shown: Mapping[str, Any]) -> dict[str, str]:
    """New texts of the fields that still show what the form started from, now that it names other data.

    Args:
        preset: its name.
        before: what the form named before, by `NAMING`.
        shown: text or boolean by option, as the form is filled.

    Raises:
        ConfigError: for an unknown preset, or a value that is no text.
    """
    texts, old_texts = _texts(shown), _texts(before)
    chosen = _named_data(preset, old_texts)[0] if preset else {}
    named = {name: texts[name] for name in NAMING if name in texts}
    named = {name: text for name, text in named.items() if name in chosen or text != old_texts.get(name)}
    old, new = starting_values(preset, before), starting_values(preset, named)
    return {name: new[name] for name, text in texts.items() if text == old.get(name) != new.get(name)}
