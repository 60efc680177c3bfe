"""Generates the table of all options from `TrainConfig`: `python -m app.reference > docs/OPTIONS.md`."""

from __future__ import annotations

from typing import Any, get_args

from trainers.config.fields import text_of
from trainers.config.options import sections


def options_table() -> str:
    """The options as Markdown: a table per section, and a row per option with default, values or unit, and help."""
    parts = ["# Options", "", "Made by `python -m app.reference`; a test keeps it current.", ""]
    for section, fields in sections().items():
        parts += [f"## {section.capitalize()}", "", "| option | default | values | what |", "|---|---|---|---|"]
        parts += [_row(name, field) for name, field in fields.items()] + [""]
    return "\n".join(parts).rstrip() + "\n"


def _row(name: str, field: Any) -> str:
    default = "required" if field.is_required() else f"`{text_of(field.get_default()) or 'none'}`"
    return f"| `{name}` | {default} | {_values(field)} | {field.description} |"


def _values(field: Any) -> str:
    """The allowed values of a choice, otherwise the range and the unit."""
    choices = [word for word in get_args(field.annotation) if isinstance(word, str)]
    if choices:
        return ", ".join(f"`{word}`" for word in choices)
    signs = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
    bounds = [f"{signs[key]} {getattr(rule, key)}" for rule in field.metadata for key in signs if hasattr(rule, key)]
    return " ".join([", ".join(bounds), field.json_schema_extra["unit"]]).strip()


if __name__ == "__main__":
    print(options_table(), end="")
