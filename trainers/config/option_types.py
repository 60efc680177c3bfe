"""How options are declared, and types of those whose values have forms of their own: lists, pairs, ranges, names.

Imports no torch.
"""

from __future__ import annotations

import os
import re
import unicodedata
from datetime import date
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from trainers.config.objective_file import split_objective
from trainers.config.objectives import OBJECTIVES, REWARDS

MAX_RANK = 4096
"""Highest rank of an adapter."""
MAX_REPEATS = 2
"""Most repetitions in a pattern of module names."""
_PATTERN = re.compile(r"[\w.\-|\[\]^\\*+?()]+", re.ASCII)
_ENDLESS = re.compile(r"\(\?|\)[*+?]")
MAX_PROFILED = 10
"""Steps to profile at most: of a large model, each has hundreds of thousands of events."""


def _split_commas(value: Any) -> Any:
    """Splits text at its commas; `none` is an empty list, as docs/OPTIONS.md writes one."""
    value = [] if isinstance(value, str) and _none_word(value) is None else value
    return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value


def _pairs(value: Any) -> Any:
    """Parses `prompt=question,completion=answer` into a mapping; mappings are returned unchanged."""
    if not isinstance(value, str):
        return value
    pairs = [part.partition("=") for part in _split_commas(value)]
    keys = [key.strip() for key, _, _ in pairs]
    if twice := sorted({key for key in keys if keys.count(key) > 1}):
        raise ValueError(f"{twice[0]} has two values")
    return {key.strip(): column.strip() for key, _, column in pairs}


def _numbers(value: Any) -> Any:
    """Pairs whose values are numbers, of which true and false are none."""
    pairs = _pairs(value)
    if isinstance(pairs, dict) and any(isinstance(number, bool) for number in pairs.values()):
        raise ValueError("input should be numbers, not true or false")
    return pairs


def _patterns(value: dict[str, Any]) -> dict[str, Any]:
    for pattern in value:
        if not pattern:
            raise ValueError("a number has no module before its =")
        # Some expressions take forever to match: those with groups that repeat, or with many repetitions.
        repeats = len(re.findall(r"[*+?]", pattern))
        if not _PATTERN.fullmatch(pattern) or _ENDLESS.search(pattern) or repeats > MAX_REPEATS:
            raise ValueError(
                f"{pattern} is not a plain regular expression: letters, digits and . _ - | [ ] ( ) ^ \\, at most "
                f"{MAX_REPEATS} of * + ?, and no group that repeats"
            )
        try:
            re.compile(rf"(.*\.)?({pattern})$")
        except re.error as error:
            raise ValueError(f"{pattern} is no regular expression ({error})") from None
    return value


def _tokens(value: list[str]) -> list[str]:
    for token in value:
        if not token.strip() or any(unicodedata.category(letter) == "Cc" for letter in token):
            raise ValueError(f"{token!r} is blank, or has control characters")
    if twice := sorted({token for token in value if value.count(token) > 1}):
        raise ValueError(f"{twice[0]} is there twice")
    return value


def _none_word(value: Any) -> Any:
    return None if isinstance(value, str) and value.lower() in ("", "none", "null") else value


def _off(value: Any) -> Any:
    """Undoes YAML's reading of a bare `no` as false."""
    return "no" if value is False else value


def _iso_date(value: Any) -> Any:
    """Formats a date, from YAML or text, as `2024-07-26`."""
    try:
        return date.fromisoformat(str(value)).isoformat()
    except ValueError:
        raise ValueError("input should be a date such as 2024-07-26") from None


def _step_range(value: Any) -> Any:
    """Checks a range of steps such as `10:13`; YAML reads that as a number unless it is quoted."""
    value = _none_word(value)
    first, _, last = value.partition(":") if isinstance(value, str) else ("", "", "")
    numbers = [int(text) for text in (first, last) if re.fullmatch("[0-9]{1,12}", text)]
    if value is not None and not (len(numbers) == 2 and 0 < numbers[0] <= numbers[1] < numbers[0] + MAX_PROFILED):
        raise ValueError(f"input should be two steps such as '10:13' (quoted in YAML), at most {MAX_PROFILED} in all")
    return value


def _ranks(value: list[str]) -> list[str]:
    if value != ["all"] and not all(re.fullmatch("[0-9]{1,6}", rank) for rank in value):
        raise ValueError("input should be ranks such as 0,1, or all")
    return value


def _objective(value: str) -> str:
    if value not in OBJECTIVES and split_objective(value) is None:
        expected = ", ".join(map(repr, OBJECTIVES))
        raise PydanticCustomError(
            "literal_error", "Input should be {expected}", {"expected": f"{expected}, or path.py:Name"}
        )
    return value


def _rewards(value: list[str]) -> list[str]:
    for name in value:
        if name not in REWARDS and split_objective(name) is None:
            problem = f"{name[:80]!r} is no reward; use {', '.join(REWARDS)}, or path.py:function"
            raise PydanticCustomError("reward", "{problem}", {"problem": problem})
    functions = [name.rpartition(":")[2] for name in value]
    if len(set(functions)) < len(functions):
        raise PydanticCustomError("reward", "two rewards have the same name; rename one, or use reward_weights")
    if "std" in functions:
        raise PydanticCustomError("reward", "reward_std is a metric of its own; call the reward something else")
    return value


Names = Annotated[list[str], BeforeValidator(_split_commas)]
Pairs = Annotated[dict[str, str], BeforeValidator(_pairs)]
RankPattern = Annotated[
    dict[str, Annotated[int, Field(ge=1, le=MAX_RANK)]], BeforeValidator(_numbers), AfterValidator(_patterns)
]
"""Ranks of adapters by module, as peft's `rank_pattern`."""
AlphaPattern = Annotated[dict[str, Annotated[float, Field(gt=0)]], BeforeValidator(_numbers), AfterValidator(_patterns)]
"""Scalings of adapters by module, as peft's `alpha_pattern`."""
TokenNames = Annotated[Names, AfterValidator(_tokens)]
Optionally = BeforeValidator(_none_word)
NoWord = BeforeValidator(_off)
IsoDate = Annotated[str, BeforeValidator(_iso_date)]
StepRange = Annotated[str | None, BeforeValidator(_step_range)]
RankNames = Annotated[Names, AfterValidator(_ranks)]
RewardNames = Annotated[Names, AfterValidator(_rewards)]
Numbers = Annotated[list[float], BeforeValidator(_split_commas)]
Schedule = Literal[
    "constant", "linear", "cosine", "cosine_with_restarts", "polynomial", "inverse_sqrt", "warmup_stable_decay"
]
"""Learning-rate schedules, by transformers' names."""
ObjectiveName = Annotated[str, AfterValidator(_objective)]


def option(section: str, default: Any = ..., unit: str = "", choices: tuple[str, ...] = (), **constraints: Any) -> Any:
    """Declares an option.

    Args:
        section: Group that it belongs to, a key of `trainers.config.fields.TITLES`.
        default: Its default; required without one.
        unit: Unit, such as `tokens`.
        choices: Values that a form offers, where the type does not say them.
        constraints: Bounds, as pydantic's `Field` takes them.
    """
    extra: dict[str, Any] = {"section": section, "unit": unit, "choices": choices}
    return Field(default=default, json_schema_extra=extra, **constraints)


class OptionGroup(BaseModel):
    """Options that belong together; a docstring below each is its help."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _plain_values(cls, value: Any, info: ValidationInfo) -> Any:
        # Control characters, and those that reverse the direction of text, could disguise a value in logs.
        texts = [value] if isinstance(value, str) else [*value, *value.values()] if isinstance(value, dict) else []
        for text in texts:
            if any(ord(letter) < 32 or 0x202A <= ord(letter) <= 0x202E for letter in str(text)):
                raise ValueError("control characters are not allowed")
        if isinstance(value, str) and value.startswith("~") and os.path.expanduser(value) == value:
            raise ValueError("there is no such home folder")
        numbers = cls.model_fields[str(info.field_name)].annotation in (int, float)
        if numbers and isinstance(value, bool):
            raise ValueError("input should be a number, not true or false")
        return value
