"""Presets: one YAML file per model, with its methods, their strategies on 1, 2 and 8 GPUs, and its published config.

A preset is named `<model>-<method>`, such as `qwen3-8b-lora`: the options of the model, overridden by those of the
method. In place of a method, the embedded model also names objectives, such as `tiny-dpo`, and `tiny-pretrain`.
Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from trainers.config.mistakes import ConfigError, Mistake, nearest
from trainers.config.objectives import OBJECTIVES
from trainers.config.yaml_file import read_yaml

PRESETS_DIR = Path(__file__).parent
DEFAULT_METHOD = "lora"
PRETRAIN = "pretrain"
"""Name of the preset that trains on plain text, in place of a method."""
_METHOD_TITLES = {"full": "{}, all weights", "lora": "{} with LoRA", "qlora": "{} with QLoRA (4-bit base)"}


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class Placement(_Strict):
    """Strategies and memory of a method on a number of GPUs."""

    strategies: tuple[str, ...]
    """Strategies that fit, best first; empty if the GPUs are too small."""
    gib: float = Field(gt=0)
    """GiB per GPU with the most demanding of the strategies; if none fits, with `single` on one GPU and `fsdp2` on
    several. An estimate of `tunesmith plan`, unless the method has `measured`."""
    host_gib: float = Field(0.0, ge=0)
    """GiB of host memory that each process needs in addition; determined likewise."""


class FirstStage(_Strict):
    """A run that a preset's own run builds on."""

    method: str
    """The method of the same model that it is trained with."""
    options: dict[str, Any] = {}
    """Options that override those of that method."""
    used_as: Literal["from_run", "teacher"]
    """The option of the preset's run that names it."""


class Method(_Strict):
    """A method in a model's preset file, or an objective with a method of its own."""

    options: dict[str, Any]
    """Options that override those of the model; with `objective`, `method` is one of them."""
    gpu_gib: int | None = Field(None, gt=0)
    """Memory in GiB of the GPUs that the preset is meant for; None for any GPU, or a CPU."""
    gpus: dict[int, Placement]
    """Placement by number of GPUs."""
    measured: str | None = None
    """The measurement, if there is one instead of an estimate."""
    first: FirstStage | None = None
    """The run that comes before, which only `tunesmith demo` starts by itself."""


class PublishedModel(_Strict):
    """A model as published on the Hub."""

    safetensors_total: int
    """Number of elements in its weight files."""
    left_out: dict[str, int] = {}
    """Number of elements by part that its weight files have and transformers' causal model does not load."""
    tied_head_stored: bool = False
    """Whether the files also contain the output head although it is tied."""
    config: dict[str, Any]
    """The part of its config.json that determines the number, shapes and use of its weights."""


class ModelPresets(_Strict):
    """A model's preset file."""

    title: str
    options: dict[str, Any]
    """Options shared by all methods."""
    methods: dict[str, Method]
    """By method; an objective's preset is listed under its name."""
    model: PublishedModel | None = None
    """None for the embedded model."""


@dataclass(frozen=True)
class Preset:
    """A model and a method.

    Args:
        name: `<model>-<method>`.
        summary: One line on what it trains and how much memory that needs.
        options: Options that differ from the defaults of `TrainConfig`.
        gpus: Strategies and memory by number of GPUs, in ascending order.
        first: The run that comes before; its `method` is the name of a preset.
    """

    name: str
    summary: str
    options: dict[str, Any]
    gpus: dict[int, Placement]
    first: FirstStage | None = None

    @property
    def first_command(self) -> str:
        """The command that trains what this preset builds on."""
        assert self.first is not None
        more = "".join(f" --{name} {value}" for name, value in self.first.options.items())
        return f"tunesmith train {self.first.method}{more}"


def model_names() -> list[str]:
    """Names of the models that have presets, sorted."""
    return sorted(path.stem for path in PRESETS_DIR.glob("*.yaml"))


def preset_names() -> list[str]:
    """Names of all presets, sorted by model."""
    return [f"{model}-{method}" for model in model_names() for method in model_presets(model).methods]


@lru_cache
def model_presets(model: str) -> ModelPresets:
    """Loads the preset file of a model; cached.

    Args:
        model: A name from `model_names`.
    """
    return ModelPresets.model_validate(read_yaml(PRESETS_DIR / f"{model}.yaml"))


def is_preset(name: str) -> bool:
    """Whether `find_preset` knows the name."""
    return _split(name) is not None


def find_preset(name: str, method: object = None) -> Preset:
    """Returns a preset by name.

    Args:
        name: `<model>-<method>`, or just the model.
        method: Overrides the method in the name, if the model supports it; not an objective's, which has one preset.
            Without either, LoRA is used.

    Raises:
        ConfigError: If there is no such model or method.
    """
    parts = _split(name)
    if parts is None:
        raise ConfigError(_unknown(name))
    model, own_method = parts
    presets = model_presets(model)
    can_switch = own_method in (None, *_METHOD_TITLES) and method in _METHOD_TITLES and method in presets.methods
    chosen = str(method) if can_switch else own_method or DEFAULT_METHOD
    entry = presets.methods[chosen]
    options = {**presets.options, "method": chosen, **entry.options}
    gpus = dict(sorted(entry.gpus.items()))
    first = entry.first and entry.first.model_copy(update={"method": f"{model}-{entry.first.method}"})
    return Preset(f"{model}-{chosen}", _summary(presets.title, chosen, entry), options, gpus, first)


def methods_line(model: str) -> str:
    """Lists the methods of a model, as in `there are full, lora and qlora`."""
    *others, last = model_presets(model).methods
    return f"there are {', '.join(others)} and {last}"


def published_config(model_name_or_path: str) -> dict[str, Any] | None:
    """Returns the part of a Hub model's config.json that its preset file keeps; None for models without presets."""
    for presets in map(model_presets, model_names()):
        if presets.model and presets.options["model_name_or_path"] == model_name_or_path:
            return presets.model.config
    return None


def _split(name: str) -> tuple[str, str | None] | None:
    """Splits a preset name into model and method; the method is None if the name is just a model."""
    if name in model_names():
        return name, None
    model, _, method = name.rpartition("-")
    return (model, method) if model in model_names() and method in model_presets(model).methods else None


def _unknown(name: str) -> Mistake:
    model, _, method = name.rpartition("-")
    if model in model_names():
        return Mistake("preset", name, f"is unknown: {model} has no method {method!r}", methods_line(model))
    listed = f"use MODEL-METHOD, such as qwen3-8b-lora; the models are {', '.join(model_names())}"
    return Mistake("preset", name, "is unknown", nearest(name, [*preset_names(), *model_names()], listed))


def _summary(title: str, method: str, preset: Method) -> str:
    """Summarizes a preset, as in `Qwen3 8B with LoRA: estimated 19 GiB on a GPU of 24 GiB`.

    Picks the smallest number of GPUs that needs no host memory, if there is one.
    """
    trained = _METHOD_TITLES[preset.options.get("method", method)].format(title)
    if method in OBJECTIVES:
        trained = f"{trained}, {OBJECTIVES[method].label}"
    elif method == PRETRAIN:
        trained = f"{trained}, continued pre-training"
    if preset.measured:
        return f"{trained}: measured {preset.measured}"
    # Where no strategy fits, the line still says what it would take.
    able = {count: entry for count, entry in preset.gpus.items() if entry.strategies} or preset.gpus
    count, entry = min(able.items(), key=lambda item: (item[1].host_gib > 0, item[0]))
    gpus = f"a GPU of {preset.gpu_gib} GiB" if count == 1 else f"each of {count} GPUs of {preset.gpu_gib} GiB"
    host = f", {entry.host_gib:g} GiB of host memory per process" if entry.host_gib else ""
    return f"{trained}: estimated {entry.gib:g} GiB on {gpus}{host}"
