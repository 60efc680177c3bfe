"""What `tunesmith bench` will measure: the user's settings, and changes of one of them for speed or memory.

All but `packing` leave every step as it is: the same rows, the same loss.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from app.launch.job import Job, Mistakes, Words, for_verb, told, train_job
from app.prove.plan import SHORT_RUN
from trainers.config.options import MACHINE_OPTIONS, ConfigError, TrainConfig
from trainers.config.parse import Request, parse_request
from trainers.config.validation import build
from trainers.strategy.strategy import refusal

BATCH = "per_device_train_batch_size"
SETTINGS = (
    BATCH, "packing", "gradient_checkpointing", "selective_checkpointing", "attn_implementation", "torch_compile",
)  # fmt: skip
KERNELS_OF_GPUS, KERNELS_OF_CPUS = ("auto", "varlen", "flex", "sdpa"), ("auto", "sdpa", "eager")
"""Values of `attn_implementation` that are worth a try; auto takes the others where they are best."""
WARM = 3
"""Steps before the clock starts: the first ones allocate, choose kernels and compile."""
LEAST_STEPS, MOST_STEPS = 3, 20
"""Steps on the clock: as many as fit into `LONG_ENOUGH`, within these bounds."""
LONG_ENOUGH = 20.0
"""Seconds."""
TURNS = 2
_OWN = ("settings", "steps", "turns")
_MOST = {"steps": 10_000, "turns": 20}
# A run is stopped after its last timed step, within half a second; at its very end it would save and export.
_BEYOND = 200
_OFF = {
    **SHORT_RUN, "auto_find_batch_size": False, "loss_spike_factor": 0.0,
    "output_dir": None, "resume_from_checkpoint": None,
}  # fmt: skip


@dataclass(frozen=True)
class Measured:
    """One run, over its timed steps.

    Args:
        tokens_per_second: real tokens of all ranks, padding not counted.
        seconds_per_step: their mean.
        memory_gib: peak of the rank with most; on a CPU the resident memory.
        first_loss: of the first step, before any update; None when it is not finite.
        loss: of the last timed step, likewise.
    """

    tokens_per_second: float
    seconds_per_step: float
    memory_gib: float
    first_loss: float | None
    loss: float | None


@dataclass
class Trial:
    """The user's settings with some changed, and what came of it.

    Args:
        changes: new values by option; none for the settings as they are.
        config: what is trained; None when that is not possible.
        outcome: `not run`, `not possible`, `measured`, `out of memory` or `failed`.
        reason: why it was not measured.
        runs: one for each turn.
    """

    changes: dict[str, Any]
    config: TrainConfig | None
    outcome: str = "not run"
    reason: str | None = None
    runs: list[Measured] = field(default_factory=list)

    @property
    def name(self) -> str:
        """For people."""
        return ", ".join(f"{name}={told(value)}" for name, value in self.changes.items()) or "yours"

    @property
    def flags(self) -> str:
        """The changes as one would write them on the command line."""
        return " ".join(f"--{name} {told(value)}" for name, value in self.changes.items())

    @property
    def able(self) -> bool:
        """Whether it can run, as far as is known."""
        return self.config is not None and self.outcome in ("not run", "measured")

    def refuse(self, outcome: str, reason: str) -> None:
        """Notes why it is not measured."""
        self.outcome, self.reason = outcome, reason

    def median(self, number: str) -> float | None:
        """The median over the runs of a number of `Measured`; None without any."""
        found = [value for run in self.runs if (value := getattr(run, number)) is not None]
        return statistics.median(found) if found else None

    @property
    def spread(self) -> float:
        """How far the runs are apart: the largest difference of their tokens per second, as a share of the median."""
        rates = [run.tokens_per_second for run in self.runs]
        return (max(rates) - min(rates)) / statistics.median(rates) if rates else 0.0


@dataclass
class Plan:
    """Everything that `bench` will do, but for the changes that turn out to help, which it measures together.

    Args:
        job: what `train` would make of the request.
        base: the settings as they are.
        variants: each with one change.
        steps: on the clock; None for as many as are quick.
        turns: how often each is run.
    """

    job: Job
    base: Trial
    variants: list[Trial]
    steps: int | None
    turns: int


def make_plan(words: Words) -> Plan:
    """The plan that a command line asks for.

    Raises:
        ConfigError: with every mistake at once.
    """
    mistakes, request = Mistakes(), Request()
    with mistakes:
        request = parse_request(words.options)
    own = {name: request.options.pop(name) for name in _OWN if name in request.options}
    steps, turns, chosen = None, TURNS, list(SETTINGS)
    with mistakes:
        steps = _count(own["steps"], "steps", 1) if "steps" in own else None
    with mistakes:
        turns = _count(own.get("turns", TURNS), "turns", TURNS)
    with mistakes:
        chosen = _settings(own["settings"]) if "settings" in own else chosen
    mistakes.lines += _others(words, request)
    job = None
    with mistakes:
        job = train_job(Words(words.names, _here(words), set(), _flags(request)))
    mistakes.lines = [for_verb(line, "bench", _OWN) for line in mistakes.lines]
    mistakes.refuse()
    if job is None:
        raise AssertionError("no mistake, and yet no job")
    found = changes_of(job.config, chosen, bool(job.devices.gpu_ids))
    if not found:
        raise ConfigError(f"settings={','.join(chosen)}: torch_compile is worth a try on GPUs alone; name others too")
    return Plan(job, trial(job, {}, steps), [trial(job, changes, steps) for changes in found], steps, turns)


def trial(job: Job, changes: Mapping[str, Any], steps: int | None) -> Trial:
    """The job's settings with these changes; one that is not possible when no job of `train` could have them.

    Args:
        job: of the user.
        changes: new values by option.
        steps: on the clock; None for as many as are quick.
    """
    made = Trial(dict(changes), None)
    most = WARM + (steps or MOST_STEPS) + _BEYOND
    try:
        config = build({**job.config.model_dump(), **_OFF, **changes, "max_steps": most})
        if reason := refusal(job.strategy, config, bool(job.devices.gpu_ids)):
            raise ConfigError(reason)
    except ConfigError as error:
        made.refuse("not possible", "; ".join(error.mistakes))
    else:
        made.config = config
    return made


def together(plan: Plan, trials: Sequence[Trial]) -> Trial:
    """All their changes at once."""
    return trial(plan.job, {name: value for one in trials for name, value in one.changes.items()}, plan.steps)


def changes_of(config: TrainConfig, settings: Iterable[str], on_gpus: bool) -> list[dict[str, Any]]:
    """What is worth a try, one change at a time.

    Args:
        config: the user's.
        settings: options that may change.
        on_gpus: whether the run has any; compiling pays off there alone.
    """
    size, kernels = config.per_device_train_batch_size, KERNELS_OF_GPUS if on_gpus else KERNELS_OF_CPUS
    values: dict[str, list[Any]] = {
        BATCH: [2 * size, *([size // 2] if size > 1 else [])],
        "packing": [not config.packing],
        "gradient_checkpointing": [not config.gradient_checkpointing],
        "selective_checkpointing": [not config.selective_checkpointing] if config.gradient_checkpointing else [],
        "attn_implementation": [name for name in kernels if name != config.attn_implementation],
        "torch_compile": [not config.torch_compile] if on_gpus or config.torch_compile else [],
    }
    return [{name: value} for name in settings for value in values[name]]


def _count(value: Any, name: str, least: int) -> int:
    text, most = str(value), _MOST[name]
    if not (text.isascii() and text.isdigit() and least <= int(text[:9]) <= most):
        raise ConfigError(
            f"{name}={text[:40]!r} is no number of {name}; write {least} to {most}, e.g. --{name} {least}"
        )
    return int(text)


def _settings(text: str) -> list[str]:
    names = [name.strip() for name in str(text).split(",") if name.strip()]
    strange = [name for name in names if name not in SETTINGS]
    if strange or not names:
        what = f"{', '.join(name[:40] for name in strange)} is none that bench varies" if strange else "none is named"
        raise ConfigError(f"settings: {what}; use {', '.join(SETTINGS)}")
    return list(dict.fromkeys(names))


def _others(words: Words, request: Request) -> list[str]:
    """What `train` takes and makes no sense here."""
    lines = [f"--{name} {words.values[name]}: bench runs on this machine alone; leave it out"
             for name in MACHINE_OPTIONS if name in words.values]  # fmt: skip
    lines += [f"--{name} is for `tunesmith train`; leave it out" for name in ("check", "detach", "force")
              if name in words.switches]  # fmt: skip
    if "resume_from_checkpoint" in request.options:
        lines.append("resume_from_checkpoint: bench starts each run at its first step; leave it out")
    return lines


def _here(words: Words) -> dict[str, str]:
    return {name: value for name, value in words.values.items() if name not in MACHINE_OPTIONS}


def _flags(request: Request) -> list[str]:
    """The options of `train`, but for those that are refused already."""
    given = {"preset": request.preset, "config": request.config}
    options = {name: value for name, value in request.options.items() if name != "resume_from_checkpoint"}
    return [f"--{name}={value}" for name, value in {**given, **options}.items() if value is not None]
