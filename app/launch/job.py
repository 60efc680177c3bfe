"""What `tunesmith train` and `resume` were asked for: words -> config, strategy and devices, checked together."""

from __future__ import annotations

import contextlib
import os
import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from app.console import shortened
from app.hardware import Devices
from app.launch.device_fit import fit_devices
from app.launch.machines import as_words, choose_machines, devices_here, folder_mistakes
from app.runs.runs import gpu_ids, true_state, world_size
from trainers.config.options import (
    LAUNCH_OPTIONS,
    ConfigError,
    TrainConfig,
    absolute_paths,
    unknown_option,
)  # fmt: skip
from trainers.config.parse import Request, parse_request, preset_names, preset_path, read_yaml
from trainers.config.validation import build, ignored_choices
from trainers.run.compatibility import changes_since_save
from trainers.run.disk import check_room, local_tensors
from trainers.run.folder import END_STATES, LIVE_STATES, RunFolder, new_run_id
from trainers.strategy.strategy import Strategy, load_strategy, resolve

_SWITCHES = ("json", "quiet", "help", "check", "detach", "force")
_PATHS = ("model_name_or_path", "dataset_name", "eval_dataset_name", "chat_template", "cache_dir", "runs_dir",
          "output_dir", "resume_from_checkpoint")  # fmt: skip
_DATA_SUFFIXES = (".jsonl", ".json", ".csv", ".tsv", ".parquet", ".txt", ".md", ".arrow", ".gz", ".zst")
_YAML_SUFFIXES = (".yaml", ".yml")
_LONGEST_NAME, _LONGEST_PATH = 255, 4095


@dataclass
class Words:
    """A command line, sorted.

    Args:
        names: positional arguments: the preset, or the run.
        values: those of the `LAUNCH_OPTIONS`, such as `--strategy`.
        switches: those of `--json`, `--quiet`, `--help`, `--check`, `--detach` and `--force` that were given.
        options: everything else, for `trainers.config.parse.parse_request`.
    """

    names: list[str] = field(default_factory=list)
    values: dict[str, str] = field(default_factory=dict)
    switches: set[str] = field(default_factory=set)
    options: list[str] = field(default_factory=list)


def sort_words(words: Sequence[str]) -> Words:
    """Sorts a command line; an option takes the word after it unless that is an option too.

    Raises:
        ConfigError: when one of the own options has no value or is given twice.
    """
    sorted_words, mistakes = Words(), []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        name, equals, value = word.removeprefix("--").partition("=")
        if word == "-h":
            sorted_words.switches.add("help")
        elif not word.startswith("--"):
            sorted_words.names.append(word)
        elif name in _SWITCHES and not equals:
            sorted_words.switches.add(name)
        elif name in LAUNCH_OPTIONS:
            value = value if equals else rest.pop(0) if rest and not rest[0].startswith("--") else ""
            if not value or name in sorted_words.values:
                mistakes.append(f"--{name} {'is given twice' if value else 'has no value'}; write --{name} VALUE once")
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
        notes: lines that say what was chosen for the user.
        attempt: of the run when a resume was asked for; another number at its start means that another came first.
    """

    config: TrainConfig
    strategy: Strategy
    devices: Devices
    run: RunFolder
    resume_from: str | None = None
    warnings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    attempt: int | None = None


class Mistakes:
    """Collects what several checks refuse, so that the user sees all of it at once."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def __enter__(self) -> Mistakes:
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
    mistakes, request = Mistakes(), Request()
    with mistakes:
        request = parse_request(words.options)
    request.preset = named_preset(words.names, request.preset, mistakes)
    if "force" in words.switches:
        request.options["force_resume"] = True
        if "resume_from_checkpoint" not in request.options:
            mistakes.lines.append("--force is for going on from a checkpoint; name it with --resume_from_checkpoint")
    return job_of(request, words.values, mistakes, None)


def for_verb(line: str, verb: str, own: Sequence[str]) -> str:
    """A mistake of `train` in the words of another verb: of an unknown option the nearest may be one of its own.

    Args:
        line: the mistake.
        verb: such as `bench`.
        own: the verb's own options.
    """
    start = "unknown option "
    if not line.startswith(start):
        return line
    name = line.removeprefix(start).partition("; ")[0]
    return unknown_option(name, [*own, *TrainConfig.model_fields]).replace("`tunesmith train", f"`tunesmith {verb}")


def named_preset(names: list[str], flag: str | None, mistakes: Mistakes) -> str | None:
    """The preset, given as the positional argument or after `--preset`; other positional arguments are mistakes.

    Raises:
        ConfigError: when a file is given as a positional argument, with the option for it.
    """
    files = [word for word in names if _names_a_file(word)]
    if files:  # what else is missing follows from it
        raise ConfigError([*mistakes.lines, *map(_file_line, files)])
    mistakes.lines += [f"unexpected argument {word!r}; options are written --name value" for word in names[1:]]
    if names and flag and names[0] != flag:
        mistakes.lines.append(f"two presets, {names[0]!r} and {flag!r}; name one")
    return names[0] if names else flag


def _names_a_file(word: str) -> bool:
    """Whether a word that should be a preset names a file or folder instead: it is there, or ends like data or YAML."""
    if word in preset_names():
        return False
    with contextlib.suppress(OSError, ValueError):
        if Path(word).expanduser().exists():
            return True
    return "/" in word or Path(word).suffix.lower() in (*_DATA_SUFFIXES, *_YAML_SUFFIXES)


def _file_line(word: str) -> str:
    """The option to use for a file or folder given as a positional argument."""
    shown, path = shortened(word), Path(word).expanduser()
    if path.suffix.lower() in _YAML_SUFFIXES:
        return f"{shown!r} is no preset; a config file is named with --config {shlex.quote(shown)}"
    with contextlib.suppress(OSError, ValueError):
        if (path / "config.json").is_file():
            return f"{shown!r} is no preset; a model is named with --model_name_or_path {shlex.quote(shown)}"
    return (
        f"{shown!r} is no preset; data is named with --dataset_name {shlex.quote(shown)}, after a preset "
        "(`tunesmith presets`) or a --model_name_or_path"
    )


def resume_job(run: RunFolder, words: Words) -> Job:
    """The job that goes on with a stopped or failed run; options given again replace the old ones.

    Raises:
        ConfigError: with every mistake at once; also when the run is done or still lives.
    """
    attempt = run_attempt(run)
    # On another machine than 0 it may have been resumed already.
    if words.values.get("machine_rank", "0") == "0" or true_state(run)["state"] == "done":
        refuse_unresumable(run)
    mistakes, request = Mistakes(), Request()
    with mistakes:
        request = parse_request(words.options)
    fixed = sorted({"output_dir", "resume_from_checkpoint", "runs_dir"} & set(request.options))
    fixed += [name for name in ("preset", "config") if getattr(request, name)]
    mistakes.lines += [f"--{name} cannot change when a run is resumed; leave it out" for name in fixed]
    request.config, request.preset = str(run.config), None
    request.options["force_resume"] = "force" in words.switches  # for this once: config.yaml may say otherwise
    job = job_of(request, _as_before(run, words.values), mistakes, run)
    job.attempt = attempt
    return job


def clone_job(run: RunFolder, words: Words) -> Job:
    """The job of a new run with the settings of another; options given replace the old ones.

    Raises:
        ConfigError: with every mistake at once.
    """
    mistakes, request = Mistakes(), Request()
    with mistakes:
        request = parse_request(words.options)
    if "force" in words.switches:
        mistakes.lines.append("--force is for `resume`; a clone begins at step 0: leave it out")
    if request.preset or request.config:
        mistakes.lines.append("a clone has its run's config; leave --preset and --config out")
    request.config, request.preset = str(run.config), None
    return job_of(request, _as_before(run, words.values), mistakes, None)


def run_attempt(run: RunFolder) -> int:
    """How often the run was started before its last start; -1 when its state does not tell."""
    attempt = (run.read_state() or {}).get("attempt")
    return attempt if isinstance(attempt, int) else -1


def refuse_unresumable(run: RunFolder) -> None:
    """Raises ConfigError when the run is done or lives."""
    state, path = true_state(run)["state"], shlex.quote(str(run.path))
    if state == "done":
        again = f"tunesmith train --config {shlex.quote(str(run.config))} --max_steps N"
        raise ConfigError(f"run {run.id} is done; to train on its config again: {again}")
    if state not in ("stopped", "failed"):
        raise ConfigError(f"run {run.id} is {state}; stop it first with `tunesmith stop {path}`")


def told(value: Any) -> str:
    """A value as one would write it on the command line, and not longer than a line."""
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "none"}[value]
    if isinstance(value, dict):
        value = [f"{key}={entry}" for key, entry in value.items()]
    return shortened(",".join(value) if isinstance(value, list) else str(value))


def _as_before(run: RunFolder, values: dict[str, str]) -> dict[str, str]:
    """Devices and strategy as in the last attempt, where nothing else is asked for."""
    before = {"strategy": str(run.accelerate)} if _keeps_strategy(run, values) else {}
    if not {"gpus", "num_processes"} & set(values):
        ids, processes = gpu_ids(run), world_size(run)
        before.update({"gpus": ",".join(map(str, ids))} if ids else {})
        before.update({"num_processes": str(processes)} if processes and not ids else {})
    with contextlib.suppress(ConfigError):
        before.update(as_words(read_yaml(run.accelerate)) if "num_machines" not in values else {})
    return {**before, **values}


def _keeps_strategy(run: RunFolder, values: dict[str, str]) -> bool:
    """Whether the last attempt's strategy stays: none is named, and it can run on the processes that are asked for.

    One process needs no other ranks' strategy; a sharded run on fewer processes stays sharded, for its memory.
    """
    if "strategy" in values:
        return False
    try:
        machines = choose_machines(values, read_yaml(run.accelerate))
        processes = devices_here(values, machines, None).num_processes
        if not {"gpus", "num_processes"} & set(values) or processes == world_size(run):
            return True
        stored = load_strategy(str(run.accelerate))
        resolve(stored, processes, str(stored.values.get("mixed_precision") or "no"))
    except ConfigError:
        return "num_processes" not in values and "gpus" not in values
    return processes > 1


def job_of(request: Request, values: dict[str, str], mistakes: Mistakes, run: RunFolder | None) -> Job:
    """The job of a request.

    Args:
        request: preset, config file and options.
        values: of the `LAUNCH_OPTIONS`, such as `--strategy`.
        mistakes: those found so far; more are added.
        run: the one that is resumed; None for a new one.

    Raises:
        ConfigError: with every mistake at once.
    """
    config = strategy = devices = fit = None
    with mistakes:
        config = _config(request, mistakes)
    named = values.get("strategy")
    with mistakes:
        strategy = load_strategy(named) if named else None
    with mistakes:
        machines = choose_machines(values, strategy.values if strategy else {})
        mistakes.lines += folder_mistakes(config, machines) if run is None else []
        devices = devices_here(values, machines, strategy.num_processes if strategy else None)
    with mistakes:
        if config and devices and (strategy or not named):
            fixed = bool({"gpus", "num_processes"} & set(values))
            fit = fit_devices(config, strategy, devices, fixed, request.chosen)
            config, strategy, devices = fit.config, fit.strategy, fit.devices
    with mistakes:
        member = bool(devices and devices.machine_rank)  # machine 0 decides whether the folder is free
        folder = run or (_new_folder(config, member) if config else None)
        if folder and config:
            if not member:
                folder.refuse_foreign()
            mistakes.lines += folder.mistakes_in(config)
            _check_room(config, folder)
            source = "auto" if run else config.resume_from_checkpoint
            mistakes.lines += changes_since_save(folder, config, source) if not member else []
    mistakes.refuse()
    if not (config and strategy and devices and folder and fit):
        raise AssertionError("no mistake, and yet no job")
    warnings = fit.warnings + ignored_choices(config) + strategy.cautions(config) + _promise(config, strategy)
    resume_from = "auto" if run else config.resume_from_checkpoint
    return Job(config, strategy, devices, folder, resume_from, warnings, [*request.notes, *fit.notes])


def _promise(config: TrainConfig, strategy: Strategy) -> list[str]:
    """The warning of the training script in its words, so that the display can leave its echo out."""
    outside = config.outside_parity() + strategy.outside_parity()
    return [f"outside the promise that the strategy never changes the model: {', '.join(outside)}"] if outside else []


def _config(request: Request, mistakes: Mistakes) -> TrainConfig:
    """The validated config; where preset or file cannot be read, what else is wrong is found all the same."""
    unread = Mistakes()
    if request.preset:
        with unread:
            preset_path(request.preset)
    if request.config:
        with unread:
            read_yaml(Path(request.config))
    if not unread.lines:
        config = request.resolve()
        if too_long := _too_long(config):
            raise ConfigError(too_long)
        return absolute_paths(config)
    mistakes.lines += unread.lines
    try:
        return build(request.options)
    except ConfigError as error:
        raise ConfigError([line for line in error.mistakes if " is missing; " not in line]) from None


def _too_long(config: TrainConfig) -> list[str]:
    """A line for each path or name that no file system holds; every look for such a file is an OSError."""
    lines = []
    for name in _PATHS:
        value = str(getattr(config, name) or "")
        longest = max((len(os.fsencode(part)) for part in value.split("/")), default=0)
        size, limit = (longest, _LONGEST_NAME) if longest > _LONGEST_NAME else (len(os.fsencode(value)), _LONGEST_PATH)
        if size > limit:
            lines.append(f"{name}={shortened(value)} is too long ({size} bytes, at most {limit}); check the value")
    return lines


def _new_folder(config: TrainConfig, member: bool) -> RunFolder:
    """The folder of a run that `train` starts; it holds one only when that is resumed, or started by machine 0.

    Raises:
        ConfigError: when it holds a run that is not resumed, or one that lives.
    """
    try:
        run = RunFolder(Path(config.output_dir).expanduser() if config.output_dir else _free_folder(config))
        source = config.resume_from_checkpoint
        path = Path(source or "").expanduser()
        inside = source == "auto" or (source and path.resolve().parent == run.checkpoints.resolve())
        if member and not inside and (run.read_state() or {}).get("state") in END_STATES:
            raise ConfigError(f"output_dir={run.path} holds a run that has ended; resume it, or use another")
        if member:
            return run
        if not inside:
            run.refuse_used()
        elif run.exists() and true_state(run)["state"] in LIVE_STATES:
            raise ConfigError(f"output_dir={run.path} holds a run that is not over; stop it first, or use another")
    except OSError as error:
        option = "output_dir" if config.output_dir else "runs_dir"
        value = shortened(str(getattr(config, option)))
        raise ConfigError(f"{option}={value} cannot be used: {error.strerror}; choose another folder") from None
    return run


def _free_folder(config: TrainConfig) -> Path:
    name = config.run_name or config.preset or config.model_name_or_path
    ids = (new_run_id(name, time.time(), number) for number in count(os.getpid()))
    folders = (Path(config.runs_dir).expanduser() / run_id for run_id in ids)
    return next(folder for folder in folders if not folder.exists())


def writable_parent(path: Path, option: str, way: str) -> Path:
    """The nearest folder at or above `path` that is there.

    Raises:
        ConfigError: naming the option, when `path` cannot be made in it.
    """
    shown = f"{option}={shortened(str(path))} cannot be made"
    try:
        parent = next(folder for folder in (path, *path.parents) if folder.exists())
        is_folder = parent.is_dir()
    except OSError as error:
        raise ConfigError(f"{shown}: {error.strerror}; {way}") from None
    if not is_folder:
        raise ConfigError(f"{shown}: {shortened(str(parent))} is a file and not writable as a folder; {way}")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise ConfigError(f"{shown}: {shortened(str(parent))} is not writable; {way}")
    return parent


def _check_room(config: TrainConfig, run: RunFolder) -> None:
    """Refuses a folder that cannot be written, or whose disk is too small; the pre-flight check knows more of it."""
    writable_parent(run.path, "output_dir", "choose another runs_dir")
    check_room(config, local_tensors(config), run.path)
