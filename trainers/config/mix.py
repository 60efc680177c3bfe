"""A mix of training data: a YAML file that lists sources and their weights. Imports no torch.

stopping_strategy: first_exhausted
sources:
  - dataset_name: chat.jsonl
    weight: 3
  - dataset_name: org/code
    weight: 1
    limit: 20000
    loss: all
"""

from __future__ import annotations

import os
import re
from collections import Counter
from fractions import Fraction
from math import gcd, lcm
from pathlib import Path, PurePath
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from trainers.config.mistakes import ConfigError, Mistake, nearest
from trainers.config.option_types import Pairs
from trainers.config.options import EMBEDDED, TrainConfig
from trainers.config.remote_data import has_data_suffix, is_url, sqlite_file
from trainers.config.yaml_file import read_yaml

MAX_SOURCES = 100
PERIOD = 10**6
"""Rows after which the order of sources repeats, at most; shares that need more are rounded to so many parts."""
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
_NONE = ("", "none", "null")
_NAME = re.compile(r"[\w.+-]{1,40}")
_OWN = ("dataset_query", "dataset_config_name", "dataset_split", "dataset_format", "columns", "sample_by",
        "chat_template")  # fmt: skip
"""Options of the run that a source may set for itself."""


class Source(BaseModel):
    """One source of a mix.

    Attributes:
        dataset_name: A file, folder, glob or Hub id; relative to the folder of the mix file.
        name: Its name in logs and metrics; by default that of the file, folder or data set.
        weight: Its share of the packed rows, relative to the other weights.
        limit: Use only its first rows.
        loss: `assistant` or `all`: what is trained; default: the run's `assistant_only_loss`.
        streaming: Whether it is read as the run goes; default: the run's `dataset_streaming`.

    The others are options of the run, which the source sets for itself.
    """

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    dataset_name: Annotated[str, Field(min_length=1)]
    name: str | None = None
    weight: Annotated[float, Field(ge=1e-6, le=1e15, strict=True)] = 1.0
    limit: Annotated[int | None, Field(ge=1, le=10**12, strict=True)] = None
    loss: Literal["assistant", "all"] | None = None
    streaming: Annotated[bool | None, Field(strict=True)] = None
    dataset_query: str | None = None
    dataset_config_name: str | None = None
    dataset_split: str | None = None
    dataset_format: str | None = None
    columns: Pairs | None = None
    sample_by: str | None = None
    chat_template: str | None = None

    @property
    def label(self) -> str:
        """Its name in logs and metrics."""
        if self.name is not None:
            return self.name
        name = PurePath(self.dataset_name.partition("?")[0]).name
        while has_data_suffix(name):  # and of the compression
            name = PurePath(name).stem
        stem = re.sub(r"[^\w.+-]+", "-", name).strip("-")
        return stem[:40] or "data"


class Mix(BaseModel):
    """The contents of a mix file.

    Attributes:
        sources: At least one; its order is that of the metrics.
        stopping_strategy: An epoch ends before the first source would repeat a row (`first_exhausted`), or once every
            source was read in full, while smaller ones repeat (`all_exhausted`).
    """

    model_config = ConfigDict(extra="forbid")

    sources: Annotated[list[Source], Field(min_length=1, max_length=MAX_SOURCES)]
    stopping_strategy: Literal["first_exhausted", "all_exhausted"] = "first_exhausted"

    @property
    def names(self) -> list[str]:
        """The names of the sources."""
        return [source.label for source in self.sources]

    def dump(self) -> str:
        """The mix as YAML."""
        return yaml.safe_dump(self.model_dump(exclude_none=True), sort_keys=False, allow_unicode=True)

    def shares(self) -> list[int]:
        """Integers in the ratio of the weights as they are written, of a sum of at most about `PERIOD`."""
        exact = [Fraction(str(source.weight)) for source in self.sources]
        scale = lcm(*(weight.denominator for weight in exact))
        integers = [int(weight * scale) for weight in exact]
        common, total = gcd(*integers), sum(integers)
        if total // common > PERIOD:
            return [max(1, round(integer * PERIOD / total)) for integer in integers]
        return [integer // common for integer in integers]


def read_mix(file: str) -> Mix:
    """Reads a mix file; local paths in it become absolute.

    Raises:
        ConfigError: If it cannot be read, has unknown keys or invalid values, or two sources of one name.
    """
    try:
        path = Path(file).expanduser()
        values = read_yaml(path)
    except (OSError, RuntimeError) as error:  # a name that is too long, or of nobody's home
        raise ConfigError(_mistake(file[:200], f"cannot be read: {error}", "check the path")) from None
    try:
        mix = Mix.model_validate(values)
    except ValidationError as error:
        raise ConfigError([_explain(file, dict(detail)) for detail in error.errors()]) from None
    try:
        sources = [source.model_copy(update=_absolute(file, source, path.absolute().parent)) for source in mix.sources]
    except (OSError, RuntimeError) as error:
        raise ConfigError(_mistake(file, f"names a file that cannot be: {error}", "check its sources")) from None
    mix = mix.model_copy(update={"sources": sources})
    for name, count in Counter(mix.names).items():  # of the full paths: `.` has the name of its folder
        if count > 1:
            raise ConfigError(
                _mistake(file, f"has {count} sources of the name {name!r}", "give each a `name` of its own")
            )
        if not _NAME.fullmatch(name):
            problem = f"names a source {name!r}"
            raise ConfigError(_mistake(file, problem, "use at most 40 letters, digits and any of . _ + -"))
    return mix


def config_of(config: TrainConfig, source: Source) -> TrainConfig:
    """The config that reads one source as the only training data.

    Args:
        config: The run's, with a mix.
        source: One of its sources.

    Raises:
        ConfigError: If an option of the source is invalid.
    """
    from trainers.config.validation import build

    chosen = {name: value for name in _OWN if (value := getattr(source, name)) is not None}
    if source.loss is not None:
        chosen["assistant_only_loss"] = source.loss == "assistant"
    if source.streaming is not None and not config.eval_only:
        chosen["dataset_streaming"] = source.streaming
    values = {**config.model_dump(), "mix": None, "max_train_samples": source.limit, **chosen}
    try:
        return build({**values, "dataset_name": source.dataset_name})
    except ConfigError as error:
        raise ConfigError(error.mistakes, source=f"{config.mix}: source {source.label}") from None


def _absolute(file: str, source: Source, folder: Path) -> dict[str, str]:
    """The local paths of a source, made absolute from the folder of its mix; also globs. Hub ids stay as they are.

    Raises:
        ConfigError: If a name is no data, or a file of the current folder alone.
        OSError, RuntimeError: If a name cannot be that of a file.
    """
    absolute = {}
    if source.chat_template is not None and source.chat_template.lower() not in _NONE:
        absolute["chat_template"] = os.path.normpath(folder / Path(source.chat_template).expanduser())
    name = source.dataset_name
    if name.lower() in _NONE:
        raise ConfigError(
            _mistake(file, f"names {name!r} as the data of a source", "name a file, a folder or a Hub id")
        )
    if name == EMBEDDED:
        return absolute
    if is_url(name):
        database = sqlite_file(name)
        return absolute if database is None else {**absolute, "dataset_name": f"sqlite:///{folder / database}"}
    path = folder / Path(name).expanduser()
    if not path.exists() and _HUB_ID.fullmatch(name) and not has_data_suffix(name):
        if Path(name).exists():
            problem = f"names {name}, which is in the current folder and not beside the mix"
            raise ConfigError(_mistake(file, problem, "write the path from the folder of the mix, or the full one"))
        return absolute
    return {**absolute, "dataset_name": os.path.normpath(path)}


def _explain(file: str, detail: dict[str, Any]) -> Mistake:
    """Converts a pydantic error to a mistake."""
    where = [str(part) for part in detail["loc"]]
    if where[0] == "sources" and len(where) > 1:
        where = [f"source {int(where[1]) + 1}", *where[2:3]]
    location, value = ": ".join(where), repr(detail["input"])[:80]
    if detail["type"] == "extra_forbidden":
        known = list(Source.model_fields if len(where) > 1 else Mix.model_fields)
        return _mistake(file, f"has an unknown key, {location}", nearest(where[-1], known, f"use {', '.join(known)}"))
    if detail["type"] == "missing":
        return _mistake(file, f"has no {location}", "list the data under `sources`, each with a `dataset_name`")
    if detail["type"] == "model_type":
        return _mistake(file, f"{location}: {value} is no source", "write `- dataset_name: ...`")
    return _mistake(
        file, f"{location}={value} is refused: {detail['msg'][0].lower()}{detail['msg'][1:]}", "see docs/data.md"
    )


def _mistake(file: str, problem: str, remedy: str) -> Mistake:
    return Mistake("mix", file, problem, remedy)
