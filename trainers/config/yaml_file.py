"""Strict YAML parsing: plain mappings of bounded size, without duplicate keys or aliases. Imports no torch."""

from __future__ import annotations

from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

from trainers.config.mistakes import ConfigError

MAX_BYTES = 1_000_000


class _StrictLoader(yaml.SafeLoader):
    """SafeLoader that rejects duplicate keys, and aliases, which a flat file does not need but an alias bomb does."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise yaml.constructor.ConstructorError(None, None, "aliases are not allowed", self.peek_event().start_mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str):
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} is not text", key_node.start_mark)
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"duplicate key {key!r}", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


def read_yaml(path: Path) -> dict[str, Any]:
    """Reads the mapping in a YAML file.

    Raises:
        ConfigError: If the file is unreadable, too large, not a mapping, or has duplicate keys, aliases or Python tags.
    """
    return parse_yaml(read_text(path, str(path), "YAML file"), str(path))


def read_text(path: Path, name: str, kind: str, remedy: str = "check the path") -> str:
    """Reads a short text file.

    Args:
        path: The file.
        name: Name used in messages.
        kind: What the file should be, such as `YAML file`.
        remedy: What to do if it cannot be read.

    Raises:
        ConfigError: If the file is unreadable, too large, or not a regular file.
    """
    try:
        if path.exists() and not path.is_file():
            raise ConfigError(f"{name} is not a regular file; name a {kind}")
        if path.stat().st_size > MAX_BYTES:
            raise ConfigError(f"{name} is larger than {MAX_BYTES} bytes; a {kind} is short")
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {name}: {getattr(error, 'strerror', None) or error}; {remedy}") from None


def parse_yaml(text: str, name: str) -> dict[str, Any]:
    """Parses YAML text into a mapping.

    Args:
        text: The YAML.
        name: Name used in messages.

    Raises:
        ConfigError: If the text is too large, not a mapping, or has duplicate keys, aliases or Python tags.
    """
    if len(text) > MAX_BYTES:
        raise ConfigError(f"{name} is larger than {MAX_BYTES} bytes; a config is a short YAML file")
    try:
        loaded = yaml.load(text, Loader=_StrictLoader)  # noqa: S506 - a SafeLoader
    except (yaml.YAMLError, RecursionError) as error:
        where = str(error).replace("\n", " ")[:300]
        raise ConfigError(f"{name} is not plain YAML: {where}; write one `key: value` per line") from None
    except ValueError as error:  # e.g. a date with month 13, or a number with thousands of digits
        raise ConfigError(f"{name} holds an invalid value: {str(error)[:200]}; write it in quotes") from None
    if loaded is None:
        return {}
    if not isinstance(loaded, dict):
        raise ConfigError(f"{name} holds a {type(loaded).__name__}; write one `key: value` per line")
    return loaded
