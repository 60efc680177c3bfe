"""The three ways into a `TrainConfig`: flags, a YAML file, a preset. All are read strictly and alike.

Order, later wins: preset, YAML file, flags. Imports no torch.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import yaml

from trainers.config.options import ConfigError, TrainConfig, unknown_option
from trainers.config.own_data import without_preset_data
from trainers.config.validation import build

PRESETS_DIR = Path(__file__).parent / "presets"
MAX_YAML_BYTES = 1_000_000


class _StrictLoader(yaml.SafeLoader):
    """SafeLoader that refuses duplicate keys and aliases (an alias bomb needs them, a flat file does not)."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise yaml.constructor.ConstructorError(None, None, "aliases are not allowed", self.peek_event().start_mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str):
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} is no text", key_node.start_mark)
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"duplicate key {key!r}", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file.

    Raises:
        ConfigError: unreadable, too large, not a mapping, or with duplicate keys, aliases or Python tags.
    """
    try:
        if path.exists() and not path.is_file():
            raise ConfigError(f"{path} is not a regular file; name a YAML file")
        if path.stat().st_size > MAX_YAML_BYTES:
            raise ConfigError(f"{path} is larger than {MAX_YAML_BYTES} bytes; a config is a short YAML file")
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}; check the path") from None
    return parse_yaml(text, str(path))


def parse_yaml(text: str, shown: str) -> dict[str, Any]:
    """The mapping in a YAML text.

    Args:
        text: the YAML.
        shown: what messages call it.

    Raises:
        ConfigError: too large, not a mapping, or with duplicate keys, aliases or Python tags.
    """
    if len(text) > MAX_YAML_BYTES:
        raise ConfigError(f"{shown} is larger than {MAX_YAML_BYTES} bytes; a config is a short YAML file")
    try:
        loaded = yaml.load(text, Loader=_StrictLoader)  # noqa: S506 - a SafeLoader
    except (yaml.YAMLError, RecursionError) as error:
        where = str(error).replace("\n", " ")[:300]
        raise ConfigError(f"{shown} is no plain YAML: {where}; write one `key: value` per line") from None
    except ValueError as error:  # such as a date of month 13, or a number of thousands of digits
        raise ConfigError(f"{shown} holds a value that is none: {str(error)[:200]}; write it in quotes") from None
    if loaded is None:
        return {}
    if not isinstance(loaded, dict):
        raise ConfigError(f"{shown} holds a {type(loaded).__name__}; write one `key: value` per line")
    return loaded


def preset_names() -> list[str]:
    """Names of the presets that ship, sorted."""
    return sorted(path.stem for path in PRESETS_DIR.glob("*.yaml"))


def preset_path(name: str) -> Path:
    """The YAML file of a preset.

    Raises:
        ConfigError: when no preset has the name.
    """
    if name not in preset_names():
        way = unknown_option(name, preset_names()).partition("; ")[2]
        hint = way if way.startswith("did") else f"use one of {', '.join(preset_names())}"
        raise ConfigError(f"unknown preset {name!r}; {hint}")
    return PRESETS_DIR / f"{name}.yaml"


def preset_summary(name: str) -> str:
    """The first comment line of a preset's header."""
    first = preset_path(name).read_text(encoding="utf-8").partition("\n")[0]
    return first.lstrip("# ").strip()


@dataclass(frozen=True)
class PresetStrategies:
    """What a preset's header says of a number of GPUs.

    Args:
        gpus: how many.
        names: strategies that hold it there, the best first; empty for none.
        remark: what it needs, such as `needs 82 GiB`; may be empty.
    """

    gpus: int
    names: tuple[str, ...]
    remark: str


_COUNTS = {"one GPU": 1, "two GPUs": 2, "eight GPUs": 8}


def preset_strategies(name: str) -> list[PresetStrategies]:
    """The `Strategies` line of a preset's header, fewest GPUs first.

    Raises:
        ConfigError: when no preset has the name.
    """
    text = preset_path(name).read_text(encoding="utf-8")
    line = re.search(r"^# Strategies: (.*)\.$", text, re.MULTILINE)
    found = []
    for part in line[1].split("; ") if line else []:
        count, _, words = part.partition(": ")
        names, _, remark = words.partition(" (")
        known = () if names == "none" else tuple(names.split(", "))
        found.append(PresetStrategies(_COUNTS[count], known, remark.removesuffix(")")))
    return found


@dataclass
class Request:
    """What a command line asked for, before validation.

    Args:
        preset: its name.
        config: path of a YAML file.
        check: whether `--check` was given.
        options: those given one by one.
        chosen: names of the options that came from the file or one by one; set by `resolve`.
        notes: lines that say what of the preset was left out; set by `resolve`.
    """

    preset: str | None = None
    config: str | None = None
    check: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    chosen: frozenset[str] = frozenset()
    notes: list[str] = field(default_factory=list)

    def resolve(self) -> TrainConfig:
        """The validated config: preset, then YAML, then flags; data options of the preset go with its data.

        Raises:
            ConfigError: with every mistake at once.
        """
        from_file = read_yaml(Path(self.config)) if self.config else {}
        preset = self.preset or self.options.get("preset") or from_file.get("preset")
        base = read_yaml(preset_path(str(preset))) if preset else {}
        named = {"preset": preset} if preset else {}
        chosen = {**from_file, **self.options}
        self.chosen = frozenset(chosen)
        base, self.notes = without_preset_data(base, chosen, str(preset))
        return build({**base, **chosen, **named})


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; options are written --name value")


def parse_request(argv: Sequence[str]) -> Request:
    """Reads `--preset`, `--config`, `--check` and every option of `TrainConfig` from `argv`.

    Unknown names are kept among the options, so that `resolve` reports them with all other mistakes.

    Raises:
        ConfigError: for a flag without a value, or a stray word.
    """
    parser = _Parser(add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    parser.add_argument("--preset")
    parser.add_argument("--config")
    parser.add_argument("--check", action="store_true")
    for name in TrainConfig.model_fields:
        if name != "preset":
            parser.add_argument(f"--{name}")
    known, rest = parser.parse_known_args(list(argv))
    # argparse takes the value of `--name=--` for its own separator and makes an empty list of it.
    values: dict[str, Any] = {name: "--" if value == [] else value for name, value in vars(known).items()}
    request = Request(values.pop("preset", None), values.pop("config", None), values.pop("check", False), values)
    request.options.update(_unknown_flags(rest))
    return request


def _unknown_flags(words: list[str]) -> dict[str, str]:
    flags: dict[str, str] = {}
    stray = []
    for word in words:
        if word.startswith("--"):
            name, _, value = word[2:].partition("=")
            flags[name] = value
        elif not (flags and flags[list(flags)[-1]] == ""):
            stray.append(word)
        else:
            flags[list(flags)[-1]] = word
    if stray:
        raise ConfigError([f"unexpected argument {word!r}; options are written --name value" for word in stray])
    return flags


def dump_yaml(config: TrainConfig) -> str:
    """The config as flat YAML, run-specific paths left out so that it can be run again as it is."""
    values = config.model_dump(exclude={"output_dir", "resume_from_checkpoint"})
    return yaml.safe_dump(values, sort_keys=False, allow_unicode=True)
