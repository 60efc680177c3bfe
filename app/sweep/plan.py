"""Turns the command line of `tunesmith sweep` into a record of trials, all of them checked before the first starts."""

from __future__ import annotations

import dataclasses
import math
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.command_line import SCHEDULER_OPTIONS, Args, Verb
from app.console import shortened
from app.hardware import cpu_count, find_gpus
from app.launch import slurm
from app.launch.job import TrainJob, named_preset
from app.schedulers.slurm_options import SlurmOptions, site_file
from app.sweep.record import PREFIX, SweepFolder, SweepRecord
from app.sweep.runner import rungs_of
from app.sweep.search import METHODS, Result, need_optuna, propose
from app.sweep.space import Axis, grid, grid_size, parse_axis
from app.sweep.trial_runs import job_of_run
from trainers.config.command_line import option
from trainers.config.local_paths import INPUT_PATHS, is_local
from trainers.config.mistakes import ConfigError, Mistake, Mistakes
from trainers.config.options import EMBEDDED, MACHINE_OPTIONS, TrainConfig
from trainers.config.parse import Request, whole_number
from trainers.run.folder import RunFolder, new_run_id

if TYPE_CHECKING:
    from app.runs.compare import Measure

MAX_RUNS = 200
_MOST_RUNS, _MOST_SEEDS = 100_000, 100
_MOST_CORNERS = 256
"""Most combinations of the ends of ranges to check; beyond, each end is checked with the first of the others."""
_LENGTH = ("max_steps", "num_train_epochs")
_SUBMITTED = 8
"""Runs in SLURM at once by default; sites limit how many jobs a user may submit."""
SWEEP = Verb(
    "sweep",
    "Train with several values of some options, such as --learning_rate 1e-4,3e-4 --lora_r 8,16: an ordinary run for "
    "each combination, in the queue of this machine or of SLURM. `sweep list`, `sweep show SWEEP`, `sweep stop "
    "SWEEP` and `sweep resume SWEEP` work on sweeps. Exit status: 0 done, 1 no run could be measured, 130 stopped, 2 "
    "invalid request.",
    own={
        "search": option("search", "<grid|random|tpe>", "Every combination of the values, or --trials points, drawn "
                         "at random or proposed by TPE from the results so far; ranges such as 1e-5:1e-3:log are for "
                         "the latter two. Default: grid."),
        "trials": option("trials", "<int>", "Number of points of a random search or of TPE."),
        "seeds": option("seeds", "<int>", "Runs for each point, with seeds from --seed upwards; default: 1."),
        "parallel": option("parallel", "<int>", "Runs at once; default: one for each set of GPUs, or as many as have "
                           f"cores; in SLURM {_SUBMITTED}."),
        "gpus_per_run": option("gpus_per_run", "<int>", "Split --gpus (default: all GPUs) into sets of this many, one "
                               "set for each run; default: all for every run."),
        "halving": option("halving", "<int>", "Successive halving: cut all runs short, let the best one in this many "
                          "go on, and again until one is left; it has then trained as if never stopped."),
        "measure": option("measure", "<name>", "What decides, as in `runs compare --by`; default: last_eval_loss, or "
                          "recent_loss without evaluation data."),
        "max_runs": option("max_runs", "<int>", f"Refuse a sweep of more runs than this; default: {MAX_RUNS}."),
        **{name: SCHEDULER_OPTIONS[name] for name in ("on", *SlurmOptions.model_fields)},
        "on": option("on", "<local|slurm>", "Where to train: on this machine, or as a job of SLURM for each run; "
                     "default: local.", "Cluster"),
        **{name: option(name, "<...>", "Is set in the site file.", "Cluster", hidden=True) for name in slurm.CODE},
    },
    launch=("strategy", "tp_size", "cp_size", "sp_size", "ep_size", "dp_replicate_size", "gpus", "num_processes"),
    switches=("check", "detach"),
    hidden={"output_dir", "resume_from_checkpoint", "force_resume", "stop_at_step"},
)  # fmt: skip


@dataclasses.dataclass
class Plan:
    """A sweep that can be started.

    Args:
        folder: its folder, which does not exist yet.
        record: the sweep.
        job: the job of its first run, whose warnings hold for all.
    """

    folder: SweepFolder
    record: SweepRecord
    job: TrainJob


def make_plan(args: Args) -> Plan:
    """The sweep of a command line; every point is checked as `tunesmith train` would.

    Raises:
        ConfigError: with all mistakes at once.
    """
    mistakes = Mistakes()
    preset = named_preset(args.names, args.request.preset, mistakes)
    mistakes += args.request.mistakes
    mistakes += [Mistake(name, value, "is decided by the sweep", f"leave --{name} out")
                 for name, value in args.request.options.items()
                 if name in ("output_dir", "resume_from_checkpoint", "force_resume", "stop_at_step")]  # fmt: skip
    _refuse_launch(args, mistakes)
    axes, options = _axes(args, mistakes)
    numbers = _Numbers(args, axes, mistakes)
    on, cluster = _cluster(args, numbers, mistakes)
    devices, parallel = ([{}], numbers.parallel or _SUBMITTED) if on == "slurm" else _devices(args, numbers, mistakes)
    options = {**options, "runs_dir": str(Path(os.path.expanduser(options.get("runs_dir", "runs"))).absolute())}
    launch = {name: value for name, value in args.launch.items() if name not in devices[0]}
    launch |= {"strategy": _absolute(launch["strategy"])} if "strategy" in launch else {}
    record = SweepRecord(
        id=f"{PREFIX}draft", preset=preset, config=_absolute(args.request.config), options=options, launch=launch,
        on=on, cluster=cluster, axes=axes, search=numbers.search, trial_count=numbers.trials, seeds=[0],
        search_seed=0, parallel=parallel, devices=devices, rungs=[0], halving=numbers.halving, measure="", better="low",
    )  # fmt: skip
    job = _checked(record, numbers.seeds, mistakes)
    with mistakes:
        record.measure, record.better = _measure(args.own.get("measure"), job.config if job else None)
    if record.halving and job:
        with mistakes:
            record.rungs = _rungs(record, job.config)
    mistakes.refuse()
    assert job, "no mistake, and yet no job"
    config = job.config
    known = {axis.option for axis in axes}
    name = config.label
    folder = SweepFolder(Path(options["runs_dir"]) / f"{PREFIX}{new_run_id(name, time.time(), os.getpid())}")
    record.id = folder.id
    # Local paths become absolute, as they are in `config`: the sweep may go on from another working folder.
    local = {name: value for name in INPUT_PATHS if (value := getattr(config, name)) and os.path.isabs(value)}
    record.options |= {name: value for name, value in local.items() if name not in known}
    _add_trials(record)
    return Plan(folder, record, job)


def _absolute(path: str | None) -> Any:
    """The absolute path of a local file, folder or glob; a name, such as that of a strategy, is returned unchanged."""
    if path is None or path == EMBEDDED or not is_local(path):
        return path
    return str(Path(os.path.expanduser(path)).absolute())


def _refuse_launch(args: Args, mistakes: Mistakes) -> None:
    for name in [name for name in (*MACHINE_OPTIONS, "min_machines") if name in args.launch]:
        mistakes.append(Mistake(name, args.launch[name], "is not for sweeps", "leave it out, or use --on slurm"))
    if "force" in args.switches:
        mistakes.append(Mistake("--force", None, "is for `resume`", "leave it out"))


def _axes(args: Args, mistakes: Mistakes) -> tuple[list[Axis], dict[str, str]]:
    """What varies, in the order of the command line, and the other options."""
    axes, options = [], {}
    for name, value in args.request.options.items():
        with mistakes:
            if axis := parse_axis(name, str(value)):
                values = tuple(map(_absolute, axis.values)) if name in INPUT_PATHS else axis.values
                axes.append(axis.model_copy(update={"values": values}))
            else:
                options[name] = str(value)
    if not axes and not mistakes and "seeds" not in args.own:
        remedy = "write e.g. --learning_rate 1e-4,3e-4,1e-3, or --seeds 3"
        mistakes.append(Mistake("", None, "no option has several values", remedy))
    return axes, options


class _Numbers:
    """The options of the search, checked.

    Args:
        args: the command line.
        axes: what varies.
        mistakes: mistakes found so far; more are added.
    """

    def __init__(self, args: Args, axes: Sequence[Axis], mistakes: Mistakes):
        self.own, self.mistakes = args.own, mistakes
        search = str(args.own.get("search", "grid"))
        if search not in METHODS:
            mistakes.append(Mistake("search", repr(search), "is no way to search", f"use {', '.join(METHODS)}"))
            search = "grid"
        self.search: Any = search
        self.seeds = self._integer("seeds", 1, _MOST_SEEDS) or 1
        self.parallel = self._integer("parallel", 1, 10_000)
        self.gpus_per_run = self._integer("gpus_per_run", 1, 1024)
        self.halving = self._integer("halving", 2, 100)
        self.trials = self._integer("trials", 1, _MOST_RUNS) or 0
        most = self._integer("max_runs", 1, _MOST_RUNS) or MAX_RUNS
        size = grid_size(axes)
        ranges = [axis for axis in axes if not axis.values]
        if search == "grid":
            mistakes += [Mistake(axis.option, f"{axis.low}:{axis.high}", "is a range, and a grid takes values",
                                 "write --search random or tpe, or a list of values") for axis in ranges]  # fmt: skip
            if "trials" in args.own:
                mistakes.append(Mistake("trials", args.own["trials"], "with a grid", "leave it out: a grid has a trial "
                                        "for each combination; --search random draws from them"))  # fmt: skip
            self.trials = size
        else:
            with mistakes:
                need_optuna()
            if not self.trials and "trials" not in args.own:
                mistakes.append(Mistake("--search", search, "needs a number of trials", "write e.g. --trials 20"))
            if not ranges and self.trials > size:
                mistakes.append(Mistake("trials", self.trials, f", and there are {size} combinations", "ask for fewer"))
            if search == "tpe" and self.halving:
                mistakes.append(Mistake("halving", self.halving, "with TPE, which learns from whole runs",
                                        "use --search random, or leave one out"))  # fmt: skip
        if (runs := self.trials * self.seeds) > most:
            remedy = f"if that is meant, write --max_runs {runs}" if runs <= _MOST_RUNS else "vary less"
            mistakes.append(Mistake("", None, f"{runs:,} runs are more than {most:,}", remedy))

    def _integer(self, name: str, least: int, most: int) -> int | None:
        text = self.own.get(name)
        if text is None:
            return None
        if (number := whole_number(str(text), least, most)) is None:
            problem = f"is not a whole number from {least} to {most}"
            self.mistakes.append(Mistake(name, repr(str(text)[:50]), problem, f"write e.g. --{name} {max(least, 3)}"))
        return number


def _cluster(args: Args, numbers: _Numbers, mistakes: Mistakes) -> tuple[Any, dict[str, Any]]:
    """Where the runs train, and the options of their jobs there."""
    on = args.own.get("on", "local")
    chosen = {name: value for name, value in args.own.items() if name in SlurmOptions.model_fields}
    if on == "local":
        mistakes += [Mistake(name, value, "is for jobs of SLURM", "add --on slurm") for name, value in chosen.items()]
        return on, {}
    if on != "slurm":
        known = {"ray": "Ray has no queue in which runs would wait for each other",
                 "kubernetes": "Tunesmith starts nothing there, it prints a manifest of one run"}  # fmt: skip
        problem = known.get(str(on), "it is no place to train")
        mistakes.append(Mistake("on", shortened(str(on)), f"is not for sweeps: {problem}", "use local or slurm"))
        return "local", {}
    for name in [name for name in slurm.CODE if name in chosen]:
        remedy = f"set it in {site_file()}, which is read at each submission"
        mistakes.append(Mistake(name, shortened(str(chosen.pop(name))), "is code, which no sweep stores", remedy))
    if numbers.gpus_per_run:
        problem = "is for the GPUs of this machine"
        mistakes.append(Mistake("gpus_per_run", numbers.gpus_per_run, problem, "write --gpus_per_node"))
    options = SlurmOptions()
    with mistakes:
        options = SlurmOptions.read(chosen)
    return on, options.model_dump(exclude_none=True, exclude=set(slurm.CODE))


def _devices(args: Args, numbers: _Numbers, mistakes: Mistakes) -> tuple[list[dict[str, str]], int]:
    """Launch options of each set of devices that a run may use, and the number of runs at once."""
    devices: list[dict[str, str]] = [{}]
    gpus = [gpu.index for gpu in find_gpus()]
    if each := numbers.gpus_per_run:
        pool = [part.strip() for part in args.launch["gpus"].split(",")] if "gpus" in args.launch else map(str, gpus)
        ids = list(pool)
        if len(ids) < each or len(ids) % each:
            remedy = f"name a multiple of {each} GPUs with --gpus" if gpus else "leave it out: there is no GPU here"
            mistakes.append(Mistake("gpus_per_run", each, f"does not divide {len(ids)} GPUs", remedy))
            return devices, 1
        devices = [{"gpus": ",".join(ids[first : first + each])} for first in range(0, len(ids), each)]
    processes = whole_number(args.launch.get("num_processes", "2"), 1, 256) or 1
    side_by_side = len(devices) if gpus else max(1, cpu_count() // processes)
    return devices, numbers.parallel or side_by_side


def _checked(record: SweepRecord, seeds: int, mistakes: Mistakes) -> TrainJob | None:
    """Checks every point as `tunesmith train` would, and sets the seeds.

    Args:
        record: the sweep, whose folder does not exist yet.
        seeds: number of seeds.
        mistakes: mistakes found so far; more are added.

    Returns:
        The job of the first point; None if that is refused.
    """
    sizes = [len(axis.ends) for axis in record.axes]
    first = {axis.option: axis.ends[0] for axis in record.axes}
    if math.prod(sizes) <= max(_MOST_CORNERS, record.trial_count if record.search == "grid" and not mistakes else 0):
        points = grid(record.axes)
    else:
        points = [first, *({**first, axis.option: end} for axis in record.axes for end in axis.ends[1:])]
    seed = 0
    with mistakes:
        seed = Request(record.preset, record.config, False, {**record.options, **first}).resolve().seed
    record.seeds = [seed + number for number in range(seeds)]
    jobs, meanings = [], dict[str, dict[str, str]]()
    for values in points:
        trial = record.model_copy(update={"trials": []}).add_trial(values)
        folder = RunFolder(Path(record.options["runs_dir"]) / trial.runs[-1].id)
        with mistakes:
            jobs.append(job_of_run(record, trial, trial.runs[-1], folder, "none", record.devices[0])[0])
            for name, text in values.items():
                known = meanings.setdefault(name, {}).setdefault(repr(getattr(jobs[-1].config, name)), text)
                if known != text:
                    raise ConfigError.about(name, text, f"is the same value as {known}", "write it once")
    return jobs[0] if jobs else None


def decisive_measure(name: str) -> Measure:
    """A measure of which one value is better than another.

    Raises:
        ConfigError: if there is none of this name.
    """
    from app.runs.compare import MEASURES  # it imports numpy, which takes a while

    measure = MEASURES.get(name)
    if measure is None or not measure.better:
        decisive = ", ".join(name for name, measure in MEASURES.items() if measure.better)
        raise ConfigError.about("measure", repr(name[:50]), "is not a measure", f"use one of {decisive}")
    return measure


def _measure(name: str | None, config: TrainConfig | None) -> tuple[str, Any]:
    """The measure that decides, and whether `low` or `high` is better.

    Args:
        name: the measure asked for.
        config: the first config; None if it was refused.

    Raises:
        ConfigError: for an unknown one, or one that these runs will not have.
    """
    from app.runs.metrics import EVAL  # it imports numpy, which takes a while

    evaluates = config is None or config.has_evaluation()
    chosen = name or ("last_eval_loss" if evaluates else "recent_loss")
    measure = decisive_measure(chosen)
    if measure.metric in EVAL and not evaluates:
        raise ConfigError.about("measure", chosen, "without evaluation data", "set eval_dataset_name or eval_share")
    return chosen, measure.better


def _rungs(record: SweepRecord, config: TrainConfig) -> list[int]:
    """The steps at which halving cuts.

    Raises:
        ConfigError: if the runs have no length in common, or too few steps.
    """
    halving = record.halving or 0
    for name in _LENGTH:
        if any(axis.option == name for axis in record.axes):
            raise ConfigError.about("halving", halving, f"with several values of {name}", "give all runs one length")
    if config.max_steps is None:
        raise ConfigError.about("halving", halving, "needs the number of steps", "set max_steps")
    return rungs_of(config.max_steps, record.trial_count, halving)


def _add_trials(record: SweepRecord) -> None:
    """Adds the trials that are known from the start: all but those that TPE will propose."""
    if record.search == "grid":
        for values in grid(record.axes):
            record.add_trial(values)
    for number in range(record.trial_count if record.search == "random" else 0):
        known = [Result(trial.values) for trial in record.trials]
        proposal = propose(record.axes, "random", record.search_seed, number, known, record.better, record.trial_count)
        if proposal is None:
            break  # every point of a small space is there
        record.add_trial(proposal)
    record.trial_count = len(record.trials) or record.trial_count
