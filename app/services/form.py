"""The model behind the Train page, for scripts too: what a person changed -> mistakes, derived numbers, YAML, command.

Nothing is validated here: the request goes the way of `tunesmith train`. What is added is which folders it may touch.
"""

from __future__ import annotations

import math
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from app.accelerate_launch import by_hand_line
from app.console import shortened
from app.hardware import Devices
from app.launch.device_fit import fit_devices
from app.launch.job import Job, Mistakes, job_of
from app.runs.runs import gpu_ids, run_of_id, world_size
from app.services.allowed_paths import INPUTS, OUTPUTS, path_mistakes, strategy_mistake
from app.services.choices import GpuChoice
from app.services.data import known_notes, known_rows
from app.services.fields import as_texts, fields, names, text_of
from app.services.starting_values import NAMING, base_config, starting_values
from trainers.config.options import ConfigError, TrainConfig
from trainers.config.parse import Request, dump_yaml, parse_yaml
from trainers.run.folder import RunFolder
from trainers.strategy.strategy import STRATEGIES_DIR, Strategy, from_launcher, load_strategy, resolve, strategy_names

LONGEST_YAML = 100_000
_LAUNCH = ("strategy", "gpus", "num_processes")
_BY_RUN = {"preset", "output_dir", "resume_from_checkpoint"}


@dataclass(frozen=True)
class Numbers:
    """What follows from the options.

    Args:
        world_size: processes.
        data_parallel_size: ranks that see different rows.
        micro_batch: rows per micro-batch and rank.
        accumulation_steps: micro-batches per step and rank.
        global_batch_size: rows per step over all ranks.
        tokens_per_step: tokens of a step at most.
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
        errors: lines by option, by `strategy` or `gpus`, or by an empty name for the rest; empty when it can start.
        warnings: lines that the user should read.
        numbers: what follows from the options; None with errors, like all that is below.
        yaml: the resolved config.
        command: the line that starts such a run from a terminal.
        job: what `app.launch.foreground` starts.
        notes: lines that say what was chosen for the user.
    """

    errors: dict[str, list[str]] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    numbers: Numbers | None = None
    yaml: str = ""
    command: str = ""
    job: Job | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def mistakes(self) -> list[str]:
        """Every line of `errors`."""
        return [line for lines in self.errors.values() for line in lines]

    def as_json(self) -> dict[str, Any]:
        """All but the job, for scripts."""
        numbers = asdict(self.numbers) if self.numbers else None
        return {
            "errors": self.errors, "warnings": self.warnings, "numbers": numbers, "yaml": self.yaml,
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
    """

    preset: str | None = None
    values: dict[str, str] = field(default_factory=dict)
    strategy: str | None = None
    gpus: tuple[int, ...] = ()
    num_processes: int | None = None


@dataclass(frozen=True)
class DefaultGpus:
    """The GPUs that a form ticks by itself.

    Args:
        ids: theirs; empty when none is free.
        note: why free ones are left out; empty when none is.
    """

    ids: tuple[int, ...]
    note: str = ""


def default_gpus(preset: str | None, gpus: Sequence[GpuChoice]) -> DefaultGpus:
    """The free GPUs over which a preset's global batch divides.

    Args:
        preset: its name; None or empty without one.
        gpus: those of the machine.

    Raises:
        ConfigError: for an unknown preset.
    """
    free = [one.index for one in gpus if not one.holder and not one.foreign]
    if not free:
        return DefaultGpus(())
    try:
        fit = fit_devices(base_config(preset or None), None, Devices(free, len(free)), False, ())
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
) -> Preview:
    """What a request would do, with every mistake at once. Starts and writes nothing.

    Args:
        values: text, number or boolean by option, of what differs from the preset, or from the defaults without one.
        preset: its name.
        strategy: name, or path of an Accelerate YAML.
        gpus: ids such as `0,2`; default: all.
        num_processes: processes on a machine without GPUs.
        roots: folders in which files may lie; None allows every path.
        remote_code: whether `trust_remote_code` may be on.
    """
    mistakes = Mistakes()
    given = {"preset": preset, "strategy": strategy, "gpus": gpus or None, "num_processes": num_processes}
    launch = {name: text for name, text in _texts(given, mistakes).items() if text not in ("", "none")}
    texts = _without_blanks(_texts(values, mistakes))
    preset = launch.pop("preset", None) or texts.pop("preset", None)
    texts = {name: _absolute(text) if name in OUTPUTS else text for name, text in texts.items()}
    refused = {} if roots is None else _refused(texts, preset, launch, roots)
    mistakes.lines += refused.values()
    kept = {name: text for name, text in texts.items() if name not in refused}
    job = None
    try:
        job = job_of(Request(preset, options=dict(kept)), _allowed(launch, refused), mistakes, None)
    except ConfigError as error:
        lines = [line for line in error.mistakes if not any(line.startswith(f"{name} is missing") for name in refused)]
    else:
        lines = _remote_code(job.config, remote_code)
    if lines or not job:
        return Preview(by_field(lines, launch.get("strategy", "")))
    return _shown(job, texts, launch.get("strategy"))


def _texts(values: Mapping[str, Any], mistakes: Mistakes) -> dict[str, str]:
    """The values that have a text; what is wrong with the others is added to the mistakes."""
    texts: dict[str, str] = {}
    for name, value in values.items():
        with mistakes:
            texts.update(as_texts({name: value}))
    return texts


def _without_blanks(texts: dict[str, str]) -> dict[str, str]:
    """A field left blank means the preset's value, where blank is no value of its own."""
    own = {one.name for one in fields() if one.optional or one.kind in ("list", "map")}
    return {name: text for name, text in texts.items() if text.strip() or name in own or name not in names()}


def _absolute(path: str) -> str:
    """The path from the root, so that it means the same in any folder."""
    if path.lower() in ("", "none", "null", "auto") or "\0" in path or path.startswith("~"):
        return path
    return str(Path(path).absolute())


def _refused(
    texts: Mapping[str, str], preset: str | None, launch: Mapping[str, str], roots: Sequence[Path]
) -> dict[str, str]:
    below: dict[str, Any] = {}
    with Mistakes():  # an unknown preset is told with the rest
        below = base_config(preset).model_dump(include={*INPUTS, *OUTPUTS})
    found = path_mistakes({**below, **texts}, roots)
    line = strategy_mistake(launch["strategy"], roots) if "strategy" in launch else None
    return {**found, "strategy": line} if line else found


def _allowed(launch: Mapping[str, str], refused: Mapping[str, str]) -> dict[str, str]:
    return {name: text for name, text in launch.items() if name not in refused}


def _remote_code(config: TrainConfig, allowed: bool) -> list[str]:
    if config.trust_remote_code and not allowed:
        return ["trust_remote_code=true is refused here; only `tunesmith ui --trust_remote_code` allows it"]
    return []


def by_field(lines: Sequence[str], strategy: str = "") -> dict[str, list[str]]:
    """The lines under the field that each begins with, or else mentions first; an empty name for the rest.

    Args:
        lines: mistakes, a line each.
        strategy: the name or path that was asked for, which lines about a YAML begin with.
    """
    file = (f"{Path(strategy).name}: ", f"{strategy} ", f"cannot read {strategy}:")
    grouped: dict[str, list[str]] = {}
    for line in lines:
        begins = re.match(r"(unknown )?(--)?(\w+)", line)
        first = begins[3] if begins else ""
        known = {*names(), *_LAUNCH}
        if (strategy and line.startswith(file)) or line.partition(".yaml: ")[0] in strategy_names():
            name = "strategy"
        elif line.startswith("unknown option"):
            name = "columns" if line.startswith("unknown option columns.") else ""
        elif first in known:
            name = first
        else:
            name = next((word for word in re.findall(r"\w+", line) if word in known), "")
        grouped.setdefault("gpus" if name == "num_processes" else name, []).append(line)
    return grouped


def _shown(job: Job, texts: Mapping[str, str], strategy: str | None) -> Preview:
    config = job.config
    warnings = [*job.warnings, *(f"Data: {note}." for note in known_notes(config))]
    words = _words(config, texts)
    named = strategy or job.strategy.name
    file = STRATEGIES_DIR / f"{named}.yaml" if named in strategy_names() else Path(named).expanduser().absolute()
    command = by_hand_line(file, job.devices, words)
    if job.strategy.mesh and not _comes_back(command, job.strategy, config):
        command = _own_command(named, job, words)
        warnings.append(
            f"`accelerate launch` takes strategy {job.strategy.name} only with {load_strategy(named).num_processes} "
            "processes, as its file says; the command shown is `tunesmith train`, which fits it"
        )
    return Preview({}, warnings, numbers_of(job), dump_yaml(config), command, job, job.notes)


def _words(config: TrainConfig, texts: Mapping[str, str]) -> list[str]:
    """The options that differ from the preset, as words of a command line that means the same in any folder."""
    base = base_config(config.preset)
    cleared = starting_values(config.preset, {name: text_of(getattr(config, name)) for name in NAMING})
    words = ["--preset", config.preset] if config.preset else []
    for one in fields():
        value = getattr(config, one.name)
        known = value == getattr(base, one.name) and text_of(value) == cleared[one.name]
        if known if config.preset else value == getattr(base, one.name) and one.default is not None:
            continue
        text = text_of(value) if one.name in INPUTS else texts.get(one.name, text_of(value))
        words += [f"--{one.name}={text}"] if text.startswith("-") else [f"--{one.name}", text]
    return words


def _comes_back(command: str, wanted: Strategy, config: TrainConfig) -> bool:
    """Whether the training script would read this very strategy from the command."""
    try:
        found = resolve(from_launcher(shlex.split(command), "train.py"), wanted.num_processes, config.mixed_precision,
                        config.pp_size, config.pp_schedule)  # fmt: skip
    except ConfigError:
        return False
    return found.sizes == wanted.sizes


def _own_command(strategy: str, job: Job, words: Sequence[str]) -> str:
    return shlex.join([*own_program(), "train", "--strategy", strategy, *device_words(job), *words])


def own_program() -> list[str]:
    """How `tunesmith` is started from any folder."""
    script = Path(sys.executable).with_name("tunesmith")
    return [str(script)] if script.exists() else [sys.executable, "-P", "-m", "app.cli"]


def device_words(job: Job) -> list[str]:
    """The job's devices as words of a command line."""
    ids, count = job.devices.gpu_ids, job.devices.num_processes
    return ["--gpus", ",".join(map(str, ids))] if ids else ["--num_processes", str(count)]


def numbers_of(job: Job) -> Numbers:
    """What follows from a job's options."""
    config, ranks, rows = job.config, job.strategy.data_parallel_size, known_rows(job.config)
    per_epoch = math.ceil(rows / config.global_batch_size) if rows else None
    total = config.max_steps or (math.ceil(config.num_train_epochs * per_epoch) if per_epoch else None)
    return Numbers(
        world_size=job.devices.num_processes,
        data_parallel_size=ranks,
        micro_batch=config.per_device_train_batch_size,
        accumulation_steps=config.accumulation_steps(ranks),
        global_batch_size=config.global_batch_size,
        tokens_per_step=config.global_batch_size * config.max_length,
        learning_rate=config.scaled_learning_rate(),
        epochs=None if config.max_steps else config.num_train_epochs,
        steps_per_epoch=per_epoch,
        total_steps=total,
    )


def preview_request(
    request: object, runs_dir: Path, roots: Sequence[Path] | None = None, remote_code: bool = False
) -> Preview:
    """`preview` of one JSON document, as scripts send it.

    Args:
        request: `{"preset", "strategy", "gpus", "num_processes", "options": {...}}`, each of them optional.
        runs_dir: where the run folder is made, unless the options say otherwise.
        roots: folders in which files may lie; None allows every path.
        remote_code: whether `trust_remote_code` may be on.

    Raises:
        ConfigError: when the document is of another form.
    """
    if not isinstance(request, dict) or not isinstance(options := request.get("options", {}), dict):
        raise ConfigError(
            'the request is no JSON object with options in an object of their own; send {"preset": NAME, "options": {}}'
        )
    if strange := sorted(str(key) for key in request if key not in ("preset", "options", *_LAUNCH)):
        words = ", ".join(shortened(repr(key), 40) for key in strange[:5])
        raise ConfigError(f"the request has {words}; its keys are preset, strategy, gpus, num_processes and options")
    given = {name: request.get(name) for name in ("preset", *_LAUNCH)}
    return preview({"runs_dir": str(runs_dir), **options}, **given, roots=roots, remote_code=remote_code)


# -- saved, loaded, cloned -------------------------------------------------------------------------------------------


def save_yaml(shown: Preview) -> str:
    """The resolved config, for `tunesmith train --config FILE`.

    Raises:
        ConfigError: while there are mistakes.
    """
    if shown.mistakes:
        raise ConfigError(shown.mistakes)
    return shown.yaml


def read_text(path: Path) -> str:
    """The text of a small file that was sent.

    Raises:
        ConfigError: when it is no text, or a long one.
    """
    try:
        with open(path, encoding="utf-8") as file:
            return file.read(LONGEST_YAML + 1)
    except (OSError, UnicodeDecodeError):
        raise ConfigError(f"{shortened(path.name)} is no text; load a YAML file that was saved here") from None


def load_yaml(text: str) -> Choices:
    """The choices that a saved config stands for.

    Raises:
        ConfigError: when it is no config, with every mistake in it.
    """
    if len(text) > LONGEST_YAML:
        raise ConfigError(f"the YAML is longer than {LONGEST_YAML:,} letters; a config is a short file")
    config = Request(options=parse_yaml(text, "the YAML")).resolve()
    return Choices(config.preset, _changed(config))


def _changed(config: TrainConfig) -> dict[str, str]:
    shown = as_texts({name: getattr(config, name) for name in TrainConfig.model_fields if name not in _BY_RUN})
    start = starting_values(config.preset, shown)
    return {name: text for name, text in shown.items() if text != start[name]}


def from_run(run: RunFolder) -> Choices:
    """The choices that a run was made with, for another one like it.

    Raises:
        ConfigError: when its config or strategy cannot be read.
    """
    config = Request(config=str(run.config)).resolve()
    values = {name: text for name, text in _changed(config).items() if name not in ("runs_dir", "run_name")}
    ids, processes = gpu_ids(run), world_size(run)
    stored = load_strategy(str(run.accelerate))
    named = stored.name if _is_shipped(stored, config) else str(run.accelerate)
    return Choices(config.preset, values, named, tuple(ids), None if ids else processes)


def clone(run_id: str, runs_dir: Path) -> Choices:
    """`from_run` of a run by its id alone, as a page names it.

    Raises:
        ConfigError: also for a path: its config need not be one that the page may show.
    """
    return from_run(run_of_id(run_id, runs_dir))


def _is_shipped(stored: Strategy, config: TrainConfig) -> bool:
    """Whether the file that ships under the strategy's name gives the same for its processes."""
    if stored.name not in strategy_names():
        return False
    try:
        shipped = resolve(load_strategy(stored.name), stored.num_processes, config.mixed_precision)
        found = resolve(stored, stored.num_processes, config.mixed_precision)
        return (shipped.values, shipped.pp_size, shipped.pp_schedule) == (
            found.values,
            found.pp_size,
            found.pp_schedule,
        )
    except ConfigError:
        return False
