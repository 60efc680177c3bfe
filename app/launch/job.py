"""Turns the arguments of `tunesmith train`, `resume` and `clone` into a job: config, strategy and devices, checked."""

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

from app.command_line import Args
from app.console import shortened
from app.hardware import Devices, Gpu
from app.launch.device_fit import fit_devices
from app.launch.machines import as_before, choose_machines, devices_here, folder_mistakes
from app.runs.machines import machine_counts
from app.runs.runs import config_values, gpu_ids, true_state, world_size
from app.runs.scheduled import TITLES, submission
from trainers.config.fields import text_of
from trainers.config.local_paths import INPUT_PATHS, OUTPUT_FOLDERS, absolute_paths
from trainers.config.mistakes import ConfigError, Mistake, Mistakes
from trainers.config.options import TrainConfig
from trainers.config.parse import Request, unexpected_argument
from trainers.config.presets import find_preset, is_preset
from trainers.config.remote_data import has_data_suffix
from trainers.config.validation import MISSING, URL, ignored_choices
from trainers.config.yaml_file import read_yaml
from trainers.run.compatibility import changes_since_save
from trainers.run.disk import check_room, local_tensors
from trainers.run.folder import END_STATES, LIVE_STATES, RunFolder, new_run_id
from trainers.run.from_run import resolve_request
from trainers.strategy.mesh_options import read_sizes, with_sizes
from trainers.strategy.micro_batch import OPTION
from trainers.strategy.strategy import Strategy, load_strategy, resolve

_YAML_SUFFIXES = (".yaml", ".yml")
_LONGEST_NAME, _LONGEST_PATH = 255, 4095


@dataclass
class TrainJob:
    """A run that can be started.

    Args:
        config: validated config with absolute paths.
        strategy: strategy, resolved for the devices.
        devices: GPUs and processes.
        run: the run folder; contains a run only if that is resumed.
        resume_from: `auto` or the path of the checkpoint to resume from; None to start from the beginning.
        warnings: lines that the user should read.
        notes: lines about what was chosen for the user.
        attempt: number of the run's last attempt when the job to resume it was made; if it differs at the start,
            another command has resumed the run meanwhile. None for a new run.
    """

    config: TrainConfig
    strategy: Strategy
    devices: Devices
    run: RunFolder
    resume_from: str | None = None
    warnings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    attempt: int | None = None


def train_job(args: Args) -> TrainJob:
    """The job of `tunesmith train`.

    Raises:
        ConfigError: with all mistakes in options, strategy and devices at once.
    """
    mistakes, request = Mistakes(), args.request
    request.preset = named_preset(args.names, request.preset, mistakes)
    if "force" in args.switches:
        request.options["force_resume"] = True
        if "resume_from_checkpoint" not in request.options:
            mistakes.append(
                Mistake("--force", None, "is for continuing from a checkpoint", "name it with --resume_from_checkpoint")
            )
    return job_of(request, args.launch, mistakes, None)


def named_preset(names: list[str], flag: str | None, mistakes: Mistakes) -> str | None:
    """The preset, given as the positional argument or with `--preset`; other positional arguments are mistakes.

    Args:
        names: the positional arguments.
        flag: value of `--preset`.
        mistakes: mistakes found so far; more are added.

    Raises:
        ConfigError: if a positional argument names a file; says which option to use for it.
    """
    files = [word for word in names if _names_a_file(word)]
    if files:  # reported alone, as other mistakes would only follow from it
        raise ConfigError([*mistakes, *map(_file_mistake, files)])
    mistakes += [unexpected_argument(word) for word in names[1:]]
    if names and flag and names[0] != flag:
        mistakes.append(Mistake("preset", repr(names[0]), f"and {flag!r} are two presets", "choose one"))
    return names[0] if names else flag


def _names_a_file(word: str) -> bool:
    """Whether an argument is a file or folder, not a preset: it exists, or looks like a path of data or YAML."""
    if is_preset(word):
        return False
    with contextlib.suppress(OSError, ValueError):
        if Path(word).expanduser().exists():
            return True
    return "/" in word or has_data_suffix(word) or Path(word).suffix.lower() in _YAML_SUFFIXES


def _file_mistake(word: str) -> Mistake:
    """The option to use for a file or folder given as a positional argument."""
    name, path = shortened(word), Path(word).expanduser()
    if path.suffix.lower() in _YAML_SUFFIXES:
        return Mistake("", None, f"{name!r} is not a preset", f"pass a config file with --config {shlex.quote(name)}")
    with contextlib.suppress(OSError, ValueError):
        if (path / "config.json").is_file():
            remedy = f"pass a model with --model_name_or_path {shlex.quote(name)}"
            return Mistake("", None, f"{name!r} is not a preset", remedy)
    remedy = f"pass data with --dataset_name {shlex.quote(name)}, after a preset (`tunesmith presets`)"
    return Mistake("", None, f"{name!r} is not a preset", f"{remedy} or a --model_name_or_path")


def resume_job(run: RunFolder, args: Args) -> TrainJob:
    """The job that resumes a stopped or failed run on this machine; given options override the stored ones.

    Raises:
        ConfigError: with all mistakes at once; also if the run is done or still live, or a scheduler started it and
            this machine is not asked for.
    """
    if (submitted := submission(run)) and args.own.get("on") != "local":
        again = f"tunesmith resume {shlex.quote(str(run.path))}"
        remedy = f"`{again}`, with the changed options, submits it again; with `--on local` it goes on here"
        raise ConfigError(f"run {run.id} was submitted to {TITLES[submitted['kind']]}; {remedy}")
    if submitted:
        args.launch.setdefault("num_machines", "1")  # not the nodes that the scheduler chose
    attempt = run_attempt(run)
    # On machines other than 0, the run is live if machine 0 has already resumed it.
    if args.launch.get("machine_rank", "0") == "0" or true_state(run)["state"] == "done":
        refuse_unresumable(run)
    mistakes, request = Mistakes(), args.request
    fixed = sorted({"output_dir", "resume_from_checkpoint", "runs_dir"} & set(request.options))
    fixed += [name for name in ("preset", "config") if getattr(request, name)]
    mistakes += [Mistake(name, None, "cannot change when a run is resumed", "leave it out") for name in fixed]
    request.config, request.preset = str(run.config), None
    request.options["force_resume"] = "force" in args.switches  # applies to this attempt only; overrides config.yaml
    reached = None if "stop_at_step" in request.options else _reached_stop(run)
    if reached:
        request.options["stop_at_step"] = "none"
    job = job_of(request, _as_before(run, args.launch), mistakes, run)
    job.attempt = attempt
    if reached:
        job.notes.append(
            f"stop_at_step={reached} was reached: this resume goes on to the end; --stop_at_step N stops it"
        )
    return job


def _reached_stop(run: RunFolder) -> int | None:
    """The `stop_at_step` at which a run has stopped, so that a resume with it would stop again at once; else None."""
    last, step = config_values(run).get("stop_at_step"), (run.read_state() or {}).get("step")
    return last if isinstance(last, int) and isinstance(step, int) and step >= last else None


def clone_job(run: RunFolder, args: Args) -> TrainJob:
    """The job of a new run with the settings of another one; given options override the stored ones.

    Raises:
        ConfigError: with all mistakes at once.
    """
    mistakes, request = Mistakes(), args.request
    if "force" in args.switches:
        mistakes.append(Mistake("--force", None, "is for `resume`", "a clone starts at step 0: leave it out"))
    if request.preset or request.config:
        mistakes.append(Mistake("", None, "a clone has its run's config", "leave --preset and --config out"))
    request.config, request.preset = str(run.config), None
    return job_of(request, _as_before(run, args.launch), mistakes, None)


def run_attempt(run: RunFolder) -> int:
    """Number of the run's last attempt, from 0; -1 if its state has none."""
    attempt = (run.read_state() or {}).get("attempt")
    return attempt if isinstance(attempt, int) else -1


def refuse_unresumable(run: RunFolder) -> None:
    """Raises ConfigError if the run is done or still live."""
    state, path = true_state(run)["state"], shlex.quote(str(run.path))
    if state == "done":
        again = f"tunesmith train --config {shlex.quote(str(run.config))} --max_steps N"
        raise ConfigError(f"run {run.id} is done; to train on its config again: {again}")
    if state not in ("stopped", "failed"):
        raise ConfigError(f"run {run.id} is {state}; stop it first with `tunesmith stop {path}`")


def as_argument(value: Any) -> str:
    """Formats a value as on the command line, shortened to fit in a message."""
    return shortened(text_of(value))


def _as_before(run: RunFolder, values: dict[str, str]) -> dict[str, str]:
    """The launch options, with devices and strategy of the last attempt for those that are not given."""
    before = {"strategy": str(run.accelerate)} if _keeps_strategy(run, values) else {}
    if not {"gpus", "num_processes"} & set(values):
        ids, processes = gpu_ids(run), world_size(run)
        before.update({"gpus": ",".join(map(str, ids))} if ids else {})
        before.update({"num_processes": str(processes)} if processes and not ids else {})
    with contextlib.suppress(ConfigError):
        before.update(as_before(run, before) if "num_machines" not in values else {})
    return {**before, **values}


def _keeps_strategy(run: RunFolder, values: dict[str, str]) -> bool:
    """Whether to keep the last attempt's strategy: none is given, and the stored one can run on the given devices.

    A run moved to a single process gets the default strategy; a sharded run moved to fewer processes stays sharded,
    as it may need the memory.
    """
    if "strategy" in values:
        return False
    try:
        machines = choose_machines(values, read_yaml(run.accelerate))
        processes = devices_here(values, machines, None).num_processes
        if not {"gpus", "num_processes"} & set(values) or processes == world_size(run):
            return True
        stored = load_strategy(str(run.accelerate))
        sized = with_sizes(stored, read_sizes(values))
        resolve(sized, processes, str(stored.values.get("mixed_precision") or "no"))
    except ConfigError:
        return "num_processes" not in values and "gpus" not in values
    return processes > 1


def job_of(
    request: Request, values: dict[str, str], mistakes: Mistakes, run: RunFolder | None,
    machine: Sequence[Gpu] | None = None, joined_by_folder: bool = False,
) -> TrainJob:  # fmt: skip
    """The job of a request.

    Args:
        request: preset, config file and options.
        values: values of the `LAUNCH_OPTIONS`, such as `--strategy`.
        mistakes: mistakes found so far; more are added.
        run: the run to resume; None for a new one.
        machine: the GPUs of each machine that will train; default: those of this machine.
        joined_by_folder: whether the other machines join by `tunesmith resume` with the run's folder, once it is there.

    Raises:
        ConfigError: with all mistakes at once.
    """
    # Each block collects its mistakes and leaves its results None, so that one call reports all mistakes together.
    config = strategy = devices = fit = sizes = None
    with mistakes:
        config = _config(request, mistakes)
    strategy_file = values.get("strategy")
    with mistakes:
        strategy = load_strategy(strategy_file) if strategy_file else None
    with mistakes:
        sizes = read_sizes(values)
    with mistakes:
        machines = choose_machines(values, strategy.values if strategy else {})
        # Started by hand, each machine would name a folder of its own.
        by_hand = run is None and machine is None and not joined_by_folder
        mistakes += folder_mistakes(config, machines) if by_hand else []
        devices = devices_here(values, machines, strategy.num_processes if strategy else None, machine)
    with mistakes:
        if config and devices and sizes is not None and (strategy or not strategy_file):
            fixed = bool({"gpus", "num_processes"} & set(values))
            chosen = request.chosen
            counts = machine_counts(run.read_state() or {}) if run else None
            if counts and counts[1] and OPTION not in request.options:
                chosen -= {OPTION}  # of a run that goes on with fewer machines, it may be theirs
            fit = fit_devices(config, strategy, devices, fixed, chosen, sizes)
            config, strategy, devices = fit.config, fit.strategy, fit.devices
    with mistakes:
        member = bool(devices and devices.machine_rank)  # machine 0 decides whether the folder is free
        folder = run or (_new_folder(config, member) if config else None)
        if folder and config:
            if not member:
                folder.refuse_foreign()
            mistakes += folder.mistakes_in(config)
            _check_room(config, folder)
            source = "auto" if run else config.resume_from_checkpoint
            mistakes += changes_since_save(folder, config, source) if not member else []
    mistakes.refuse()
    if not (config and strategy and devices and folder and fit):
        raise AssertionError("no mistake, and yet no job")
    warnings = (
        fit.warnings
        + [str(mistake) for mistake in ignored_choices(config)]
        + strategy.cautions(config)
        + _promise(config, strategy)
    )
    resume_from = "auto" if run else config.resume_from_checkpoint
    return TrainJob(config, strategy, devices, folder, resume_from, warnings, [*request.notes, *fit.notes])


def _promise(config: TrainConfig, strategy: Strategy) -> list[str]:
    """The warning about parity, worded as in the training script, so that displays can recognize the repetition."""
    outside = config.outside_parity() + strategy.outside_parity()
    return [f"outside the promise that the strategy never changes the model: {', '.join(outside)}"] if outside else []


def _config(request: Request, mistakes: Mistakes) -> TrainConfig:
    """The validated config; if preset or file cannot be read, the options are still checked for other mistakes."""
    unread = Mistakes()
    if request.preset:
        with unread:
            find_preset(request.preset)
    if request.config:
        with unread:
            read_yaml(Path(request.config))
    if not unread:
        config = resolve_request(request)
        if unusable := _unusable_paths(config):
            raise ConfigError(unusable)
        return absolute_paths(config)
    mistakes += unread
    try:
        return Request(options=request.options, mistakes=request.mistakes).resolve()
    except ConfigError as error:
        raise ConfigError(mistake for mistake in error.mistakes if mistake.problem != MISSING) from None


def _unusable_paths(config: TrainConfig) -> list[Mistake]:
    """Mistakes for folders that are URLs, and for paths and names longer than file systems allow."""
    remedy = "give a local folder; checkpoint_url copies checkpoints to an object store"
    folders = {name: str(getattr(config, name) or "") for name in ("output_dir", "runs_dir", "cache_dir")}
    mistakes = [Mistake(name, shortened(url), "is a URL", remedy) for name, url in folders.items() if URL.match(url)]
    for name in (*INPUT_PATHS, *OUTPUT_FOLDERS):
        value = str(getattr(config, name) or "")
        longest = max((len(os.fsencode(part)) for part in value.split("/")), default=0)
        size, limit = (longest, _LONGEST_NAME) if longest > _LONGEST_NAME else (len(os.fsencode(value)), _LONGEST_PATH)
        if size > limit:
            problem = f"is too long ({size} bytes, at most {limit})"
            mistakes.append(Mistake(name, shortened(value), problem, "check the value"))
    return mistakes


def _new_folder(config: TrainConfig, member: bool) -> RunFolder:
    """The folder of a run that `train` starts; contains a run only if that is resumed, or started by machine 0.

    Args:
        config: the validated config.
        member: whether this machine is not machine 0.

    Raises:
        ConfigError: if it contains a run that is not to be resumed, or that is still live.
    """
    try:
        run = RunFolder(Path(config.output_dir).expanduser() if config.output_dir else _free_folder(config))
        source = config.resume_from_checkpoint
        path = Path(source or "").expanduser()
        inside = source == "auto" or (source and path.resolve().parent == run.checkpoints.resolve())
        if member and not inside and (run.read_state() or {}).get("state") in END_STATES:
            raise ConfigError.about("output_dir", run.path, "holds a run that has ended", "resume it, or use another")
        if member:
            return run
        if not inside:
            run.refuse_used()
        elif run.exists() and true_state(run)["state"] in LIVE_STATES:
            raise ConfigError.about(
                "output_dir", run.path, "holds a run that is still active", "stop it first, or use another"
            )
    except OSError as error:
        option = "output_dir" if config.output_dir else "runs_dir"
        value = shortened(str(getattr(config, option)))
        raise ConfigError.about(option, value, f"cannot be used: {error.strerror}", "choose another folder") from None
    return run


def _free_folder(config: TrainConfig) -> Path:
    name = config.run_name or config.label
    ids = (new_run_id(name, time.time(), number) for number in count(os.getpid()))
    folders = (Path(config.runs_dir).expanduser() / run_id for run_id in ids)
    return next(folder for folder in folders if not folder.exists())


def writable_parent(path: Path, option: str, remedy: str) -> Path:
    """The nearest existing folder at or above `path`.

    Args:
        path: a folder to be created.
        option: name of the option with the path, for the mistake.
        remedy: what to do about the mistake.

    Raises:
        ConfigError: if `path` cannot be created in that folder.
    """

    def refuse(reason: object) -> ConfigError:
        return ConfigError.about(option, shortened(str(path)), f"cannot be created: {reason}", remedy)

    try:
        parent = next(folder for folder in (path, *path.parents) if folder.exists())
        is_folder = parent.is_dir()
    except OSError as error:
        raise refuse(error.strerror) from None
    if not is_folder:
        raise refuse(f"{shortened(str(parent))} is a file, not a folder")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise refuse(f"{shortened(str(parent))} is not writable")
    return parent


def _check_room(config: TrainConfig, run: RunFolder) -> None:
    """Refuses a folder that cannot be written, or a disk that is surely too small; the pre-flight check knows more."""
    writable_parent(run.path, "output_dir", "choose another folder")
    check_room(config, local_tensors(config), run.path)
