"""`tunesmith bench --scaling 1,2,4`: speed-up and efficiency of each strategy on several numbers of processes.

The global batch stays the same (strong scaling), and so does the model that is trained: only its time may change.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.bench.plan import TURNS, WARM, Trial, count_of, make_trial, unsupported
from app.bench.runner import Runner
from app.command_line import Args
from app.console import clean, number, report, show_table
from app.hardware import choose_devices, cpu_count
from app.launch.job import train_job
from trainers.config.mistakes import ConfigError, Mistake, Mistakes
from trainers.config.options import MESH_OPTIONS
from trainers.config.parse import whole_number
from trainers.strategy.schema import MAX_PROCESSES

_MOST_TRIALS = 64
_HEADERS = ("strategy", "processes", "tokens/s", "speed-up", "efficiency", "spread", "s/step", "memory GiB")


@dataclass
class Point:
    """A strategy on a number of processes.

    Args:
        strategy: its name.
        processes: the number.
        trial: its measurements.
    """

    strategy: str
    processes: int
    trial: Trial


@dataclass
class ScalingPlan:
    """What to measure.

    Args:
        points: every strategy on every number of processes; one process is `single`, for all strategies alike.
        steps: number of timed steps; None to choose it by their duration.
        turns: number of runs of each point.
        on_gpus: whether each process has a GPU of its own.
    """

    points: list[Point]
    steps: int | None
    turns: int
    on_gpus: bool


def scaling_plan(args: Args) -> ScalingPlan:
    """Makes the plan of a command line.

    Raises:
        ConfigError: with every mistake at once, or if no point is possible.
    """
    mistakes, own = Mistakes(unsupported(args)), args.own
    counts, steps, turns, gpu_ids = list[int](), None, TURNS, list[int]()
    if "settings" in own:
        mistakes.append(Mistake("settings", own["settings"], "with --scaling: nothing else is varied", "leave it out"))
    if "num_processes" in args.launch:
        value = args.launch["num_processes"]
        mistakes.append(Mistake("num_processes", value, "with --scaling", "list it in --scaling"))
    with mistakes:
        counts = _counts(own["scaling"])
    with mistakes:
        steps = count_of(own["steps"], "steps", 1) if "steps" in own else None
    with mistakes:
        turns = count_of(own.get("turns", TURNS), "turns", TURNS)
    with mistakes:
        gpu_ids = choose_devices(args.launch.get("gpus"), None, None, max(counts, default=1)).gpu_ids
        if gpu_ids and counts and max(counts) > len(gpu_ids):
            problem = f"needs {max(counts)} GPUs, and there are {len(gpu_ids)}"
            raise ConfigError.about("scaling", own["scaling"], problem, "use fewer, or other --gpus")
    mistakes.refuse()
    names = [name.strip() for name in own.get("strategies", args.launch.get("strategy", "ddp")).split(",")]
    if len(set(names)) * len(counts) > _MOST_TRIALS:
        raise ConfigError(f"scaling: more than {_MOST_TRIALS} combinations of strategies and processes; list fewer")
    points = [
        _point(args, name, count, gpu_ids, steps) for name in dict.fromkeys(names) for count in counts if count > 1
    ]
    if 1 in counts:
        points.insert(0, _point(args, "single", 1, gpu_ids, steps))
    if not any(point.trial.able for point in points):
        raise ConfigError([f"{point.strategy} on {point.processes}: {point.trial.reason}" for point in points])
    return ScalingPlan(points, steps, turns, bool(gpu_ids))


def _counts(text: str) -> list[int]:
    counts = [whole_number(part.strip(), 1, MAX_PROCESSES) for part in str(text).split(",")]
    if None in counts or len(counts) < 2 or len(set(counts)) < len(counts):
        problem = "is not a list of different numbers of processes"
        raise ConfigError.about("scaling", repr(str(text)[:60]), problem, "write e.g. --scaling 1,2,4")
    return sorted(count for count in counts if count)


def _point(args: Args, strategy: str, processes: int, gpu_ids: Sequence[int], steps: int | None) -> Point:
    """A point, which `train` may refuse, with the reason."""
    devices = {"gpus": ",".join(map(str, gpu_ids[:processes]))} if gpu_ids else {"num_processes": str(processes)}
    sizes = {name: size for name, size in args.launch.items() if name in MESH_OPTIONS and processes > 1}
    try:
        launch = {"strategy": strategy, **devices, **sizes}
        job = train_job(Args(args.names, launch, request=copy.deepcopy(args.request)))
    except ConfigError as error:
        trial = Trial({}, None)
        trial.refuse("not possible", "; ".join(error.lines))
        return Point(strategy, processes, trial)
    return Point(strategy, processes, make_trial(job, {}, steps))


class Scaling:
    """Runs a plan; the measurements are in its points.

    Args:
        plan: what to measure.
        quiet: show only warnings.
    """

    def __init__(self, plan: ScalingPlan, quiet: bool):
        self.plan = plan
        self.runner = Runner(plan.steps, plan.turns, quiet)

    @property
    def measured(self) -> bool:
        """Whether anything was measured."""
        return any(point.trial.outcome == "measured" for point in self.plan.points)

    def measure(self, folder: Path) -> None:
        """Measures everything that is possible.

        Args:
            folder: folder for the runs.
        """
        trials = [point.trial for point in self.plan.points]
        for trial in trials:
            self.runner.check(trial)
        self.runner.take_turns(trials, folder)

    def document(self) -> dict[str, Any]:
        """The report as plain values."""
        plan = self.plan
        shared = (
            "" if plan.on_gpus else f"the processes share {cpu_count()} cores, so no speed-up can exceed that of them"
        )
        return {
            "rows": [_row(point, plan.points) for point in plan.points],
            "steps": self.runner.steps, "warm_steps": WARM, "turns": plan.turns, "note": shared,
        }  # fmt: skip


def _row(point: Point, points: Sequence[Point]) -> dict[str, Any]:
    trial, base = point.trial, base_of(point, points)
    rate, base_rate = trial.median("tokens_per_second"), base.trial.median("tokens_per_second")
    speedup = rate / base_rate if rate and base_rate else None
    return {
        "strategy": point.strategy, "processes": point.processes, "outcome": trial.outcome, "reason": trial.reason,
        "tokens_per_second": rate, "speedup": speedup, "base_processes": base.processes,
        "efficiency": speedup * base.processes / point.processes if speedup else None, "spread": trial.spread,
        "seconds_per_step": trial.median("seconds_per_step"), "memory_gib": trial.median("memory_gib"),
        "first_loss": trial.median("first_loss"), "loss": trial.median("loss"),
    }  # fmt: skip


def base_of(point: Point, points: Sequence[Point]) -> Point:
    """What a point is compared with: one process, or else the fewest processes that the strategy was measured on."""
    rivals = [each for each in points if each.trial.runs and (each.processes == 1 or each.strategy == point.strategy)]
    return min(rivals, key=lambda each: each.processes, default=point)


def show_scaling(document: Mapping[str, Any]) -> None:
    """The table, on stdout."""
    show_table(_HEADERS, [_cells(row) for row in document["rows"]], ("spread", "s/step", "memory GiB"))
    for row in document["rows"]:
        if row["reason"]:
            report(
                clean(f"{row['strategy']} on {row['processes']}: {row['outcome']}: {row['reason']}").replace("\n", " ")
            )
    if document["interrupted"]:
        report("interrupted: the rows above were measured so far")
    if document["note"]:
        report(document["note"])


def _cells(row: Mapping[str, Any]) -> list[str]:
    head = [row["strategy"], str(row["processes"])]
    if row["tokens_per_second"] is None:
        return [*head, row["outcome"], *"-----"]
    rates = [f"{row['tokens_per_second']:,.0f}", f"{row['speedup']:.2f}x", f"{row['efficiency']:.0%}"]
    return [*head, *rates, f"{row['spread']:.1%}", number(row["seconds_per_step"], 3), number(row["memory_gib"], 2)]
