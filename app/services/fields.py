"""The options of `TrainConfig` as fields of a form, and the text that stands for each value on a command line."""

from __future__ import annotations

import types
import typing
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from trainers.config.options import ConfigError, TrainConfig, sections

Kind = Literal["choice", "bool", "int", "float", "text", "list", "map"]
TITLES = {
    "model": "Model", "method": "Method", "data": "Data", "batch": "Batch", "optimizer": "Optimizer",
    "precision": "Precision and memory", "ddp": "Data parallel", "pipeline": "Pipeline",
    "evaluation": "Evaluation", "run": "Run",
}  # fmt: skip
COMMON = (
    "learning_rate", "num_train_epochs", "max_steps", "global_batch_size", "per_device_train_batch_size", "max_length",
    "mixed_precision", "save_steps", "run_name", "packing", "gradient_checkpointing", "method", "lora_r", "lora_alpha",
    "model_name_or_path", "dataset_name", "eval_dataset_name", "eval_share",
)  # fmt: skip
LONGEST_TEXT = 4096
_KINDS: dict[Any, Kind] = {bool: "bool", int: "int", float: "float", list: "list", dict: "map"}
_SIGNS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below", "max_length": "letters at most"}
_NO_LIMIT = 10**9
"""From here on a bound guards the machine, and tells nobody anything."""


@dataclass(frozen=True)
class FormField:
    """One option, as a form shows it.

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
        common: whether it belongs in sight.
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
    common: bool


@cache
def fields() -> tuple[FormField, ...]:
    """Every option but `preset`, in the order of `TrainConfig`."""
    return tuple(
        _field(section, name, info)
        for section, options in sections().items()
        for name, info in options.items()
        if name != "preset"
    )


def _field(section: str, name: str, info: Any) -> FormField:
    kind, optional, choices = _kind(info.annotation)
    unit = info.json_schema_extra["unit"]
    bounds = [(sign, getattr(rule, sign, None)) for rule in info.metadata for sign in _SIGNS]
    told = [f"{_SIGNS[sign]} {bound}" for sign, bound in bounds if bound is not None and bound < _NO_LIMIT]
    return FormField(
        name, section, kind, optional, choices, ", ".join([*([unit] if unit else []), *told]), unit,
        None if info.is_required() else text_of(info.get_default()), str(info.description), name in COMMON,
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


def as_texts(values: dict[str, Any]) -> dict[str, str]:
    """Values of a form or of a script, as texts.

    Raises:
        ConfigError: for what is neither text, number nor boolean (nor a list or mapping of texts), and for texts that
            are too long or that no file could hold.
    """
    texts, mistakes = {}, []
    for name, value in values.items():
        problem = _problem(value)
        if not isinstance(name, str) or len(name) > 100 or not name.isprintable():
            mistakes.append("an option's name is no name; `tunesmith train --help` lists all options")
        elif problem:
            mistakes.append(f"{name} {problem}")
        else:
            texts[name] = text_of(value)
    if mistakes:
        raise ConfigError(mistakes)
    return texts


def _problem(value: Any) -> str | None:
    entries = [*value, *value.values()] if isinstance(value, dict) else value if isinstance(value, list) else [value]
    if not all(entry is None or isinstance(entry, str | bool | int | float) for entry in entries):
        return f"holds a {type(value).__name__} of other things than texts; write it as on the command line"
    if value is not None and isinstance(value, list | dict) and any("," in str(entry) for entry in entries):
        return "holds a comma inside a name, which only a YAML file can say; use `tunesmith train --config FILE`"
    if isinstance(value, dict) and any("=" in str(key) for key in value):
        return "holds = inside a name, which only a YAML file can say; use `tunesmith train --config FILE`"
    try:
        size = len(text_of(value).encode())
    except UnicodeEncodeError:
        return "holds letters that are half a character; write it again"
    except ValueError:  # whole numbers of thousands of digits have no text
        return "holds a number of too many digits; write a smaller one"
    return f"is too long ({size} bytes, at most {LONGEST_TEXT}); shorten it" if size > LONGEST_TEXT else None


def names() -> frozenset[str]:
    """Names of all options, `preset` among them."""
    return frozenset(TrainConfig.model_fields)
