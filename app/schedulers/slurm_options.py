"""The options of a SLURM job, from the command line and from files with a site's defaults."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from app.console import shortened
from trainers.config.mistakes import ConfigError, Mistake
from trainers.config.yaml_file import read_yaml

REPOSITORY_FILE = "tunesmith-site.yaml"
"""Defaults that a repository brings along, in the working folder; it may set only `REPOSITORY_OPTIONS`."""
REPOSITORY_OPTIONS = ("partition", "account", "time", "gpus_per_node")
_OWN = (
    "nodes", "ntasks", "ntasks-per-node", "gpus-per-node", "cpus-per-task", "signal", "requeue", "no-requeue", "output",
    "error", "open-mode", "job-name", "wrap", "array", "parsable", "wait", "test-only", "chdir", "export", "dependency",
    "partition", "account", "qos", "time", "constraint", "container",
)  # fmt: skip
"""Options of `sbatch` that the script sets itself, so that they cannot be extras."""
_WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9._,:+@/-]{0,254}")
_CONSTRAINT = re.compile(r"[A-Za-z0-9(\[][A-Za-z0-9._,:+@/|&*()\[\]-]{0,254}")
_TIME = re.compile(r"\d{1,9}|\d{1,9}:\d{2}|\d{1,9}:\d{2}:\d{2}|\d{1,6}-\d{1,2}(:\d{2}){0,2}")
_EXTRA = re.compile(r"(?:--)?([a-z][a-z0-9-]{0,60})(=[A-Za-z0-9._,:+@/|&*()\[\]=%-]{1,250})?")


def _matching(pattern: re.Pattern[str], expected: str) -> AfterValidator:
    def check(value: str) -> str:
        if not pattern.fullmatch(value):
            raise ValueError(f"is not {expected}")
        return value

    return AfterValidator(check)


def _extras(value: str) -> str:
    """Checks `key=value` words, with or without dashes; an option that the script sets itself is refused."""
    if "\n" in value or "\r" in value:
        raise ValueError("has a line end")
    try:
        parts = shlex.split(value)
    except ValueError:
        raise ValueError("has an open quote") from None
    for word in parts:
        match = _EXTRA.fullmatch(word)
        if not match:
            raise ValueError(f"has {shortened(word)!r}, which is not key or key=value")
        if match[1] in _OWN:
            raise ValueError(f"sets --{match[1]}, which Tunesmith sets itself")
    return " ".join(f"--{word.removeprefix('--')}" for word in parts)


_Word = Annotated[str, _matching(_WORD, "a name of letters, digits and ._,:+@/-")]


class SlurmOptions(BaseModel):
    """The options of a job.

    Args:
        nodes: number of nodes.
        gpus_per_node: GPUs, and processes, on each node; 0: processes on the CPU.
        cpus_per_node: CPUs of each node that the job gets; default: the site's.
        partition: partition to submit to.
        account: account to charge.
        qos: quality of service.
        time: time limit as SLURM writes it, such as `30` (minutes), `8:00:00` or `2-00:00:00`.
        constraint: features that the nodes must have.
        container: OCI bundle in which the nodes run the job.
        signal_before: seconds before the time limit at which the run saves and is queued again.
        slurm_extra: further options of `sbatch`, as words `key` or `key=value`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    nodes: int = Field(default=1, ge=1, le=128)
    gpus_per_node: int = Field(default=1, ge=0, le=64)
    cpus_per_node: int | None = Field(default=None, ge=1, le=4096)
    partition: _Word | None = None
    account: _Word | None = None
    qos: _Word | None = None
    time: Annotated[str, _matching(_TIME, "a time limit such as 30, 8:00:00 or 2-00:00:00")] | None = None
    constraint: Annotated[str, _matching(_CONSTRAINT, "a constraint such as a100|h100")] | None = None
    container: Annotated[str, _matching(re.compile(r"/[A-Za-z0-9._+@/-]{0,1000}"), "an absolute path")] | None = None
    signal_before: int = Field(default=120, ge=10, le=65535)
    slurm_extra: Annotated[str, AfterValidator(_extras)] = ""

    @model_validator(mode="after")
    def _saves_before_its_end(self) -> Self:
        limit = _seconds(self.time) if self.time else 0
        if 0 < limit <= self.signal_before:  # 0: no limit
            raise ValueError(f"is over before the run would save, {self.signal_before} seconds before its end")
        return self

    @classmethod
    def read(cls, chosen: Mapping[str, Any], folder: Path | None = None) -> Self:
        """The options given on a command line, completed from the user's site file and that of a repository.

        Args:
            chosen: values by name; they win over both files, and the user's file over the repository's.
            folder: the repository; default: the working folder.

        Raises:
            ConfigError: with every mistake in the files and the values.
        """
        own, theirs = site_file(), (folder or Path.cwd()) / REPOSITORY_FILE
        values = {**_defaults(theirs, REPOSITORY_OPTIONS), **_defaults(own, tuple(cls.model_fields))}
        return cls.checked({**values, **chosen})

    @classmethod
    def checked(cls, values: Mapping[str, Any], source: str = "") -> Self:
        """The options with these values.

        Raises:
            ConfigError: with every mistake, as of the file `source` if given.
        """
        try:
            return cls.model_validate(dict(values))
        except ValidationError as error:
            raise ConfigError([_mistake(part, values) for part in error.errors()], source) from None


def _seconds(limit: str) -> int:
    """Seconds of a time limit as SLURM writes it: `minutes[:seconds]`, `hours:minutes:seconds`, `days-hours[:…]`."""
    days, dash, clock = limit.rpartition("-")
    parts = [int(part) for part in clock.split(":")]
    if dash:
        parts += [0] * (3 - len(parts))
    elif len(parts) < 3:
        parts = [0, *parts, *([0] if len(parts) == 1 else [])]
    hours, minutes, seconds = parts
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


def site_file() -> Path:
    """The user's file with defaults for jobs of all repositories."""
    home = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
    return Path(home).expanduser().absolute() / "tunesmith" / "site.yaml"


def is_site_file(path: str) -> bool:
    """Whether a path is that of a file with defaults for jobs."""
    return Path(path) == site_file() or Path(path).name == REPOSITORY_FILE


def _defaults(path: Path, permitted: tuple[str, ...]) -> dict[str, Any]:
    """The values under `slurm` in a site file; empty if there is no file.

    Raises:
        ConfigError: for anything else in the file, or an option that it may not set.
    """
    if not path.exists():
        return {}
    content = read_yaml(path)
    unknown = [Mistake(key, None, "is not a section of a site file", "use slurm") for key in content if key != "slurm"]
    values = content.get("slurm") or {}
    if unknown or not isinstance(values, dict):
        raise ConfigError(unknown or [Mistake("slurm", None, "is not a mapping", "write option: value")], str(path))
    own = tuple(name for name in values if name in SlurmOptions.model_fields and name not in permitted)
    if own:
        remedy = f"set it in {site_file()}, or on the command line"
        raise ConfigError(
            [Mistake(name, None, "cannot be set by a repository's file", remedy) for name in own], str(path)
        )
    SlurmOptions.checked(values, str(path))
    return {str(key): value for key, value in values.items()}


def _mistake(error: Any, values: Mapping[str, Any]) -> Mistake:
    """The mistake of a validation error of pydantic."""
    if not error["loc"]:  # the only rule across options
        problem = str(error["msg"]).removeprefix("Value error, ")
        return Mistake("time", shortened(str(values.get("time"))), problem, "give it more, or a smaller signal_before")
    name = str(error["loc"][0])
    if error["type"] == "extra_forbidden":
        return Mistake(name, None, "is not an option of a SLURM job", f"use {', '.join(SlurmOptions.model_fields)}")
    problem = str(error["msg"]).removeprefix("Value error, ")
    problem = (
        problem if problem.startswith(("is ", "has ", "sets ")) else f"is refused: {problem[0].lower()}{problem[1:]}"
    )
    sexagesimal = name == "time" and isinstance(values.get(name), int)  # YAML reads 8:00:00 as a number
    remedy = "write it in quotes" if sexagesimal else "check the value"
    return Mistake(name, shortened(str(values.get(name))), problem, remedy)
