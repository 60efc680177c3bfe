"""What `tunesmith train` and `resume` were asked for: words -> config, strategy and devices, checked together."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from app.hardware import Devices, choose_devices
from app.runs import gpu_ids, true_state, world_size
from trainers.config import EMBEDDED, ConfigError, TrainConfig, absolute_paths, build, ignored_choices
from trainers.options import Request, parse_request, preset_path, read_yaml
from trainers.run_folder import LIVE_STATES, RunFolder, new_run_id
from trainers.strategies import Strategy, default_strategy, load_strategy, resolve

_VALUES = ("strategy", "gpus", "num_processes")
_SWITCHES = ("json", "quiet", "help", "check")
_LOG_ROOM = 2_000_000


@dataclass
class Words:
    """A command line, sorted.

    Args:
        names: words that stand alone: the preset, or the run.
        values: `--strategy`, `--gpus` and `--num_processes`.
        switches: those of `--json`, `--quiet`, `--help` and `--check` that were given.
        options: everything else, for `trainers.options.parse_request`.
    """

    names: list[str] = field(default_factory=list)
    values: dict[str, str] = field(default_factory=dict)
    switches: set[str] = field(default_factory=set)
    options: list[str] = field(default_factory=list)


def sort_words(words: Sequence[str]) -> Words:
    """Sorts a command line; an option takes the word after it unless that is an option too.

    Raises:
        ConfigError: when one of the own options has no value or stands twice.
    """
    sorted_words, mistakes = Words(), []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        name, equals, value = word.removeprefix("--").partition("=")
        if not word.startswith("--"):
            sorted_words.names.append(word)
        elif name in _SWITCHES and not equals:
            sorted_words.switches.add(name)
        elif name in _VALUES:
            value = value if equals else rest.pop(0) if rest and not rest[0].startswith("--") else ""
            if not value or name in sorted_words.values:
                mistakes.append(f"--{name} {'stands twice' if value else 'has no value'}; write --{name} VALUE once")
            sorted_words.values[name] = value
        else:
            sorted_words.options.append(word)
            if not equals and rest and not rest[0].startswith("--"):
                sorted_words.options.append(rest.pop(0))
    if mistakes:
        raise ConfigError(mistakes)
    return sorted_words


@dataclass
class Job:
    """A run that can be started.

    Args:
        config: validated, paths absolute.
        strategy: resolved for the devices.
        devices: GPUs and processes.
        run: its folder; holds a run only when resumed.
        resume_from: `auto` or a checkpoint's path, when it goes on from one.
        warnings: lines that the user should read.
    """

    config: TrainConfig
    strategy: Strategy
    devices: Devices
    run: RunFolder
    resume_from: str | None = None
    warnings: list[str] = field(default_factory=list)


class _Mistakes:
    """Collects what several checks refuse, so that the user sees all of it at once."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def __enter__(self) -> _Mistakes:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if isinstance(error, ConfigError):
            self.lines += [line for line in error.mistakes if line not in self.lines]
            return True
        return False

    def refuse(self) -> None:
        if self.lines:
            raise ConfigError(self.lines)


def train_job(words: Words) -> Job:
    """The job of `tunesmith train`.

    Raises:
        ConfigError: with every mistake in options, strategy and devices at once.
    """
    mistakes, request = _Mistakes(), Request()
    with mistakes:
        request = parse_request(words.options)
    request.preset = _preset(words.names, request.preset, mistakes)
    return _job(request, words.values, mistakes, None)


def _preset(names: list[str], flag: str | None, mistakes: _Mistakes) -> str | None:
    mistakes.lines += [f"{word!r} stands alone; options are written --name value" for word in names[1:]]
    if names and flag and names[0] != flag:
        mistakes.lines.append(f"two presets, {names[0]!r} and {flag!r}; name one")
    return names[0] if names else flag


def resume_job(run: RunFolder, words: Words) -> Job:
    """The job that goes on with a stopped or failed run; options given again replace the old ones.

    Raises:
        ConfigError: with every mistake at once; also when the run is done or still lives.
    """
    state = true_state(run)["state"]
    if state == "done":
        raise ConfigError(
            f"run {run.id} is done; to train on its config again: tunesmith train --config {run.config} --max_steps N"
        )
    if state not in ("stopped", "failed"):
        raise ConfigError(f"run {run.id} is {state}; stop it first with `tunesmith stop {run.id}`")
    mistakes, request = _Mistakes(), Request()
    with mistakes:
        request = parse_request(words.options)
    fixed = sorted({"output_dir", "resume_from_checkpoint", "runs_dir"} & set(request.options))
    fixed += [name for name in ("preset", "config") if getattr(request, name)]
    mistakes.lines += [f"--{name} cannot change when a run is resumed; leave it out" for name in fixed]
    request.config, request.preset = str(run.config), None
    return _job(request, _as_before(run, words.values), mistakes, run)


def _as_before(run: RunFolder, values: dict[str, str]) -> dict[str, str]:
    """Devices and strategy as in the last attempt, where nothing else is asked for."""
    before = {} if "strategy" in values else {"strategy": str(run.accelerate)}
    if not {"gpus", "num_processes"} & set(values):
        ids, processes = gpu_ids(run), world_size(run)
        before.update({"gpus": ",".join(map(str, ids))} if ids else {})
        before.update({"num_processes": str(processes)} if processes and not ids else {})
    return {**before, **values}


def _job(request: Request, values: dict[str, str], mistakes: _Mistakes, run: RunFolder | None) -> Job:
    config = strategy = devices = None
    with mistakes:
        config = _config(request, mistakes)
    named = values.get("strategy")
    with mistakes:
        strategy = load_strategy(named) if named else None
    with mistakes:
        given = strategy.num_processes if strategy else None
        devices = choose_devices(values.get("gpus"), values.get("num_processes"), strategy_processes=given)
    with mistakes:
        if devices and not named:
            strategy = load_strategy(default_strategy(devices.num_processes))
        if config and strategy and devices:
            strategy = resolve(strategy, devices.num_processes, config.mixed_precision)
            config.accumulation_steps(strategy.data_parallel_size)
    with mistakes:
        folder = run or (_new_folder(config) if config else None)
        if folder and config:
            _check_room(config, folder)
    mistakes.refuse()
    if not (config and strategy and devices and folder):
        raise AssertionError("no mistake, and yet no job")
    warnings = ignored_choices(config) + [f"{name} is outside the parity promise" for name in config.outside_parity()]
    resume_from = "auto" if run else config.resume_from_checkpoint
    return Job(config, strategy, devices, folder, resume_from, warnings)


def _config(request: Request, mistakes: _Mistakes) -> TrainConfig:
    """The validated config; where preset or file cannot be read, what else is wrong is found all the same."""
    unread = _Mistakes()
    if request.preset:
        with unread:
            preset_path(request.preset)
    if request.config:
        with unread:
            read_yaml(Path(request.config))
    if not unread.lines:
        return absolute_paths(request.resolve())
    mistakes.lines += unread.lines
    try:
        return build(request.options)
    except ConfigError as error:
        raise ConfigError([line for line in error.mistakes if " is missing; " not in line]) from None


def _new_folder(config: TrainConfig) -> RunFolder:
    """The folder of a run that `train` starts.

    Raises:
        ConfigError: when it holds a run that is not resumed, or one that lives.
    """
    name = config.run_name or config.preset or config.model_name_or_path
    ids = (new_run_id(name, time.time(), number) for number in count(os.getpid()))
    folders = (Path(config.runs_dir).expanduser() / run_id for run_id in ids)
    free = next(folder for folder in folders if not folder.exists())
    run = RunFolder(Path(config.output_dir).expanduser() if config.output_dir else free)
    if config.resume_from_checkpoint is None:
        run.refuse_used()
    elif run.exists() and true_state(run)["state"] in LIVE_STATES:
        raise ConfigError(f"output_dir={run.path} holds a run that is not over; stop it first, or use another")
    return run


def _check_room(config: TrainConfig, run: RunFolder) -> None:
    """Refuses a folder that cannot be written, or whose disk is clearly too small for checkpoints and export."""
    parent = next(folder for folder in (run.path, *run.path.parents) if folder.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise ConfigError(f"output_dir={run.path} cannot be made: {parent} is not writable; choose another runs_dir")
    disk = os.statvfs(parent)
    free, needed = disk.f_bavail * disk.f_frsize, _bytes_needed(config)
    if free < needed:
        raise ConfigError(
            f"output_dir={run.path}: this run needs at least {needed:,} bytes and {free:,} are free; "
            "free some, or choose another runs_dir"
        )


def _bytes_needed(config: TrainConfig) -> int:
    """A low estimate: three times the base model's files for full training, a twentieth of them for adapters."""
    if config.model_name_or_path == EMBEDDED:
        from trainers.embedded import BASE_DIR

        folder = BASE_DIR
    else:
        folder = Path(config.model_name_or_path)
    base = sum(path.stat().st_size for path in folder.glob("*.safetensors")) if folder.is_dir() else 0
    return _LOG_ROOM + (3 * base if config.method == "full" or config.merge_adapter else base // 20)
