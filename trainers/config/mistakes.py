"""What is wrong with a request, as values: a form finds the field of a mistake, a verb its own way to say it.

The lowest module of the house, so that every room can refuse a request. Imports no torch.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Mistake:
    """One thing that is wrong; `str()` gives its line: `SOURCE: OPTION=VALUE PROBLEM; REMEDY`.

    Args:
        option: the option or dotted key that it is about; empty for the request as a whole.
        value: what was given; None where the problem is not the value.
        problem: what is wrong. One that begins with a colon or comma follows the value without a space.
        remedy: the way out; empty where the problem says it.
        source: the Accelerate file or strategy that holds the option; empty for the request itself.
    """

    option: str
    value: object
    problem: str
    remedy: str = ""
    source: str = ""

    def __post_init__(self) -> None:
        if isinstance(self.value, bool):
            object.__setattr__(self, "value", str(self.value).lower())

    def __str__(self) -> str:
        subject = self.option if self.value is None else f"{self.option}={self.value}"
        gap = " " if subject and not self.problem.startswith((":", ",")) else ""
        before, after = f"{self.source}: " if self.source else "", f"; {self.remedy}" if self.remedy else ""
        return f"{before}{subject}{gap}{self.problem}{after}"


class ConfigError(ValueError):
    """The request cannot be fulfilled as it stands; the message has a line for each mistake.

    Args:
        mistakes: one or several; a text is a mistake about no option.
        source: the file or strategy that holds all of them, or the files that their sources stand in.
    """

    def __init__(self, mistakes: str | Mistake | Iterable[str | Mistake], source: str = ""):
        several = [mistakes] if isinstance(mistakes, str | Mistake) else mistakes
        self.mistakes = [mistake if isinstance(mistake, Mistake) else Mistake("", None, mistake) for mistake in several]
        if source:
            sources = [f"{source}: {mistake.source}" if mistake.source else source for mistake in self.mistakes]
            self.mistakes = [
                replace(mistake, source=path) for mistake, path in zip(self.mistakes, sources, strict=True)
            ]
        super().__init__("\n".join(self.lines))

    @classmethod
    def about(cls, option: str, value: object, problem: str, remedy: str = "") -> ConfigError:
        """The error of one mistake, from the parts of `Mistake`."""
        return cls(Mistake(option, value, problem, remedy))

    @property
    def lines(self) -> list[str]:
        """Each mistake as text."""
        return [str(mistake) for mistake in self.mistakes]

    def as_json(self) -> list[dict[str, Any]]:
        """The parts of each mistake as plain values, for another process."""
        return [
            {**vars(mistake), "value": mistake.value if mistake.value is None else str(mistake.value)}
            for mistake in self.mistakes
        ]

    @classmethod
    def from_json(cls, mistakes: Iterable[dict[str, Any]]) -> ConfigError:
        """The error of which another process sent `as_json()`."""
        return cls(Mistake(**parts) for parts in mistakes)


class Mistakes(list[Mistake]):
    """Collects what several checks refuse, so that the user sees all of it at once: `with mistakes: check()`."""

    def __enter__(self) -> Mistakes:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if isinstance(error, ConfigError):
            self.extend(mistake for mistake in error.mistakes if mistake not in self)
        return isinstance(error, ConfigError)

    def refuse(self) -> None:
        """Raises ConfigError when there are any."""
        if self:
            raise ConfigError(self)


def nearest(name: str, known: Iterable[str], otherwise: str) -> str:
    """The remedy for an unknown name: the known one that is nearest, or else the one given."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"did you mean {near[0]}?" if near else otherwise
