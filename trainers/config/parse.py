"""Builds a `TrainConfig` from its three sources: a preset, a YAML file and command-line flags, each parsed strictly.

Later sources override earlier ones: preset, YAML file, flags. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from trainers.config.command_line import config_options, option, read, switch
from trainers.config.mistakes import Mistake, Mistakes
from trainers.config.objectives import OBJECTIVES
from trainers.config.options import TrainConfig
from trainers.config.own_data import without_preset_data
from trainers.config.presets import Preset, find_preset, methods_line
from trainers.config.validation import build
from trainers.config.yaml_file import read_yaml

StartOptions = Callable[[Mapping[str, Any], Mapping[str, Any]], Mapping[str, Any]]
"""Takes the values of all options that are set, and those that were chosen in a file or by flags; returns the options
that follow from what the run starts from."""


def whole_number(text: str, least: int, most: int) -> int | None:
    """A whole number written in ASCII digits; None for anything else, or out of range, however long it is."""
    digits = text.lstrip("0") or "0"
    if not (text.isascii() and text.isdigit()) or len(digits) > len(str(most)):
        return None
    return number if least <= (number := int(digits)) <= most else None


@dataclass
class Request:
    """A parsed command line, before validation.

    Args:
        preset: Name of the preset.
        config: Path of a YAML file.
        check: Whether `--check` was given.
        accelerate_config: Name or Accelerate file of the strategy; for ranks that torchrun starts.
        options: Options given as flags.
        chosen: Names of the options set in the file or by flags; set by `resolve`.
        notes: Lines on which preset was used and which of its options were dropped; set by `resolve`.
        mistakes: Mistakes in the command line; `resolve` reports them along with all others.
    """

    preset: str | None = None
    config: str | None = None
    check: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    chosen: frozenset[str] = frozenset()
    notes: list[str] = field(default_factory=list)
    accelerate_config: str | None = None
    mistakes: list[Mistake] = field(default_factory=list)

    def resolve(self, start: StartOptions | None = None) -> TrainConfig:
        """Returns the validated config; the preset's data options are dropped if the user replaces its data.

        Args:
            start: Looks up what `from_run` names; None for a config in which that was done already.

        Raises:
            ConfigError: Lists every mistake.
        """
        mistakes = Mistakes(self.mistakes)
        with mistakes:
            config = self._build(start)
        mistakes.refuse()
        return config

    def _build(self, start: StartOptions | None) -> TrainConfig:
        from_file = read_yaml(Path(self.config)) if self.config else {}
        chosen = {**from_file, **self.options}
        self.chosen = frozenset(chosen)
        values = chosen
        if name := self.preset or chosen.get("preset"):
            preset = find_preset(str(name), chosen.get("method"))
            base, left_out = without_preset_data(preset.options, chosen, preset.name)
            self.notes = [*_other_preset(str(name), preset, chosen), *left_out, *_rate_of_another(preset, chosen),
                          *_without_first_stage(preset, chosen)]  # fmt: skip
            values = {**base, **chosen, "preset": preset.name}
        return build({**values, **start(values, chosen)} if start else values)


def _other_preset(name: str, preset: Preset, chosen: Mapping[str, Any]) -> list[str]:
    """Returns a line if the preset used differs from the name and method that the user gave."""
    if preset.name in (name, f"{name}-{chosen.get('method')}"):
        return []
    why = f": method={chosen['method']}" if "method" in chosen else f", which names no method: {methods_line(name)}"
    return [f"preset {preset.name} instead of {name}{why}"]


def _rate_of_another(preset: Preset, chosen: Mapping[str, Any]) -> list[str]:
    """Returns a line if the learning rate is that of a preset for SFT, and the objective needs a lower one."""
    objective = OBJECTIVES.get(str(chosen.get("objective")), OBJECTIVES["sft"])
    if "learning_rate" in chosen or objective.loss_of != "documents" or "objective" in preset.options:
        return []
    rate = float(preset.options["learning_rate"])
    return [
        f"learning_rate={rate:g} is that of preset {preset.name}, for SFT; {objective.label} usually takes a tenth of "
        "it or less (--learning_rate)"
    ]


def _without_first_stage(preset: Preset, chosen: Mapping[str, Any]) -> list[str]:
    """Returns a line if a preset is meant to go on from another run, and starts from its base."""
    first = preset.first
    if first is None or first.used_as != "from_run" or {"from_run", "model_name_or_path", "objective"} & chosen.keys():
        return []
    return [
        f"preset {preset.name} is meant to start from a run of `{preset.first_command}`, which --from_run names: from "
        f"the base it may learn little (`tunesmith demo {preset.name}` trains both)"
    ]


def parse_request(argv: Sequence[str]) -> Request:
    """Parses the options of the training script and of `TrainConfig`; errors are collected in `mistakes`.

    Raises:
        ConfigError: If `--check` is given a value.
    """
    own = {
        "config": option("config", "<file>", "YAML file with options."), "check": switch("check", ""),
        "accelerate_config": option("accelerate_config", "<name|file>", "With torchrun: the strategy."),
    }  # fmt: skip
    parsed = read(argv, {**own, **config_options()}, "train", add_help_option=False)
    assert parsed is not None, "there is no help here"
    names, values, mistakes = parsed
    accelerate_config = values.pop("accelerate_config", None)
    request = request_of(values, [*mistakes, *map(unexpected_argument, names)])
    request.accelerate_config = accelerate_config
    return request


def request_of(values: Mapping[str, Any], mistakes: Iterable[Mistake] = ()) -> Request:
    """Builds a request from parsed values: `preset`, `config`, `check` and training options."""
    options = {name: value for name, value in values.items() if name not in ("preset", "config", "check")}
    fields = (values.get("preset"), values.get("config"), values.get("check", False))
    return Request(*fields, options, mistakes=list(mistakes))


def unexpected_argument(text: str) -> Mistake:
    """Returns the mistake for a positional argument where none is expected."""
    return Mistake("", None, f"unexpected argument {text!r}", "options are written --name value")


def dump_yaml(config: TrainConfig) -> str:
    """Returns the config as flat YAML, without run-specific paths, so that it can be reused for a new run."""
    values = config.model_dump(exclude={"output_dir", "resume_from_checkpoint"})
    return yaml.safe_dump(values, sort_keys=False, allow_unicode=True)
