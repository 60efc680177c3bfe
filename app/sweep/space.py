"""What a sweep varies: the values of an option, or a range of numbers, as written on the command line."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Sequence

from pydantic import BaseModel, ConfigDict

from app.console import shortened
from trainers.config.fields import OptionField, fields
from trainers.config.mistakes import ConfigError

_NUMBERS = ("int", "float")
_MAY_HOLD_COMMAS = ("text", "list", "map")
_INTEGER = re.compile(r"[+-]?[0-9]{1,15}")
_RANGE = "write a range as LOW:HIGH, or LOW:HIGH:log for steps of equal ratio"
_FIXED = {
    "output_dir": "every run has a folder of its own in runs_dir",
    "runs_dir": "all runs of a sweep are in one folder",
    "resume_from_checkpoint": "every run starts at step 0",
    "force_resume": "every run starts at step 0",
    "seed": "use --seeds 3 for three seeds of every point",
    "stop_at_step": "--halving decides it",
    "run_name": "runs are named after the sweep",
}


class Axis(BaseModel):
    """An option that differs between the runs of a sweep.

    Args:
        option: its name.
        values: the values, as on the command line; empty for a range.
        low: lower end of a range, as on the command line.
        high: upper end.
        log: whether a range is searched on a logarithmic scale.
        integer: whether a range has whole numbers only.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    option: str
    values: tuple[str, ...] = ()
    low: str = ""
    high: str = ""
    log: bool = False
    integer: bool = False

    @property
    def ends(self) -> tuple[str, ...]:
        """The values to check: all of them, or both ends of the range."""
        return self.values or (self.low, self.high)


def parse_axis(name: str, text: str) -> Axis | None:
    """What `--NAME TEXT` varies; None for a single value.

    Commas separate the values of an option that takes a number, a choice, or true or false. Those of any other option
    may hold commas and colons themselves, and are separated by `|`.

    Raises:
        ConfigError: if it cannot be read, or the option cannot differ between the runs of a sweep.
    """
    option = _fields()[name]
    mark = "|" if option.kind in _MAY_HOLD_COMMAS else ","
    values = tuple(part.strip() for part in text.split(mark))
    ranges = [value for value in values if ":" in value] if option.kind in _NUMBERS else []
    if len(values) == 1 and not ranges:
        return None
    if name in _FIXED:
        raise ConfigError.about(name, shortened(text), "cannot differ between the runs of a sweep", _FIXED[name])
    if "" in values:
        raise ConfigError.about(name, shortened(text), "has an empty value", f"write it as A{mark}B{mark}C")
    if len(values) > 1:
        if ranges:
            raise ConfigError.about(name, shortened(text), "mixes values and a range", "write values, or one range")
        repeated = next((value for value in values if values.count(value) > 1), None)
        if repeated is not None:
            raise ConfigError.about(name, shortened(text), f"has {shortened(repeated)} twice", "write it once")
        return Axis(option=name, values=values)
    return _range(option, values[0])


def _range(option: OptionField, text: str) -> Axis:
    low, high, *scale = text.split(":")
    refused = ConfigError.about(option.name, shortened(text), "is not a range", _RANGE)
    if scale not in ([], ["log"]):
        raise refused
    numbers = [_number(end, option.kind == "int") for end in (low, high)]
    if None in numbers:
        raise refused
    first, last = (number or 0.0 for number in numbers)
    if not first < last:
        raise ConfigError.about(option.name, shortened(text), "is an empty range", "put the lower end first")
    if scale and first <= 0:
        raise ConfigError.about(option.name, shortened(text), "has no logarithm at its lower end", "begin above 0")
    return Axis(option=option.name, low=low.strip(), high=high.strip(), log=bool(scale), integer=option.kind == "int")


def _number(text: str, integer: bool) -> float | None:
    text = text.strip()
    if not text.isascii() or (integer and not _INTEGER.fullmatch(text)):
        return None
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) and "_" not in text else None


def _fields() -> dict[str, OptionField]:
    return {field.name: field for field in fields()}


def grid_size(axes: Iterable[Axis]) -> int:
    """Number of points of a grid; a range counts as one."""
    return math.prod(max(1, len(axis.values)) for axis in axes)


def grid(axes: Sequence[Axis]) -> list[dict[str, str]]:
    """Every combination of the values; of ranges, of their ends. The last option varies fastest."""
    names = [axis.option for axis in axes]
    return [dict(zip(names, values, strict=True)) for values in itertools.product(*(axis.ends for axis in axes))]
