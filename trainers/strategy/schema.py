"""Files of other tools as pydantic models: what each key takes, and why one is refused or ignored. No torch.

Accelerate and DeepSpeed pass over much in silence and train something else; here that is a mistake or a warning.
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
"""More than any cluster has; a larger number is a slip, and loops over processes would never end."""
_MAX_MISTAKES = 100  # of a file with thousands of keys that nobody knows
_MAX_SHOWN = 200


@dataclass(frozen=True)
class Refused:
    """Why a key, or any value of it that its type does not hold, is refused.

    Args:
        problem: why.
        remedy: the way out.
    """

    problem: str
    remedy: str = "remove it"


@dataclass(frozen=True)
class Ignored:
    """Why a value that a key's type holds has no effect.

    Args:
        reason: why, and the way out.
        applies: whether a value asks for something, so that the user is warned.
    """

    reason: str
    applies: Callable[[Any], bool] = bool


def key(*notes: Refused | Ignored) -> Any:
    """A key that may be left out, with what users are told about its values."""
    extra: dict[str, Any] = {"notes": notes}
    return Field(default=None, json_schema_extra=extra)


def notes_of(field: FieldInfo) -> tuple[Refused | Ignored, ...]:
    """What users are told about a key's values."""
    extra: Any = field.json_schema_extra or {}
    return tuple(extra.get("notes", ()))


def shortened(text: str) -> str:
    """The text for a message: one line of bounded length."""
    text = text if text.isprintable() else repr(text[:_MAX_SHOWN])
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}…"


def is_empty(value: Any) -> bool:
    """Whether a section or list holds nothing, as `accelerate config` and old files write many."""
    return value in ({}, [])


def is_off(value: Any) -> bool:
    """Whether a section says that it is off, or nothing."""
    return is_empty(value) or (isinstance(value, dict) and value.get("enabled") is False)


def _never(value: Any) -> bool:
    return False


# `Literal` takes true and 1.0 for 1, and so holds only texts here.
Absent = Annotated[Any, Predicate(_never)]
Empty = Annotated[Any, Predicate(is_empty)]
Off = Annotated[Any, Predicate(is_off)]
OnlyFalse = Annotated[bool, Predicate(not_)]
OnlyTrue = Annotated[bool, Predicate(bool)]
Processes = Annotated[int, Field(ge=0, le=MAX_PROCESSES)]


class Section(BaseModel):
    """The keys of a mapping; an unknown key, one without a value and a value of another type are mistakes."""

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
        """Problem and remedy of a key that is not in the section."""
        longer = [key for key in cls.model_fields if key.endswith(f"_{name}")]
        if len(longer) == 1:
            return f": the {cls.owner} key has a prefix", f"write {longer[0]}"
        near = difflib.get_close_matches(name, cls.model_fields, n=1, cutoff=0.6)
        return f": unknown {cls.owner} key {shortened(name)}", f"did you mean {near[0]}?" if near else "remove the line"


SectionT = TypeVar("SectionT", bound=Section)


def parse(model: type[SectionT], values: Mapping[str, Any], where: str = "", source: str = "") -> SectionT:
    """The values as a model; at the top of a file, where `where` is empty, a key without a value is as if left out.

    Args:
        model: what may stand in the mapping.
        values: the mapping as it was read.
        where: path of the mapping, which begins each option.
        source: what the mistakes say that they are in.

    Raises:
        ConfigError: with a mistake for each key that is wrong, at any depth.
    """
    present = {
        name: value for name, value in values.items() if where or value is not None or name not in model.model_fields
    }
    try:
        return model.model_validate(present)
    except ValidationError as error:
        by_key: dict[str, tuple[type[Section], str, list[ErrorDetails]]] = {}
        for detail in error.errors(include_url=False):  # one for each type that the key could have
            section, keys = _locate(model, detail["loc"])
            option = shortened(".".join(filter(None, (where, *keys))))
            by_key.setdefault(option, (section, keys[-1], []))[2].append(detail)
        first = islice(by_key.items(), _MAX_MISTAKES)
        raise ConfigError([_mistake(option, *about) for option, about in first], source) from None


def nested_section(field: FieldInfo) -> type[Section] | None:
    """The model of the mapping that a key holds; None where it holds something else."""
    kinds = (field.annotation, *get_args(field.annotation))
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Section)), None)


def ignored_keys(model: type[Section], values: Mapping[str, Any], where: str = "") -> list[str]:
    """A line for each value that has no effect.

    Args:
        model: what may stand in the mapping.
        values: a mapping without mistakes.
        where: path of the mapping; empty at the top.
    """
    lines = []
    for name, value in values.items():
        field = model.model_fields.get(name)
        if field is None or value is None:
            continue
        path = f"{where}.{name}" if where else name
        reasons = [note.reason for note in notes_of(field) if isinstance(note, Ignored) and note.applies(value)]
        lines += [f"{path} is ignored: {reason}" for reason in reasons]
        if not reasons and (nested := nested_section(field)):
            lines += ignored_keys(nested, value, path)
    return lines


def _locate(model: type[Section], loc: tuple[int | str, ...]) -> tuple[type[Section], list[str]]:
    """The section that an error is in, and the keys that lead to it, without what pydantic adds for a union's types."""
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
"""What pydantic's errors ask for, by their type; a type that stands alone with a `Predicate` has a `Refused`."""


def _mistake(option: str, section: type[Section], key: str, details: list[ErrorDetails]) -> Mistake:
    value, error, field = details[0]["input"], details[0]["type"], section.model_fields.get(key)
    if field is None:
        return Mistake(option, None, *section.explain_unknown(key))
    if error == "empty":
        return Mistake(option, None, "is empty", "write a value or remove the line")
    expected = ", or ".join(
        _EXPECTED[each["type"]].format(**each.get("ctx", {})) for each in details if each["type"] in _EXPECTED
    )
    if value is False and (expected == "text" or "'no'" in expected.lower()):
        return Mistake(option, value, ": YAML reads a bare NO as false", "put it in quotes")
    text = str(value).lower() if isinstance(value, bool) else shortened(repr(value))
    written = None if isinstance(value, dict) else text
    for note in notes_of(field):
        if isinstance(note, Refused):
            return Mistake(option, written, f"is refused: {note.problem}", note.remedy)
    return Mistake(option, written, "is refused", f"write {expected}")
