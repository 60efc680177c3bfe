"""Plans what `tunesmith bench` measures: the user's settings, and single changes to them that may help.

All changes but `packing` leave training unchanged: the same rows and the same loss at every step.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from app.command_line import DEVICES, Args, Verb
from app.launch.job import TrainJob, as_argument, train_job
from app.prove.plan import SHORT_RUN
from trainers.config.command_line import option
from trainers.config.mistakes import ConfigError, Mistake, Mistakes
from trainers.config.options import MACHINE_OPTIONS, TrainConfig
from trainers.config.parse import whole_number
from trainers.config.validation import build
from trainers.strategy.strategy import refusal

BATCH = "per_device_train_batch_size"
SETTINGS = (
    BATCH, "packing", "gradient_checkpointing", "selective_checkpointing", "attn_implementation", "torch_compile",
)  # fmt: skip
KERNELS_OF_GPUS, KERNELS_OF_CPUS = ("auto", "varlen", "flex", "sdpa"), ("auto", "sdpa", "eager")
"""Values of `attn_implementation` worth trying; `auto` picks the others where they are best."""
WARM = 3
"""Warm-up steps: the first steps allocate, choose kernels and compile."""
LEAST_STEPS, MOST_STEPS = 3, 20
"""Bounds on the number of timed steps: as many as fit in `LONG_ENOUGH`."""
LONG_ENOUGH = 20.0
"""Seconds."""
TURNS = 2
_MOST = {"steps": 10_000, "turns": 20}
# Extra steps: a run is stopped within half a second of its last timed step; at its end it would save and export.
_BEYOND = 200
_OFF = {
    **SHORT_RUN, "auto_find_batch_size": False, "loss_spike_factor": 0.0,
    "output_dir": None, "resume_from_checkpoint": None,
}  # fmt: skip

BENCH = Verb(
    "bench",
    "Measure the first steps of `train` with the same arguments, with your settings and with one of them "
    "changed at a time, interleaved; then with all changes that helped. Nothing is saved. Exit status: 0 your "
    "settings were measured, 1 they could not be, 130 interrupted, 2 invalid request.",
    own={
        "settings": option("settings", "<a,b,c>", f"Options to vary; default: {','.join(SETTINGS)}."),
        "steps": option("steps", "<int>", f"Timed steps per run, after {WARM} more; default: {LEAST_STEPS} to "
                        f"{MOST_STEPS}, as many as fit into {LONG_ENOUGH:g} seconds."),
        "turns": option("turns", "<int>", f"Number of runs per setting; at least 2; default: {TURNS}."),
        "scaling": option("scaling", "<1,2,4>", "Measure speed-up and efficiency on these numbers of processes or GPUs "
                          "instead, with the same global batch."),
        "strategies": option("strategies", "<a,b,c>", "With --scaling: the strategies; default: --strategy, or ddp."),
    },
    launch=("strategy", *DEVICES),
    hidden={*SHORT_RUN, "max_steps", "num_train_epochs", "output_dir", "resume_from_checkpoint"},
)  # fmt: skip


@dataclass(frozen=True)
class Measured:
    """Measurements of one run over its timed steps.

    Args:
        tokens_per_second: real tokens of all ranks, without padding.
        seconds_per_step: mean time of a step.
        memory_gib: peak memory of the fullest rank; on a CPU, resident memory.
        first_loss: loss of the first step, before any update; None if it is not finite.
        loss: loss of the last timed step; None if it is not finite.
    """

    tokens_per_second: float
    seconds_per_step: float
    memory_gib: float
    first_loss: float | None
    loss: float | None


@dataclass
class Trial:
    """The user's settings with some changes, and the result.

    Args:
        changes: new values by option; empty for the user's own settings.
        config: the config to train; None if the changes are not possible.
        outcome: `not run`, `not possible`, `measured`, `out of memory` or `failed`.
        reason: why it was not measured.
        runs: the measurements, one per turn.
        job: what to run, with `config` in place of its own.
    """

    changes: dict[str, Any]
    config: TrainConfig | None
    outcome: str = "not run"
    reason: str | None = None
    runs: list[Measured] = field(default_factory=list)
    job: TrainJob | None = None

    @property
    def name(self) -> str:
        """Display name."""
        return ", ".join(f"{name}={as_argument(value)}" for name, value in self.changes.items()) or "yours"

    @property
    def flags(self) -> str:
        """The changes as command-line options."""
        return " ".join(f"--{name} {as_argument(value)}" for name, value in self.changes.items())

    @property
    def able(self) -> bool:
        """Whether it can run, as far as known."""
        return self.config is not None and self.outcome in ("not run", "measured")

    def refuse(self, outcome: str, reason: str) -> None:
        """Records why it is not measured."""
        self.outcome = outcome
        self.reason = reason

    def median(self, number: str) -> float | None:
        """The median over the runs of a field of `Measured`; None without runs."""
        values = [value for run in self.runs if (value := getattr(run, number)) is not None]
        return statistics.median(values) if values else None

    @property
    def spread(self) -> float:
        """Spread of the runs: the largest difference of their tokens per second, relative to the median."""
        rates = [run.tokens_per_second for run in self.runs]
        return (max(rates) - min(rates)) / statistics.median(rates) if rates else 0.0


@dataclass
class Plan:
    """What `bench` measures, before it combines the changes that help.

    Args:
        job: the job that `train` would run.
        base: the user's settings.
        variants: trials with one change each.
        steps: number of timed steps; None to choose it by their duration.
        turns: number of runs of each trial.
    """

    job: TrainJob
    base: Trial
    variants: list[Trial]
    steps: int | None
    turns: int


def make_plan(args: Args) -> Plan:
    """Makes the plan of a command line.

    Raises:
        ConfigError: with every mistake at once.
    """
    mistakes, own = Mistakes(), args.own
    steps, turns, chosen = None, TURNS, list(SETTINGS)
    with mistakes:
        steps = count_of(own["steps"], "steps", 1) if "steps" in own else None
    with mistakes:
        turns = count_of(own.get("turns", TURNS), "turns", TURNS)
    with mistakes:
        chosen = _settings(own["settings"]) if "settings" in own else chosen
    mistakes += unsupported(args)
    if "strategies" in own:
        mistakes.append(Mistake("strategies", own["strategies"], "is for --scaling", "use --strategy for one"))
    job = None
    with mistakes:
        launch = {name: value for name, value in args.launch.items() if name not in (*MACHINE_OPTIONS, "min_machines")}
        args.request.options.pop("resume_from_checkpoint", None)  # refused already
        job = train_job(Args(args.names, launch, request=args.request))
    mistakes.refuse()
    if job is None:
        raise AssertionError("no mistake, and yet no job")
    all_changes = changes_of(job.config, chosen, bool(job.devices.gpu_ids))
    if not all_changes:
        raise ConfigError(
            f"settings={','.join(chosen)}: torch_compile is worth trying only on GPUs; add other settings"
        )
    return Plan(
        job, make_trial(job, {}, steps), [make_trial(job, changes, steps) for changes in all_changes], steps, turns
    )


def make_trial(job: TrainJob, changes: Mapping[str, Any], steps: int | None) -> Trial:
    """A trial of the job's settings with changes; marked as not possible if `train` would refuse them.

    Args:
        job: the user's job.
        changes: new values by option.
        steps: number of timed steps; None to choose it by their duration.
    """
    new_trial = Trial(dict(changes), None, job=job)
    most = WARM + (steps or MOST_STEPS) + _BEYOND
    try:
        config = build({**job.config.model_dump(), **_OFF, **changes, "max_steps": most})
        if reason := refusal(job.strategy, config, bool(job.devices.gpu_ids)):
            raise ConfigError(reason)
    except ConfigError as error:
        new_trial.refuse("not possible", "; ".join(error.lines))
    else:
        new_trial.config = config
    return new_trial


def together(plan: Plan, trials: Sequence[Trial]) -> Trial:
    """A trial with all changes of the given trials."""
    changes = {name: value for trial in trials for name, value in trial.changes.items()}
    return make_trial(plan.job, changes, plan.steps)


def changes_of(config: TrainConfig, settings: Iterable[str], on_gpus: bool) -> list[dict[str, Any]]:
    """The single changes worth trying.

    Args:
        config: the user's config.
        settings: options that may change.
        on_gpus: whether the run uses GPUs; compiling pays off only there.
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


def count_of(value: Any, name: str, least: int) -> int:
    most = _MOST[name]
    if (number := whole_number(str(value), least, most)) is None:
        remedy = f"use {least} to {most}, e.g. --{name} {least}"
        raise ConfigError.about(name, repr(str(value)[:40]), f"is not a valid number of {name}", remedy)
    return number


def _settings(text: str) -> list[str]:
    names = [name.strip() for name in str(text).split(",") if name.strip()]
    unknown = [name for name in names if name not in SETTINGS]
    if unknown or not names:
        problem = f"{', '.join(name[:40] for name in unknown)} cannot be varied" if unknown else "no setting is given"
        raise ConfigError(f"settings: {problem}; use {', '.join(SETTINGS)}")
    return list(dict.fromkeys(names))


def unsupported(args: Args) -> list[Mistake]:
    """Mistakes for options of `train` that `bench` does not support."""
    mistakes = [Mistake(name, args.launch[name], ": bench runs on this machine only", "leave it out")
                for name in (*MACHINE_OPTIONS, "min_machines") if name in args.launch]  # fmt: skip
    mistakes += [Mistake(f"--{name}", None, "is for `tunesmith train`", "leave it out")
                 for name in ("check", "detach", "force") if name in args.switches]  # fmt: skip
    if "resume_from_checkpoint" in args.request.options:
        problem = ": bench starts each run at its first step"
        mistakes.append(Mistake("resume_from_checkpoint", None, problem, "leave it out"))
    return mistakes
