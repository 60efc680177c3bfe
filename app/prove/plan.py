"""Plans what `tunesmith prove` trains: the user's request, once per strategy, without options that change the numbers.

Every run is a job of `tunesmith train`, so that the proof covers what users actually run.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

from app.command_line import DEVICES, Args, Verb
from app.console import shortened
from app.hardware import CPU_PROCESSES, choose_devices
from app.launch.job import TrainJob, as_argument, named_preset, train_job
from trainers.config.command_line import option, switch
from trainers.config.mistakes import ConfigError, Mistake, Mistakes
from trainers.config.options import MACHINE_OPTIONS, MESH_OPTIONS, UNKNOWN, TrainConfig
from trainers.config.parse import Request, whole_number
from trainers.config.validation import ignored_choices
from trainers.config.yaml_file import read_yaml
from trainers.run.folder import new_run_id
from trainers.run.from_run import resolve_request
from trainers.strategy.mesh_options import read_sizes, refuse_other_sizes, with_sizes
from trainers.strategy.strategy import Strategy, cannot_run, load_strategy, resolve, strategy_names

PRESET = "tiny-full"
"""Used if neither preset, config nor model is given: trains all weights of the embedded model."""
STEPS = 20
MOST_COUNT = 100_000
SHORT_RUN = {
    "logging_steps": "1", "save_steps": "0", "report_to": "", "checkpoint_url": "none",
    "eval_dataset_name": "none", "eval_steps": "0", "eval_on_start": "false", "eval_generate_steps": "0",
    "load_best_model_at_end": "false", "early_stopping_patience": "none", "max_restarts": "0", "stop_at_step": "none",
}  # fmt: skip
"""Options of a run of which only the logged steps are needed."""
# Options under which strategies are comparable; see docs/parity.md. Those unknown to this version are left out.
SETTINGS = {
    "mixed_precision": "no", "lora_dropout": "0", "tf32": "false", "deterministic": "true", "ddp_comm_hook": "none",
    "torch_compile": "false", "master_weights": "true", "eval_share": "0", "export_dtype": "float32", **SHORT_RUN,
}  # fmt: skip
_NUMBERS = ("mixed_precision", "lora_dropout", "tf32", "ddp_comm_hook", "torch_compile", "master_weights", "optim")
PROVE = Verb(
    "prove",
    "Train your model on your data under each strategy, and compare loss and gradient norm of every step "
    f"with one process. It sets {', '.join(name for name in SETTINGS if name in TrainConfig.model_fields)} and "
    "max_steps itself, and reports which of your options it overrides. Exit status: 0 all that could run passed, "
    "1 a strategy failed, 130 interrupted, 2 invalid request.",
    ("preset", f"Preset to start from; default: {PRESET}, when no model is named either."),
    {
        "strategies": option("strategies", "<a,b,c>", "Strategy names or Accelerate YAMLs; default: all."),
        "steps": option("steps", "<int>", f"Number of steps per run; default: {STEPS}."),
        "resume": switch("resume", "Save half-way under each strategy, and resume under every strategy from each "
                         "checkpoint."),
        "layers": option("layers", "<int>", "Keep only the first N decoder layers, so that the reference fits in one "
                         "process."),
        "bf16": switch("bf16", "Train all runs, the reference too, in bf16, with wider limits: its rounding grows."),
        "control": option("control", "<none|mean-of-means>", "Train every row, but not the reference, with a known "
                          "fault: the mean of the micro-batches' means. Then each row must differ; exit status 0 when "
                          "the test saw the fault in all that ran; default: none."),
    },
    launch=DEVICES,
    hidden={*SETTINGS, "max_steps"},
)  # fmt: skip
REFERENCE = "reference"
"""Folder name of the run that all others are compared with."""


@dataclass
class Row:
    """One strategy: the job to train, or why it cannot be trained.

    Args:
        strategy: its name.
        world_size: number of processes.
        job: None if it cannot run here.
        reason: why it cannot run; None if it can.
        warnings: warnings about this strategy only.
    """

    strategy: str
    world_size: int
    job: TrainJob | None = None
    reason: str | None = None
    warnings: list[str] = field(default_factory=list)


@dataclass
class Plan:
    """Everything that `prove` will do.

    Args:
        folder: folder of the report and of all runs; not created yet.
        steps: number of steps of each run.
        control: the fault that every row except the reference is trained with; `none` for no fault.
        reference: the job on a single process.
        rows: one row per strategy, in the requested order.
        overrides: `option`, `given` and `used` of each replaced choice, and `why` if that is not obvious.
        warnings: lines that the user should read.
    """

    folder: Path
    steps: int
    control: str
    reference: TrainJob
    rows: list[Row]
    overrides: list[dict[str, str]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


# -- the request -----------------------------------------------------------------------------------------------------

_T = TypeVar("_T")


class _Mistakes(Mistakes):
    """Mistakes that also pass on what checks return."""

    def of(self, check: Callable[[], _T]) -> _T | None:
        """The result of a check; None if it raised, in which case its mistakes are added."""
        with self:
            return check()
        return None


@dataclass
class _Command:
    """A parsed command line, not yet validated.

    Args:
        values: values of `--gpus` and `--num_processes`.
        request: training options.
        own: options of `prove`, not part of the request.
        chosen: training options that the user set by flag or config file; the values of a preset do not count.
    """

    values: dict[str, str]
    request: Request
    own: dict[str, Any]
    chosen: dict[str, Any]

    def config(self) -> TrainConfig:
        """The config that `train` would use for the request."""
        return resolve_request(self.request)

    def job(self, devices: dict[str, str], changes: Mapping[str, str]) -> TrainJob:
        """The training job on these devices, with these options changed."""
        options = {**self.request.options, **changes}
        return train_job(Args([], devices, request=replace(self.request, options=options)))


def _read(args: Args, mistakes: _Mistakes) -> _Command:
    request = args.request
    config = Path(request.config) if request.config else None
    from_file = (mistakes.of(lambda: read_yaml(config)) if config else None) or {}
    chosen = {**from_file, **request.options}
    request.preset = named_preset(args.names, request.preset, mistakes)
    if not (request.preset or config or {"model_name_or_path", "from_run"} & set(chosen)):
        request.preset = PRESET
    launch = {name: value for name, value in args.launch.items() if name != "strategy"}
    return _Command(launch, request, args.own, chosen)


def make_plan(args: Args) -> Plan:
    """Makes the plan of a command line.

    Raises:
        ConfigError: with all mistakes at once, or with the arithmetic if no micro-batch suits all rows.
    """
    mistakes = _Mistakes()
    command = _read(args, mistakes)
    steps = mistakes.of(lambda: _count(command.own.get("steps", STEPS), "steps", STEPS))
    settings = {**_known(SETTINGS), "max_steps": str(steps or STEPS), **(mistakes.of(lambda: _extras(command)) or {})}
    _refuse_others(args, command, mistakes)
    config = mistakes.of(command.config)
    settings |= {"optim": "adamw"} if config and config.optim == "adamw_8bit" else {}
    entries = mistakes.of(lambda: _entries(command, config.method if config else "full"))
    folder = mistakes.of(lambda: _folder(command, config)) if config else None
    places = {"output_dir": str((folder or Path("x")) / REFERENCE), "runs_dir": str(folder)}
    alone = {**settings, **places, "per_device_train_batch_size": "1"}
    first = mistakes.of(lambda: command.job({"strategy": "single", "num_processes": "1"}, alone))
    if mistakes or not (steps and entries and config and folder and first):
        raise ConfigError(_for_prove(mistake, config, folder) for mistake in mistakes)
    plan = Plan(folder, steps, config.control, first, [])
    _fill(plan, command, entries, settings, first.config)
    return plan


def _fill(plan: Plan, command: _Command, entries: list[_Entry], settings: dict[str, str], config: TrainConfig) -> None:
    """Chooses a micro-batch that suits all rows, and adds the rows, the reference, overrides and warnings."""
    user = command.config()
    possible = {entry.name: entry.strategy for entry in entries if not entry.reason}
    # A pipeline needs at least one micro-batch per stage.
    sizes = {name: strategy.data_parallel_size * strategy.pp_size for name, strategy in possible.items()}
    micro = micro_batch(config.global_batch_size, user.per_device_train_batch_size, sizes, plan.control != "none")
    shared = {**settings, "per_device_train_batch_size": str(micro), "runs_dir": str(plan.folder)}

    def job(name: str, devices: dict[str, str], control: str, replays: bool = False) -> TrainJob:
        options = {"output_dir": str(plan.folder / name.replace(":", "-")), **_known({"control": control})}
        # Answers that the reference sampled: a rounding could flip a token of those that the row would sample.
        recorded = {"recorded_answers": str(plan.folder / REFERENCE / "rollouts")} if replays else {}
        return command.job(devices, {**shared, **options, **recorded})

    plan.reference = job(REFERENCE, _devices(command, 1) | {"strategy": "single"}, "none")
    ignored = ignored_choices(plan.reference.config)
    plan.warnings = [str(mistake) for mistake in ignored if mistake.option in command.chosen]
    plan.overrides = _overrides(command, user, plan.reference.config, settings, sizes)
    used = settings["mixed_precision"]
    plan.overrides += [
        {"option": "mixed_precision", "given": entry.precision, "used": used, "why": f"written in {entry.spec}"}
        for entry in entries if entry.precision not in (None, used)
    ]  # fmt: skip
    for entry in entries:
        plan.rows.append(row := Row(entry.name, entry.strategy.num_processes, reason=entry.reason))
        if row.reason:
            continue
        try:
            with _file_of(entry) as spec:
                replays = user.objective_spec.samples and ("resume" in command.own or row.world_size > 1)
                row.job = job(entry.name, _devices(command, row.world_size) | {"strategy": spec}, plan.control, replays)
        except ConfigError as error:
            if entry.is_file:
                raise
            row.reason = "; ".join(error.lines)
        else:
            row.warnings = _own_warnings(row.job.strategy)


def _own_warnings(strategy: Strategy) -> list[str]:
    """Warnings about one row: since all rows share the config, only its strategy can be the cause."""
    outside = strategy.outside_parity()
    return [f"outside the promise that the strategy never changes the model: {', '.join(outside)}"] if outside else []


def _for_prove(mistake: Mistake, config: TrainConfig | None, folder: Path | None) -> Mistake:
    """Rewords a mistake that `train` found in one of the runs as a mistake in the request for `prove`."""
    # As a flag, the option would have been accepted, so it comes from the config file.
    if mistake.option in PROVE.own and mistake.problem == UNKNOWN:
        remedy = f"write --{mistake.option} on the command line of `tunesmith prove`"
        return Mistake(mistake.option, None, "is not an option of the config", remedy)
    if config and folder and mistake.option == "output_dir" and str(mistake.value).startswith(shortened(str(folder))):
        option, path = ("output_dir", folder) if config.output_dir else ("runs_dir", folder.parent)
        return replace(mistake, option=option, value=shortened(str(path)))
    return mistake


def _known(options: Mapping[str, str]) -> dict[str, str]:
    """The options that this version has."""
    return {name: value for name, value in options.items() if name in TrainConfig.model_fields}


def _count(value: Any, name: str, example: int) -> int:
    if (number := whole_number(str(value), 1, MOST_COUNT)) is None:
        remedy = f"write 1 to {MOST_COUNT}, e.g. --{name} {example}"
        raise ConfigError.about(name, repr(shortened(str(value))), f"is not a valid number of {name}", remedy)
    return number


def _extras(command: _Command) -> dict[str, str]:
    """The options for `--bf16`, and for `--layers`, which cuts the model; empty if not given."""
    precision = {"mixed_precision": "bf16"} if "bf16" in command.own else {}
    if "layers" not in command.own:
        return precision
    if "num_hidden_layers" in command.chosen:
        raise ConfigError.about("--layers", None, "and num_hidden_layers are both given", "they are the same, keep one")
    return {**precision, "num_hidden_layers": str(_count(command.own["layers"], "layers", 2))}


def _refuse_others(args: Args, command: _Command, mistakes: _Mistakes) -> None:
    """Adds mistakes for options of `train` that `prove` decides itself."""
    if "strategy" in args.launch:
        mistakes.append(Mistake("strategy", args.launch["strategy"], ": prove has several", "write --strategies a,b,c"))
    mistakes += [Mistake(name, args.launch[name], ": prove runs on this machine alone", "leave it out")
                 for name in (*MACHINE_OPTIONS, "min_machines") if name in args.launch]  # fmt: skip
    if command.chosen.get("resume_from_checkpoint") is not None:
        mistakes.append(
            Mistake("resume_from_checkpoint", None, ": prove starts each run at its first step", "leave it out")
        )
    if "check" in args.switches:
        mistakes.append(Mistake("", None, "prove has no --check", "to check one run use `tunesmith train --check`"))


def _folder(command: _Command, config: TrainConfig) -> Path:
    """The folder of the report, which must be new or empty.

    Raises:
        ConfigError: if it contains files, or cannot be used.
    """
    try:
        if config.output_dir is None:
            runs_dir, name = Path(config.runs_dir).expanduser().absolute(), config.label
            ids = (new_run_id(name, time.time(), number) for number in count(os.getpid()))
            return next(folder for run_id in ids if not (folder := runs_dir / f"prove-{run_id}").exists())
        folder = Path(config.output_dir).expanduser().absolute()
        used = folder.exists() and not (folder.is_dir() and not any(folder.iterdir()))
    except OSError as error:
        option = "output_dir" if config.output_dir else "runs_dir"
        value = as_argument(getattr(config, option))
        raise ConfigError.about(option, value, f"cannot be used: {error.strerror}", "choose another folder") from None
    if used:
        raise ConfigError.about("output_dir", folder, "holds other files", "name a new folder for the report")
    return folder


# -- strategies and devices ------------------------------------------------------------------------------------------


@dataclass
class _Entry:
    """A requested strategy: its name or file, the strategy resolved for its processes, and why it cannot run.

    `precision` is the mixed precision in its file, if `prove` overrides it.
    """

    spec: str
    strategy: Strategy
    reason: str | None
    precision: str | None = None

    @property
    def name(self) -> str:
        return self.strategy.name

    @property
    def is_file(self) -> bool:
        """Whether it is a file of the user's; if that does not fit, the request is refused."""
        return self.spec not in strategy_names()


@contextlib.contextmanager
def _file_of(entry: _Entry) -> Iterator[str]:
    """The value for `--strategy`: as given, or a temporary copy of the file without its precision."""
    if not entry.precision:
        yield entry.spec
        return
    with tempfile.TemporaryDirectory(prefix="tunesmith-") as folder:
        path = Path(folder) / "strategy.yaml"
        path.write_text(entry.strategy.dump(), encoding="utf-8")
        yield str(path)


def _entries(command: _Command, method: str) -> list[_Entry]:
    """The requested strategies, each resolved for its number of processes.

    Raises:
        ConfigError: for unknown or repeated strategies, a file that does not fit, or unavailable devices.
    """
    mistakes = _Mistakes()
    strategies = _strategies(str(command.own.get("strategies", "all")), mistakes)
    ids, sizes = mistakes.of(lambda: _gpu_ids(command)), mistakes.of(lambda: read_sizes(command.values))
    if mistakes or ids is None or sizes is None:
        raise ConfigError(mistakes)
    wanted, entries = _wanted(command), []
    for spec, strategy, own in strategies:
        try:
            entries.append(_entry(spec, strategy, ids, wanted, own, method, sizes))
        except ConfigError as error:
            mistakes += error.mistakes
    if mistakes:
        raise ConfigError(mistakes)
    return entries


def _strategies(text: str, mistakes: _Mistakes) -> list[tuple[str, Strategy, int | None]]:
    """Parses `--strategies`: name or file, strategy, and the number of processes if given as `NAME:4`; names differ."""
    specs = strategy_names() if text == "all" else [word.strip() for word in text.split(",")]
    rows: list[tuple[str, Strategy, int | None]] = []
    if "all" in specs:
        remedy = "write --strategies all, or name each"
        mistakes.append(Mistake("strategies", as_argument(text), ": `all` cannot be combined", remedy))
        specs = [spec for spec in specs if spec != "all"]
    for spec in specs:
        plain, colon, world = spec.rpartition(":")
        own = colon and world.isascii() and world.isdigit()
        strategy = mistakes.of(lambda spec=plain if own else spec: _load(spec))  # type: ignore[misc]
        if strategy and own:
            strategy = replace(strategy, name=f"{strategy.name}:{int(world)}")
        if strategy and strategy.name in [REFERENCE, *(other.name for _, other, _ in rows)]:
            problem = f": two runs would be named {strategy.name}"
            mistakes.append(Mistake("strategies", as_argument(text), problem, "list it once"))
        elif strategy:
            rows.append((plain if own else spec, strategy, int(world) if own else None))
    return rows


def _load(spec: str) -> Strategy:
    """Loads a strategy; a name that comes from a file is made safe to use as a folder name."""
    strategy = load_strategy(spec)
    return replace(strategy, name=re.sub(r"[^\w.-]+", "-", strategy.name).strip(".-") or "strategy")


def _entry(
    spec: str, strategy: Strategy, ids: list[int], wanted: int | None, own: int | None, method: str,
    sizes: Mapping[str, int],
) -> _Entry:  # fmt: skip
    written = strategy.values.get("mixed_precision")
    precision = written if written in ("fp16", "bf16") else None
    if precision:  # `prove` sets its own precision, which the file must not contradict
        values = {key: value for key, value in strategy.values.items() if key != "mixed_precision"}
        strategy = replace(strategy, values=values)
    world = resolve(strategy, own, "no").num_processes if own is not None else _world(strategy, wanted)
    entry = _Entry(spec, strategy, cannot_run(strategy, method, bool(ids)) or _too_few(world, ids), precision)
    try:
        entry.strategy = resolve(with_sizes(strategy, sizes), world, "no")
        refuse_other_sizes(entry.strategy, sizes)
    except ConfigError as error:
        if entry.is_file:
            raise
        entry.reason = entry.reason or "; ".join(error.lines)
    return entry


def _too_few(world: int, ids: list[int]) -> str | None:
    if not ids or world <= len(ids):
        return None
    return f"it needs {world} GPUs and has {len(ids)}; with CUDA_VISIBLE_DEVICES= before the command it runs on the CPU"


def _world(strategy: Strategy, wanted: int | None) -> int:
    """Processes of a row: the requested number, or the strategy's own number if that is too few for its mesh."""
    if strategy.distributed_type == "NO":
        return 1
    if wanted:
        with contextlib.suppress(ConfigError):
            return resolve(strategy, wanted, "no").num_processes
    return max(wanted or CPU_PROCESSES, strategy.num_processes)


def _gpu_ids(command: _Command) -> list[int]:
    """The GPUs that rows may use."""
    gpus = command.values.get("gpus")
    choose_devices(gpus, command.values.get("num_processes"))  # only to refuse contradicting options
    return choose_devices(gpus, None).gpu_ids


def _wanted(command: _Command) -> int | None:
    """The number of processes that the user requested; None if not given."""
    if "gpus" in command.values:
        return len(_gpu_ids(command))
    return int(command.values["num_processes"]) if "num_processes" in command.values else None


def _devices(command: _Command, world: int) -> dict[str, str]:
    """The options of `train` for a run with this number of processes."""
    ids, sizes = _gpu_ids(command), {name: command.values[name] for name in MESH_OPTIONS if name in command.values}
    devices = {"gpus": ",".join(map(str, ids[:world]))} if ids else {"num_processes": str(world)}
    return {**(sizes if world > 1 else {}), **devices}


def micro_batch(total: int, limit: int, sizes: Mapping[str, int], several: bool) -> int:
    """The largest micro-batch, up to the requested one, that divides the global batch under every strategy.

    Args:
        total: rows of a global batch.
        limit: the requested micro-batch.
        sizes: number of data-parallel ranks times pipeline stages, by strategy.
        several: whether a global batch must have at least two micro-batches.

    Raises:
        ConfigError: with the arithmetic, if the global batch does not divide by the ranks.
    """
    common = math.lcm(*sizes.values()) if sizes else 1
    if total % common:
        ranks = ", ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)
        nearest = max(1, round(total / common)) * common
        problem = f"is not divisible by the data-parallel ranks of all rows ({ranks}; together {common})"
        remedy = f"use --global_batch_size {nearest}, or fewer --strategies"
        raise ConfigError.about("global_batch_size", total, problem, remedy)
    if several and total < 2:
        remedy = "use --global_batch_size 2 or more"
        raise ConfigError.about("control", "mean-of-means", "needs two micro-batches", remedy)
    most = min(limit, total // common, total // 2 if several else total)
    return next(size for size in range(most, 0, -1) if (total // common) % size == 0)


def _overrides(
    command: _Command, user: TrainConfig, used: TrainConfig, settings: Mapping[str, str], sizes: Mapping[str, int]
) -> list[dict[str, str]]:
    """The user's choices that are replaced; values of a preset only if they would have changed the numbers."""
    reported = {*command.chosen, *_NUMBERS}
    overrides = [
        {"option": name, "given": as_argument(getattr(user, name)), "used": as_argument(getattr(used, name))}
        for name in settings if name in reported and getattr(user, name) != getattr(used, name)
    ]  # fmt: skip
    micro, before = used.per_device_train_batch_size, user.per_device_train_batch_size
    if micro != before:
        worlds = sorted({1, *sizes.values()})
        ranks = f"{', '.join(map(str, worlds[:-1]))} and {worlds[-1]}" if len(worlds) > 1 else "1"
        why = f"{used.global_batch_size} rows on {ranks} ranks in micro-batches of one size"
        option = "per_device_train_batch_size"
        overrides.append({"option": option, "given": str(before), "used": str(micro), "why": why})
    return overrides
