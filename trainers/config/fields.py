"""The options of `TrainConfig` as shown in forms and help, and the text form of their values. Imports no torch."""

from __future__ import annotations

import types
import typing
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from trainers.config.labels import CHOICES, LABELS
from trainers.config.options import TrainConfig

Kind = Literal["choice", "bool", "int", "float", "text", "list", "map"]
TITLES = {
    "model": "Model", "method": "Method", "objective": "Objective", "data": "Data", "batch": "Batch",
    "optimizer": "Optimizer", "precision": "Precision and memory", "ddp": "Data parallel", "pipeline": "Pipeline",
    "evaluation": "Evaluation", "run": "Run",
}  # fmt: skip
_KINDS: dict[Any, Kind] = {bool: "bool", int: "int", float: "float", list: "list", dict: "map"}
_SIGNS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below", "max_length": "letters at most"}
_NO_LIMIT = 10**9
"""Upper bounds from here on are only safety limits, and are not shown."""


def sections() -> dict[str, dict[str, Any]]:
    """Groups the options by section, in the order of `TrainConfig`: `{section: {name: FieldInfo}}`."""
    grouped: dict[str, dict[str, Any]] = {}
    for name, field in TrainConfig.model_fields.items():
        extra: Any = field.json_schema_extra
        grouped.setdefault(extra["section"], {})[name] = field
    return grouped


@dataclass(frozen=True)
class OptionField:
    """One option, as shown in a form or in help.

    Args:
        name: Name on the command line and in YAML.
        label: Name in words, for forms.
        section: Group that it belongs to, a key of `TITLES`.
        kind: Type of the value.
        optional: Whether `none` is a valid value.
        choices: Values of a `choice`, including `none` if it is valid.
        limits: Unit and range in words, such as `steps, at least 1`; may be empty.
        unit: Unit, such as `tokens`; empty for plain numbers.
        default: Default as text; None if the option is required.
        help: One sentence.
    """

    name: str
    label: str
    section: str
    kind: Kind
    optional: bool
    choices: tuple[str, ...]
    limits: str
    unit: str
    default: str | None
    help: str


@cache
def fields() -> tuple[OptionField, ...]:
    """Returns every option except `preset`, in the order of `TrainConfig`."""
    return tuple(
        _field(section, name, info)
        for section, options in sections().items()
        for name, info in options.items()
        if name != "preset"
    )


def choice_labels(option: OptionField) -> list[tuple[str, str]]:
    """Returns label and value of each choice of an option."""
    return [(CHOICES.get(option.name, {}).get(choice, choice), choice) for choice in option.choices]


def _field(section: str, name: str, info: Any) -> OptionField:
    kind, optional, choices = _kind(info.annotation)
    if info.json_schema_extra["choices"]:
        kind, choices = "choice", info.json_schema_extra["choices"]
    unit = info.json_schema_extra["unit"]
    bounds = [(sign, getattr(rule, sign, None)) for rule in info.metadata for sign in _SIGNS]
    limits = [f"{_SIGNS[sign]} {bound}" for sign, bound in bounds if bound is not None and bound < _NO_LIMIT]
    return OptionField(
        name, LABELS.get(name, name), section, kind, optional, choices,
        ", ".join([*([unit] if unit else []), *limits]), unit,
        None if info.is_required() else text_of(info.get_default()), str(info.description),
    )  # fmt: skip


def _kind(annotation: Any) -> tuple[Kind, bool, tuple[str, ...]]:
    """Returns the kind of an annotation, whether it allows None, and its choices."""
    origin = typing.get_origin(annotation)
    if origin is typing.Annotated:
        return _kind(typing.get_args(annotation)[0])
    if origin in (typing.Union, types.UnionType):
        kind, _, choices = _kind(next(part for part in typing.get_args(annotation) if part is not type(None)))
        return kind, True, ("none", *choices) if choices else ()
    if origin is Literal:
        return "choice", False, tuple(typing.get_args(annotation))
    return _KINDS.get(origin or annotation, "text"), False, ()


def text_of(value: Any) -> str:
    """Formats a value as it is written on the command line."""
    if value is None or isinstance(value, bool):
        return {None: "none", True: "true", False: "false"}[value]
    if isinstance(value, dict):
        value = [f"{key}={entry}" for key, entry in value.items()]
    if isinstance(value, float):
        return str(value).removesuffix(".0")
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
