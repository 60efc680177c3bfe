"""Base classes for pydantic models of Accelerate and DeepSpeed files. Imports no torch.

A key states which values it takes, and why others are refused or ignored. Accelerate and DeepSpeed silently ignore many
keys and then train something else; here each of these is an error or a warning.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import islice
from operator import not_
from typing import Annotated, Any, ClassVar, TypeVar, get_args

from annotated_types import Predicate
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, PydanticCustomError

from trainers.config.mistakes import ConfigError, Mistake

MAX_PROCESSES = 65_536
"""More than any cluster has; a larger number is a typo, and loops over processes would never end."""
_MAX_MISTAKES = 100  # reported for a file with thousands of unknown keys
_MAX_SHOWN = 200


@dataclass(frozen=True)
class Refused:
    """Why a key is refused, or any of its values that does not match its type.

    Args:
        problem: The reason.
        remedy: How to fix it.
    """

    problem: str
    remedy: str = "remove it"


@dataclass(frozen=True)
class Ignored:
    """Why a value that matches a key's type has no effect.

    Args:
        reason: The reason, and how to fix it.
        applies: Whether to warn about a value.
    """

    reason: str
    applies: Callable[[Any], bool] = bool


def key(*notes: Refused | Ignored) -> Any:
    """Declares an optional key, with notes on its values for the user."""
    extra: dict[str, Any] = {"notes": notes}
    return Field(default=None, json_schema_extra=extra)


def notes_of(field: FieldInfo) -> tuple[Refused | Ignored, ...]:
    """Returns the notes on a key's values."""
    extra: Any = field.json_schema_extra or {}
    return tuple(extra.get("notes", ()))


def shortened(text: str) -> str:
    """Shortens a text to one line of bounded length, for messages."""
    text = text if text.isprintable() else repr(text[:_MAX_SHOWN])
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}…"


def is_empty(value: Any) -> bool:
    """Whether a section or list is empty, as many are in files written by `accelerate config`."""
    return value in ({}, [])


def is_off(value: Any) -> bool:
    """Whether a section is empty, or has `enabled: false`."""
    return is_empty(value) or (isinstance(value, dict) and value.get("enabled") is False)


def _never(value: Any) -> bool:
    return False


# `Literal[1]` would also accept true and 1.0, so `Literal` is only used for text.
Absent = Annotated[Any, Predicate(_never)]
Empty = Annotated[Any, Predicate(is_empty)]
Off = Annotated[Any, Predicate(is_off)]
OnlyFalse = Annotated[bool, Predicate(not_)]
OnlyTrue = Annotated[bool, Predicate(bool)]
Processes = Annotated[int, Field(ge=0, le=MAX_PROCESSES)]


class Section(BaseModel):
    """Model of a mapping; unknown keys, keys without a value and values of another type are mistakes."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    owner: ClassVar[str] = "Accelerate"

    @field_validator("*", mode="before")
    @classmethod
    def _not_none(cls, value: Any) -> Any:
        if value is None:
            raise PydanticCustomError("empty", "no value")
        return value

    @classmethod
    def explain_unknown(cls, name: str) -> tuple[str, str]:
        """Returns problem and remedy for a key that the section does not have."""
        longer = [key for key in cls.model_fields if key.endswith(f"_{name}")]
        if len(longer) == 1:
            return f": the {cls.owner} key has a prefix", f"write {longer[0]}"
        near = difflib.get_close_matches(name, cls.model_fields, n=1, cutoff=0.6)
        return f": unknown {cls.owner} key {shortened(name)}", f"did you mean {near[0]}?" if near else "remove the line"


SectionT = TypeVar("SectionT", bound=Section)


def parse(model: type[SectionT], values: Mapping[str, Any], where: str = "", source: str = "") -> SectionT:
    """Validates a mapping.

    At the top level of a file (`where` is empty), known keys without a value are ignored.

    Args:
        model: Model of the mapping.
        values: The parsed mapping.
        where: Dotted path of the mapping, which prefixes the option of each mistake.
        source: Source named in the mistakes.

    Raises:
        ConfigError: Lists a mistake for each invalid key, at any depth.
    """
    present = {
        name: value for name, value in values.items() if where or value is not None or name not in model.model_fields
    }
    try:
        return model.model_validate(present)
    except ValidationError as error:
        by_key: dict[str, tuple[type[Section], str, list[ErrorDetails]]] = {}
        for detail in error.errors(include_url=False):  # one error per member of a union
            section, keys = _locate(model, detail["loc"])
            option = shortened(".".join(filter(None, (where, *keys))))
            by_key.setdefault(option, (section, keys[-1], []))[2].append(detail)
        first = islice(by_key.items(), _MAX_MISTAKES)
        raise ConfigError([_mistake(option, *about) for option, about in first], source) from None


def nested_section(field: FieldInfo) -> type[Section] | None:
    """Returns the model of a key whose value is a mapping; None for other keys."""
    kinds = (field.annotation, *get_args(field.annotation))
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Section)), None)


def ignored_keys(model: type[Section], values: Mapping[str, Any], where: str = "") -> list[tuple[str, str]]:
    """Returns the dotted path of each value that has no effect, and why.

    Args:
        model: Model of the mapping.
        values: A valid mapping.
        where: Dotted path of the mapping; empty at the top level.
    """
    ignored = []
    for name, value in values.items():
        field = model.model_fields.get(name)
        if field is None or value is None:
            continue
        path = f"{where}.{name}" if where else name
        reasons = [note.reason for note in notes_of(field) if isinstance(note, Ignored) and note.applies(value)]
        ignored += [(path, reason) for reason in reasons]
        if not reasons and (nested := nested_section(field)):
            ignored += ignored_keys(nested, value, path)
    return ignored


def _locate(model: type[Section], loc: tuple[int | str, ...]) -> tuple[type[Section], list[str]]:
    """Returns the section that contains an error and the path of keys to it, without pydantic's entries for unions."""
    keys: list[str] = []
    section = inner = model
    for name in map(str, loc):
        section = inner
        keys.append(name)
        nested = nested_section(section.model_fields[name]) if name in section.model_fields else None
        if nested is None:
            break
        inner = nested
    return section, keys


_EXPECTED = {
    "dict_type": "a mapping",
    "bool_type": "true or false",
    "float_type": "a number",
    "finite_number": "a finite number",
    "greater_than_equal": "at least {ge:g}",
    "int_type": "a whole number",
    "less_than_equal": "at most {le:g}",
    "list_type": "a list",
    "literal_error": "{expected}",
    "model_type": "a mapping",
    "multiple_of": "a whole number",
    "string_type": "text",
}
"""What is expected, by type of pydantic error; keys whose only type is a `Predicate` have a `Refused` note instead."""


def _mistake(option: str, section: type[Section], key: str, details: list[ErrorDetails]) -> Mistake:
    value, error, field = details[0]["input"], details[0]["type"], section.model_fields.get(key)
    if field is None:
        return Mistake(option, None, *section.explain_unknown(key))
    if error == "empty":
        return Mistake(option, None, "is empty", "write a value or remove the line")
    expected = ", or ".join(
        _EXPECTED[each["type"]].format(**each.get("ctx", {})) for each in details if each["type"] in _EXPECTED
    )
    # YAML 1.1 parses a bare NO or off as false, so a flag where text is expected has a specific remedy.
    if value is False and (expected == "text" or "'no'" in expected.lower()):
        return Mistake(option, value, ": YAML reads a bare NO as false", "put it in quotes")
    text = str(value).lower() if isinstance(value, bool) else shortened(repr(value))
    written = None if isinstance(value, dict) else text
    for note in notes_of(field):
        if isinstance(note, Refused):
            return Mistake(option, written, f"is refused: {note.problem}", note.remedy)
    return Mistake(option, written, "is refused", f"write {expected}")
