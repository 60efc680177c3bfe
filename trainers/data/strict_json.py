"""JSON decoding that rejects duplicate keys. Imports no torch."""

from __future__ import annotations

import json
from typing import Any


class DuplicateKey(ValueError):
    """A key appears twice in one object; the message is the key."""


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) < len(pairs):
        names = [name for name, _ in pairs]
        raise DuplicateKey(next(name for index, name in enumerate(names) if name in names[:index]))
    return members


STRICT = json.JSONDecoder(object_pairs_hook=_unique_keys)
"""Raises `DuplicateKey`, where plain `json` silently keeps the last of two members with the same name."""
