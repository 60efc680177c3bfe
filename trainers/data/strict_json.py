"""JSON whose objects hold each key once. Imports no torch."""

from __future__ import annotations

import json
from typing import Any


class DuplicateKey(ValueError):
    """An object that holds a key twice; its text is the key."""


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) < len(pairs):
        names = [name for name, _ in pairs]
        raise DuplicateKey(next(name for index, name in enumerate(names) if name in names[:index]))
    return members


STRICT = json.JSONDecoder(object_pairs_hook=_unique_keys)
"""Of two members with one name `json` keeps the last and drops the other in silence; this raises `DuplicateKey`."""
