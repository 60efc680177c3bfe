"""JSON decoding that rejects duplicate keys. Imports no torch."""

from __future__ import annotations

import json
from typing import Any


class DuplicateKey(ValueError):
    """A key appears twice in one object."""

    def __init__(self, key: str):
        super().__init__(f"duplicate key {key!r}")
        self.key = key


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An `object_pairs_hook` that raises `DuplicateKey`, where plain `json` silently keeps the last of the members."""
    members: dict[str, Any] = {}
    for name, value in pairs:
        if name in members:
            raise DuplicateKey(name)
        members[name] = value
    return members


def no_constant(name: str) -> None:
    """A `parse_constant` that raises ValueError: `NaN` and `Infinity` are no JSON."""
    raise ValueError(f"{name} is no JSON")


STRICT = json.JSONDecoder(object_pairs_hook=unique_keys)
