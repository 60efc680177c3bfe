"""The three ways into a `TrainConfig`: flags, a YAML file, a preset. All are read strictly and alike.

Order, later wins: preset, YAML file, flags. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from trainers.config.command_line import config_options, option, read, switch
from trainers.config.mistakes import Mistake, Mistakes
from trainers.config.options import TrainConfig
from trainers.config.own_data import without_preset_data
from trainers.config.presets import Preset, find_preset, methods_line
from trainers.config.validation import build
from trainers.config.yaml_file import read_yaml


@dataclass
class Request:
    """What a command line asked for, before validation.

    Args:
        preset: its name.
        config: path of a YAML file.
        check: whether `--check` was given.
        options: those given one by one.
        chosen: names of the options that came from the file or one by one; set by `resolve`.
        notes: lines that say which preset was taken and what of it was left out; set by `resolve`.
        mistakes: what was wrong with the command line; `resolve` reports them with all others.
    """

    preset: str | None = None
    config: str | None = None
    check: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    chosen: frozenset[str] = frozenset()
    notes: list[str] = field(default_factory=list)
    mistakes: list[Mistake] = field(default_factory=list)

    def resolve(self) -> TrainConfig:
        """The validated config: preset, then YAML, then flags; data options of the preset go with its data.

        Raises:
            ConfigError: with every mistake at once.
        """
        mistakes = Mistakes(self.mistakes)
        with mistakes:
            config = self._build()
        mistakes.refuse()
        return config

    def _build(self) -> TrainConfig:
        from_file = read_yaml(Path(self.config)) if self.config else {}
        chosen = {**from_file, **self.options}
        self.chosen = frozenset(chosen)
        if not (name := self.preset or chosen.get("preset")):
            return build(chosen)
        preset = find_preset(str(name), chosen.get("method"))
        base, left_out = without_preset_data(preset.options, chosen, preset.name)
        self.notes = [*_other_preset(str(name), preset, chosen), *left_out]
        return build({**base, **chosen, "preset": preset.name})


def _other_preset(name: str, preset: Preset, chosen: Mapping[str, Any]) -> list[str]:
    """A line when the preset is another than model and method were said to be."""
    if preset.name in (name, f"{name}-{chosen.get('method')}"):
        return []
    why = f": method={chosen['method']}" if "method" in chosen else f", which names no method: {methods_line(name)}"
    return [f"preset {preset.name} instead of {name}{why}"]


def parse_request(argv: Sequence[str]) -> Request:
    """Reads `--preset`, `--config`, `--check` and every option of `TrainConfig`; what is wrong so far is in `mistakes`.

    Raises:
        ConfigError: for `--check` with a value.
    """
    own = {"config": option("config", "<file>", "YAML file with options."), "check": switch("check", "")}
    parsed = read(argv, {**own, **config_options()}, "train", add_help_option=False)
    assert parsed is not None, "there is no help here"
    names, values, mistakes = parsed
    return request_of(values, [*mistakes, *map(unexpected_argument, names)])


def request_of(values: Mapping[str, Any], mistakes: Iterable[Mistake] = ()) -> Request:
    """The request of a command line's values: `preset`, `config`, `check`, and the options of training."""
    options = {name: value for name, value in values.items() if name not in ("preset", "config", "check")}
    fields = (values.get("preset"), values.get("config"), values.get("check", False))
    return Request(*fields, options, mistakes=list(mistakes))


def unexpected_argument(text: str) -> Mistake:
    """The mistake for a word that follows no option."""
    return Mistake("", None, f"unexpected argument {text!r}", "options are written --name value")


def dump_yaml(config: TrainConfig) -> str:
    """The config as flat YAML, run-specific paths left out so that it can be run again as it is."""
    values = config.model_dump(exclude={"output_dir", "resume_from_checkpoint"})
    return yaml.safe_dump(values, sort_keys=False, allow_unicode=True)
