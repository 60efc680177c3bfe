"""The model of the Train page, also for scripts: changed options -> mistakes, derived numbers, YAML, command.

Requests are validated as by `tunesmith train`; this module only adds which folders they may touch.
"""

from __future__ import annotations

import math
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from app.accelerate_launch import by_hand_line
from app.command_line import Args
from app.console import shortened
from app.hardware import Devices
from app.launch.device_fit import fit_devices
from app.launch.job import TrainJob, job_of
from app.launch.slurm import slurm_job
from app.runs.runs import gpu_ids, world_size
from app.schedulers.slurm import script
from app.schedulers.slurm_options import SlurmOptions, is_site_file
from app.services.allowed_paths import path_mistakes, strategy_mistake
from app.services.choices import GpuChoice
from app.services.data import known_notes, known_rows
from app.services.fields import as_texts, names
from app.services.machines_form import MACHINES_FIELDS, machine_args, machine_options
from app.services.slurm_form import SLURM_FIELDS, chosen_options, slurm_args
from app.services.starting_values import NAMING, base_config, starting_values
from trainers.config.fields import fields, text_of
from trainers.config.local_paths import INPUT_PATHS, OUTPUT_FOLDERS
from trainers.config.mistakes import ConfigError, Mistake, Mistakes
from trainers.config.options import TrainConfig
from trainers.config.parse import Request, dump_yaml
from trainers.config.validation import MISSING
from trainers.config.yaml_file import parse_yaml
from trainers.run.folder import RunFolder
from trainers.strategy.strategy import STRATEGIES_DIR, Strategy, from_launcher, load_strategy, resolve, strategy_names

MAX_YAML_LENGTH = 100_000
_LAUNCH = ("strategy", "gpus", "num_processes")
REMOTE_CODE = Mistake("trust_remote_code", True, "is refused here", "only `tunesmith ui --trust_remote_code` allows it")
_BY_RUN = {"preset", "output_dir", "resume_from_checkpoint"}


@dataclass(frozen=True)
class Numbers:
    """Numbers derived from the options.

    Args:
        world_size: processes.
        data_parallel_size: ranks that see different rows.
        micro_batch: rows per micro-batch and rank.
        accumulation_steps: micro-batches per step and rank.
        global_batch_size: rows per step over all ranks.
        tokens_per_step: most tokens per step.
        learning_rate: the peak rate after its scaling rule.
        epochs: passes over the data; None when `max_steps` decides.
        steps_per_epoch: None while the number of rows is not known; the Data page and `tunesmith data` count them.
        total_steps: None while neither is known.
    """

    world_size: int
    data_parallel_size: int
    micro_batch: int
    accumulation_steps: int
    global_batch_size: int
    tokens_per_step: int
    learning_rate: float
    epochs: float | None
    steps_per_epoch: int | None
    total_steps: int | None


@dataclass
class Preview:
    """What a request would do.

    Args:
        errors: mistakes by option, by `strategy` or `gpus`, or by an empty name for the rest; empty when it can start.
        warnings: lines that the user should read.
        numbers: what follows from the options; None with errors, like all that is below.
        yaml: the resolved config.
        command: the line that starts such a run from a terminal.
        job: what `app.launch.foreground` starts.
        notes: lines that say what was chosen for the user.
        slurm: options of the job of SLURM that trains it; None on this machine.
        script: its batch script.
    """

    errors: dict[str, list[Mistake]] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    numbers: Numbers | None = None
    yaml: str = ""
    command: str = ""
    job: TrainJob | None = None
    notes: list[str] = field(default_factory=list)
    slurm: SlurmOptions | None = None
    script: str = ""

    @property
    def mistakes(self) -> list[Mistake]:
        """All of `errors`."""
        return [mistake for mistakes in self.errors.values() for mistake in mistakes]

    def error_lines(self) -> dict[str, list[str]]:
        """`errors` as text."""
        return {name: [str(mistake) for mistake in mistakes] for name, mistakes in self.errors.items()}

    def as_json(self) -> dict[str, Any]:
        """All but the job, for scripts."""
        numbers = asdict(self.numbers) if self.numbers else None
        return {
            "errors": self.error_lines(), "warnings": self.warnings, "numbers": numbers, "yaml": self.yaml,
            "command": self.command, "notes": self.notes,
        }  # fmt: skip


@dataclass(frozen=True)
class Choices:
    """What a form starts from.

    Args:
        preset: its name.
        values: text by option, of those that differ from the preset, or from the defaults without one.
        strategy: name, or path of an Accelerate YAML.
        gpus: ids.
        num_processes: processes on a machine without GPUs.
        job: texts of `on`, which says where the run trains, of `SLURM_FIELDS` and of `MACHINES_FIELDS`; empty if not
            chosen.
    """

    preset: str | None = None
    values: dict[str, str] = field(default_factory=dict)
    strategy: str | None = None
    gpus: tuple[int, ...] = ()
    num_processes: int | None = None
    job: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class DefaultGpus:
    """The GPUs that a form ticks by default.

    Args:
        ids: their ids; empty when none is free.
        note: why free GPUs are left out; empty when none are.
    """

    ids: tuple[int, ...]
    note: str = ""


def default_gpus(preset: str | None, gpus: Sequence[GpuChoice]) -> DefaultGpus:
    """The free GPUs among which a preset's global batch divides evenly.

    Args:
        preset: its name; None or empty without one.
        gpus: the GPUs of the machine.

    Raises:
        ConfigError: for an unknown preset.
    """
    free = [gpu.index for gpu in gpus if not gpu.holder and not gpu.foreign]
    if not free:
        return DefaultGpus(())
    try:
        fit = fit_devices(base_config(preset or None), None, Devices(free, len(free)), False, (), {})
    except ConfigError:
        return DefaultGpus(tuple(free))
    ids = tuple(fit.devices.gpu_ids)
    return DefaultGpus(ids, fit.notes[0] if len(ids) < len(free) else "")


def preview(
    values: Mapping[str, Any],
    preset: str | None = None,
    strategy: str | None = None,
    gpus: str | Sequence[int | str] | None = None,
    num_processes: int | str | None = None,
    roots: Sequence[Path] | None = None,
    remote_code: bool = False,
    slurm: Mapping[str, Any] | None = None,
    machines: Mapping[str, Any] | None = None,
) -> Preview:
    """What a request would do, with all mistakes at once. Starts and writes nothing.

    Args:
        values: text, number or boolean by option, where different from the preset, or from the defaults without one.
        preset: its name.
        strategy: name, or path of an Accelerate YAML.
        gpus: ids such as `0,2`; default: all.
        num_processes: processes on a machine without GPUs.
        roots: folders that files may be in; None allows every path.
        remote_code: whether `trust_remote_code` may be on.
        slurm: options of a job of SLURM out of `SLURM_FIELDS`, which decides the devices; None trains on this machine.
        machines: texts out of `MACHINES_FIELDS`; this machine is then machine 0, and the devices are those of each.
    """
    mistakes = Mistakes()
    launch_values: dict[str, Any] = {"preset": preset, "strategy": strategy}
    if slurm is None:
        launch_values |= {"gpus": gpus or None, "num_processes": num_processes}
    launch = {name: text for name, text in _texts(launch_values, mistakes).items() if text not in ("", "none")}
    texts = _without_blanks(_texts(values, mistakes))
    preset = launch.pop("preset", None) or texts.pop("preset", None)
    texts = {name: _absolute(text) if name in OUTPUT_FOLDERS else text for name, text in texts.items()}
    outside = [] if roots is None else _outside(texts, preset, launch, roots)
    refused_fields = {field_of(mistake) for mistake in outside}
    mistakes += outside
    accepted = {name: text for name, text in texts.items() if name not in refused_fields}
    try:
        allowed = {name: text for name, text in launch.items() if name not in refused_fields}
        if machines is not None:
            filled = {name: value for name, value in machines.items() if value is not None}
            runs_dir = Path(texts.get("runs_dir") or "runs")
            allowed |= machine_options(_texts(filled, mistakes), allowed, mistakes, runs_dir)
        request, options = Request(preset, options=dict(accepted)), None
        if slurm is None:
            job = job_of(request, allowed, mistakes, None, joined_by_folder=machines is not None)
        else:
            filled = {name: value for name, value in slurm.items() if value is not None}
            own: dict[str, Any] = dict(chosen_options(_texts(filled, mistakes)))
            job, options = slurm_job(Args(launch=allowed, request=request, own=own), mistakes=mistakes)
        if job.config.trust_remote_code and not remote_code:
            raise ConfigError(REMOTE_CODE)
        # An adapter's own config names its base model, and a run's id the folder of a teacher.
        started = {name: getattr(job.config, name) for name in ("from_run", "teacher", "model_name_or_path")}
        follows = job.config.from_run or job.config.teacher
        if roots is not None and follows and (refused := path_mistakes(started, roots)):
            raise ConfigError(refused)
        return _preview_of(job, texts, launch.get("strategy"), options)
    except ConfigError as error:
        return Preview(
            by_field(
                mistake
                for mistake in error.mistakes
                if mistake.problem != MISSING or mistake.option not in refused_fields
            )
        )


def _texts(values: Mapping[str, Any], mistakes: Mistakes) -> dict[str, str]:
    """The values as text; adds those without one to the mistakes."""
    texts: dict[str, str] = {}
    for name, value in values.items():
        with mistakes:
            texts.update(as_texts({name: value}))
    return texts


def _without_blanks(texts: dict[str, str]) -> dict[str, str]:
    """Drops blank fields, which mean the preset's value, unless blank is a valid value of the option."""
    blank_allowed = {option.name for option in fields() if option.optional or option.kind in ("list", "map")}
    return {name: text for name, text in texts.items() if text.strip() or name in blank_allowed or name not in names()}


def _absolute(path: str) -> str:
    """The path made absolute, so that it does not depend on the current folder."""
    if path.lower() in ("", "none", "null", "auto") or "\0" in path or "://" in path or path.startswith("~"):
        return path
    return str(Path(path).absolute())


def _outside(
    texts: Mapping[str, str], preset: str | None, launch: Mapping[str, str], roots: Sequence[Path]
) -> list[Mistake]:
    """Mistakes for paths of a request or its preset outside the allowed folders."""
    defaults: dict[str, Any] = {}
    with Mistakes():  # an unknown preset is reported with the rest
        defaults = base_config(preset).model_dump(include={*INPUT_PATHS, *OUTPUT_FOLDERS})
    mistakes = path_mistakes({**defaults, **texts}, roots)
    outside = strategy_mistake(launch["strategy"], roots) if "strategy" in launch else None
    return [*mistakes, outside] if outside else mistakes


def field_of(mistake: Mistake) -> str:
    """The field under which a mistake is shown; empty for the form as a whole."""
    name = mistake.option.partition(".")[0]
    if mistake.source and name not in SLURM_FIELDS:
        name = "" if is_site_file(mistake.source) else "strategy"
    name = "gpus" if name == "num_processes" else name
    return name if name in names() or name in (*_LAUNCH, *SLURM_FIELDS, *MACHINES_FIELDS) else ""


def by_field(mistakes: Iterable[Mistake]) -> dict[str, list[Mistake]]:
    """The mistakes by field."""
    grouped: dict[str, list[Mistake]] = {}
    for mistake in mistakes:
        grouped.setdefault(field_of(mistake), []).append(mistake)
    return grouped


def _preview_of(
    job: TrainJob, texts: Mapping[str, str], strategy: str | None, options: SlurmOptions | None = None
) -> Preview:
    config = job.config
    warnings = [*job.warnings, *(f"Data: {note}." for note in known_notes(config))]
    args = _option_args(config, texts)
    strategy_name = strategy or job.strategy.name
    if options is not None:
        argv = [*tunesmith_program(), "train", *slurm_args(options), "--strategy", strategy_name, *args]
        return Preview({}, warnings, numbers_of(job), dump_yaml(config), shlex.join(argv), job, job.notes, options,
                       script(job.run, options))  # fmt: skip
    if job.devices.machines:
        folder = [] if config.output_dir else ["--output_dir", str(job.run.path)]
        command = _tunesmith_command(strategy_name, job, [*args, *folder, "--detach"])
        return Preview({}, warnings, numbers_of(job), dump_yaml(config), command, job, job.notes)
    file = (
        STRATEGIES_DIR / f"{strategy_name}.yaml"
        if strategy_name in strategy_names()
        else Path(strategy_name).expanduser().absolute()
    )
    command = by_hand_line(file, job.devices, args)
    if job.strategy.mesh and not _reproduces(command, job.strategy, config):
        command = _tunesmith_command(strategy_name, job, args)
        default_processes = load_strategy(strategy_name).num_processes
        warnings.append(
            f"`accelerate launch` takes strategy {job.strategy.name} only with {default_processes} processes, as in "
            "its file; the command shown uses `tunesmith train`, which resizes it"
        )
    return Preview({}, warnings, numbers_of(job), dump_yaml(config), command, job, job.notes)


def _option_args(config: TrainConfig, texts: Mapping[str, str]) -> list[str]:
    """The options that differ from the preset, as arguments that do not depend on the current folder."""
    base = base_config(config.preset)
    cleared = starting_values(config.preset, {name: text_of(getattr(config, name)) for name in NAMING})
    args = ["--preset", config.preset] if config.preset else []
    for option in fields():
        value = getattr(config, option.name)
        known = value == getattr(base, option.name) and text_of(value) == cleared[option.name]
        if known if config.preset else value == getattr(base, option.name) and option.default is not None:
            continue
        # A field left empty is `none`; as an empty argument it would be refused.
        text = (text_of(value) if option.name in INPUT_PATHS else texts.get(option.name, text_of(value))) or "none"
        args += [f"--{option.name}={text}"] if text.startswith("-") else [f"--{option.name}", text]
    return args


def _reproduces(command: str, expected: Strategy, config: TrainConfig) -> bool:
    """Whether the training script would resolve the command to the same strategy."""
    try:
        strategy = from_launcher(shlex.split(command), "train.py")
        reread = resolve(strategy, expected.num_processes, config.mixed_precision, config.pp_size, config.pp_schedule)
    except ConfigError:
        return False
    return reread.sizes == expected.sizes


def _tunesmith_command(strategy: str, job: TrainJob, args: Sequence[str]) -> str:
    return shlex.join([*tunesmith_program(), "train", "--strategy", strategy, *device_args(job), *args])


def tunesmith_program() -> list[str]:
    """The command that starts `tunesmith` from any folder."""
    script = Path(sys.executable).with_name("tunesmith")
    return [str(script)] if script.exists() else [sys.executable, "-P", "-m", "app.cli"]


def device_args(job: TrainJob) -> list[str]:
    """The job's devices as command-line arguments."""
    ids, count, machines = job.devices.gpu_ids, job.devices.num_processes, job.devices.machines
    own = ["--gpus", ",".join(map(str, ids))] if ids else ["--num_processes", str(count)]
    return [*own, *machine_args(machines)] if machines else own


def numbers_of(job: TrainJob) -> Numbers:
    """The numbers derived from a job's options."""
    config, ranks, rows = job.config, job.strategy.data_parallel_size, known_rows(job.config)
    per_epoch = math.ceil(rows / config.global_batch_size) if rows else None
    total = config.max_steps or (math.ceil(config.num_train_epochs * per_epoch) if per_epoch else None)
    return Numbers(
        world_size=job.devices.num_processes,
        data_parallel_size=ranks,
        micro_batch=config.per_device_train_batch_size,
        accumulation_steps=config.accumulation_steps(ranks),
        global_batch_size=config.global_batch_size,
        tokens_per_step=config.global_batch_size * config.example_tokens,
        learning_rate=config.scaled_learning_rate(),
        epochs=None if config.max_steps else config.num_train_epochs,
        steps_per_epoch=per_epoch,
        total_steps=total,
    )


def preview_request(
    request: object, runs_dir: Path, roots: Sequence[Path] | None = None, remote_code: bool = False
) -> Preview:
    """`preview` of a JSON document, as sent by scripts.

    Args:
        request: `{"preset", "strategy", "gpus", "num_processes", "options": {...}}`, all optional.
        runs_dir: where the run folder is created, unless set in the options.
        roots: folders that files may be in; None allows every path.
        remote_code: whether `trust_remote_code` may be on.

    Raises:
        ConfigError: when the document has another structure.
    """
    if not isinstance(request, dict) or not isinstance(options := request.get("options", {}), dict):
        raise ConfigError(
            'the request is not a JSON object with an object of options; send {"preset": NAME, "options": {}}'
        )
    if unknown := sorted(str(key) for key in request if key not in ("preset", "options", *_LAUNCH)):
        listed = ", ".join(shortened(repr(key), 40) for key in unknown[:5])
        raise ConfigError(f"the request has {listed}; its keys are preset, strategy, gpus, num_processes and options")
    launch_values = {name: request.get(name) for name in ("preset", *_LAUNCH)}
    return preview({"runs_dir": str(runs_dir), **options}, **launch_values, roots=roots, remote_code=remote_code)


# -- save, load, clone -----------------------------------------------------------------------------------------------


def read_text(path: Path) -> str:
    """Reads at most `MAX_YAML_LENGTH + 1` characters of an uploaded file.

    Raises:
        ConfigError: when it is not text.
    """
    try:
        with open(path, encoding="utf-8") as file:
            return file.read(MAX_YAML_LENGTH + 1)
    except (OSError, UnicodeDecodeError):
        raise ConfigError(f"{shortened(path.name)} is not text; load a YAML file that was saved here") from None


def load_yaml(text: str, roots: Sequence[Path] | None = None) -> Choices:
    """The choices of a saved config.

    Args:
        text: the YAML.
        roots: folders that files may be in; None allows every path.

    Raises:
        ConfigError: with all mistakes, when it is not a valid config.
    """
    if len(text) > MAX_YAML_LENGTH:
        raise ConfigError(f"the YAML is longer than {MAX_YAML_LENGTH:,} characters; load a config file")
    options = parse_yaml(text, "the YAML")
    if roots is not None and (mistakes := path_mistakes(options, roots)):  # before a file is read
        raise ConfigError(mistakes)
    config = Request(options=options).resolve()
    return Choices(config.preset, _changed(config))


def _changed(config: TrainConfig) -> dict[str, str]:
    texts = as_texts({name: getattr(config, name) for name in TrainConfig.model_fields if name not in _BY_RUN})
    start = starting_values(config.preset, texts)
    return {name: text for name, text in texts.items() if text != start[name]}


def from_run(run: RunFolder) -> Choices:
    """The choices of a run, to start another one like it.

    Raises:
        ConfigError: when its config or strategy cannot be read.
    """
    config = Request(config=str(run.config)).resolve()
    values = {name: text for name, text in _changed(config).items() if name not in ("runs_dir", "run_name")}
    ids, processes = gpu_ids(run), world_size(run)
    stored = load_strategy(str(run.accelerate))
    strategy = stored.name if _is_shipped(stored, config) else str(run.accelerate)
    return Choices(config.preset, values, strategy, tuple(ids), None if ids else processes)


def _is_shipped(stored: Strategy, config: TrainConfig) -> bool:
    """Whether the shipped file of this name resolves to the same strategy."""
    if stored.name not in strategy_names():
        return False
    try:
        shipped = resolve(load_strategy(stored.name), stored.num_processes, config.mixed_precision)
        resolved = resolve(stored, stored.num_processes, config.mixed_precision)
        return (shipped.values, shipped.pp_size, shipped.pp_schedule) == (
            resolved.values,
            resolved.pp_size,
            resolved.pp_schedule,
        )
    except ConfigError:
        return False
