"""User errors as structured values, so that a form can mark the field and each command can word the message.

The lowest module in the import order: every package may raise these errors. Imports no torch.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Mistake:
    """One user error; `str()` formats it as `SOURCE: OPTION=VALUE PROBLEM; REMEDY`.

    Args:
        option: The option or dotted key that it concerns; empty for the request as a whole.
        value: The given value; None if the value is not the problem.
        problem: What is wrong. If it starts with a colon or comma, it follows the value without a space.
        remedy: How to fix it; empty if the problem already says so.
        source: The Accelerate file or strategy that contains the option; empty for the request itself.
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


def no_value(flag: str) -> Mistake:
    """The mistake of a flag without a value, or with an empty one, which a shell makes of an unset variable."""
    return Mistake(flag, None, "has no value", f"write {flag} VALUE, or leave it out")


class ConfigError(ValueError):
    """The request is invalid; the message has one line per mistake.

    Args:
        mistakes: One or several; a string is a mistake that concerns no particular option.
        source: File or strategy that contains all of them; becomes the source of each, or its prefix if it has one.
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
        """Builds the error for a single mistake from the fields of `Mistake`."""
        return cls(Mistake(option, value, problem, remedy))

    @property
    def lines(self) -> list[str]:
        """The mistakes as text, one line each."""
        return [str(mistake) for mistake in self.mistakes]

    def as_json(self) -> list[dict[str, Any]]:
        """Returns the fields of each mistake as plain values, to be sent to another process."""
        return [
            {**vars(mistake), "value": mistake.value if mistake.value is None else str(mistake.value)}
            for mistake in self.mistakes
        ]

    @classmethod
    def from_json(cls, mistakes: Iterable[dict[str, Any]]) -> ConfigError:
        """Rebuilds the error from `as_json()` of another process."""
        return cls(Mistake(**parts) for parts in mistakes)


@contextmanager
def errors_about(option: str, other: str) -> Iterator[None]:
    """Makes errors about an option, raised meanwhile, errors about another, whose value was checked in its place."""

    def renamed(text: str) -> str:
        return text.replace(f"{option}=", f"{other}=").replace(f"--{option} ", f"--{other} ")

    try:
        yield
    except ConfigError as error:
        raise ConfigError(
            replace(
                mistake,
                option=other if mistake.option == option else mistake.option,
                problem=renamed(mistake.problem),
                remedy=renamed(mistake.remedy),
            )
            for mistake in error.mistakes
        ) from None


class Mistakes(list[Mistake]):
    """Collects the errors of several checks, so that the user sees all of them at once: `with mistakes: check()`."""

    def __enter__(self) -> Mistakes:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if isinstance(error, ConfigError):
            self.extend(mistake for mistake in error.mistakes if mistake not in self)
        return isinstance(error, ConfigError)

    def refuse(self) -> None:
        """Raises `ConfigError` if there are any mistakes."""
        if self:
            raise ConfigError(self)


def nearest(name: str, known: Iterable[str], otherwise: str) -> str:
    """Returns the remedy for an unknown name: the closest known name, or `otherwise` if none is close."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"did you mean {near[0]}?" if near else otherwise
