"""The values of nested JSON objects by their dotted paths."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def has(content: dict[str, Any], path: str) -> bool:
    """Whether there is a value, which may be null, at a dotted path."""
    *parents, name = path.split(".")
    section: Any = content
    for parent in parents:
        section = section.get(parent) if isinstance(section, dict) else None
    return isinstance(section, dict) and name in section


def leaves(content: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Dotted path and value of everything that is no section, in order; an empty section counts as a value."""
    stack: list[tuple[str, Any]] = [(name, value) for name, value in reversed(content.items())]
    while stack:
        path, value = stack.pop()
        if isinstance(value, dict) and value:
            stack += [(f"{path}.{name}", each) for name, each in reversed(value.items())]
        else:
            yield path, value
