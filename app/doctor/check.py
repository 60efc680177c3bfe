"""The result of one check."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Check:
    """One line of the report.

    Args:
        name: what was checked.
        passed: None if it cannot be checked here; `value` says why.
        value: what was found.
        remedy: how to mend it; empty unless it failed.
    """

    name: str
    passed: bool | None
    value: str
    remedy: str = ""

    def as_json(self) -> dict[str, Any]:
        """The check as plain values."""
        return asdict(self)


def judged(name: str, faults: list[str], value: str, remedy: str) -> Check:
    """A check that fails if there are faults, which then replace `value`."""
    return Check(name, not faults, "; ".join(faults) or value, remedy if faults else "")
