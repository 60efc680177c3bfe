"""Every option of `TrainConfig` as a form or a help shows it, and the text that stands for a value. No torch."""

from __future__ import annotations

import types
import typing
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from trainers.config.options import sections

Kind = Literal["choice", "bool", "int", "float", "text", "list", "map"]
TITLES = {
    "model": "Model", "method": "Method", "data": "Data", "batch": "Batch", "optimizer": "Optimizer",
    "precision": "Precision and memory", "ddp": "Data parallel", "pipeline": "Pipeline",
    "evaluation": "Evaluation", "run": "Run",
}  # fmt: skip
_KINDS: dict[Any, Kind] = {bool: "bool", int: "int", float: "float", list: "list", dict: "map"}
_SIGNS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below", "max_length": "letters at most"}
_NO_LIMIT = 10**9
"""From here on a bound guards the machine, and tells nobody anything."""


@dataclass(frozen=True)
class OptionField:
    """One option, as a form or a help shows it.

    Args:
        name: the option's name on the command line and in YAML.
        section: the group it belongs to, a key of `TITLES`.
        kind: what its value is.
        optional: whether `none` is a value.
        choices: the values of a `choice`, `none` among them where that is one.
        limits: unit and range in words, such as `steps, at least 1`; empty without any.
        unit: e.g. `tokens`; empty for plain numbers.
        default: the default as text; None when the option must be given.
        help: one sentence.
    """

    name: str
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
    """Every option but `preset`, in the order of `TrainConfig`."""
    return tuple(
        _field(section, name, info)
        for section, options in sections().items()
        for name, info in options.items()
        if name != "preset"
    )


def _field(section: str, name: str, info: Any) -> OptionField:
    kind, optional, choices = _kind(info.annotation)
    unit = info.json_schema_extra["unit"]
    bounds = [(sign, getattr(rule, sign, None)) for rule in info.metadata for sign in _SIGNS]
    limits = [f"{_SIGNS[sign]} {bound}" for sign, bound in bounds if bound is not None and bound < _NO_LIMIT]
    return OptionField(
        name, section, kind, optional, choices, ", ".join([*([unit] if unit else []), *limits]), unit,
        None if info.is_required() else text_of(info.get_default()), str(info.description),
    )  # fmt: skip


def _kind(annotation: Any) -> tuple[Kind, bool, tuple[str, ...]]:
    """Kind, whether it may be None, and choices of an annotation."""
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
    """A value as it is written after its option on the command line."""
    if value is None or isinstance(value, bool):
        return {None: "none", True: "true", False: "false"}[value]
    if isinstance(value, dict):
        value = [f"{key}={entry}" for key, entry in value.items()]
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
