"""Profiles chosen steps of chosen ranks with torch's profiler: a trace, the top operators, and where the time went.

The trace opens in https://ui.perfetto.dev. The summary divides the time of the profiled steps into five shares:
computation alone, communication hidden behind computation, communication that nothing hides, waiting for data, and the
rest, in which the host keeps the device waiting.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, record_function

from trainers.config.options import TrainConfig
from trainers.run.folder import RunFolder, write_json

FOLDER = "profile"
SHARES = ("compute", "overlapped", "exposed", "data", "host")
"""Fractions of the time: see `time_shares`."""
_DATA = "tunesmith::data"
_COLLECTIVES = ("nccl", "gloo:")
_TOP = 15
_MICROSECONDS = 1e6


@dataclass(frozen=True)
class Interval:
    """What a rank did from `start` to `end`, in microseconds; `kind` is `compute`, `communication` or `data`."""

    kind: str
    start: float
    end: float


def time_shares(intervals: Iterable[Interval], start: float, end: float) -> dict[str, float]:
    """Divides a span of time by what happened in it.

    Args:
        intervals: computation, communication and waiting for data; they may overlap.
        start: begin of the span, in microseconds.
        end: its end.

    Returns:
        Fractions that sum to 1: `compute` (computation without communication), `overlapped` (both at once), `exposed`
        (communication without computation), `data` (neither, while waiting for data), `host` (none of these).
    """
    changes: list[tuple[float, str, int]] = []
    for interval in intervals:
        first, last = max(interval.start, start), min(interval.end, end)
        if first < last:
            changes += [(first, interval.kind, 1), (last, interval.kind, -1)]
    seconds, active, before = dict.fromkeys(SHARES, 0.0), {"compute": 0, "communication": 0, "data": 0}, start
    for moment, kind, change in [*sorted(changes), (end, "compute", 0)]:
        seconds[_share_of(active)] += moment - before
        active[kind] += change
        before = moment
    return {name: value / max(end - start, 1e-9) for name, value in seconds.items()}


def _share_of(active: dict[str, int]) -> str:
    if active["compute"] and active["communication"]:
        return "overlapped"
    if active["compute"]:
        return "compute"
    return "exposed" if active["communication"] else "data" if active["data"] else "host"


class StepProfiler:
    """Profiles the steps of `profile_steps` on the ranks of `profile_ranks`; does nothing on others.

    Args:
        config: the run's config.
        run: the run, in whose folder `profile/` the results are written.
        rank: global rank of this process.
    """

    def __init__(self, config: TrainConfig, run: RunFolder, rank: int):
        self.first, self.last = config.profiled_steps() or (0, -1)
        chosen = config.profile_ranks == ["all"] or str(rank) in config.profile_ranks
        self.active = chosen and self.last >= self.first
        self.run, self.rank = run, rank
        self.profile: Any = None
        self.steps = 0

    def begin(self, step: int) -> None:
        """Called before each step, counted from 1; starts profiling with the first chosen one."""
        if self.active and self.profile is None and self.first <= step <= self.last:
            activities = [ProfilerActivity.CPU]
            if torch.cuda.is_available():
                activities.append(ProfilerActivity.CUDA)
            self.profile, self.steps, self.first = torch.profiler.profile(activities=activities), 0, step
            self.profile.start()

    def data(self) -> AbstractContextManager[Any]:
        """Context manager around waiting for the batch of a step."""
        return record_function(_DATA) if self.profile is not None else nullcontext()

    def end(self, step: int, pause: AbstractContextManager[None], heartbeat: Any, ranks: Any) -> None:
        """Called on every rank after each step; after the last chosen one, all wait for the profiles. Collective.

        Args:
            step: number of the step, from 1.
            pause: context in which the time does not count as training.
            heartbeat: of this rank; writing a trace may take longer than a step may.
            ranks: all ranks.
        """
        self.steps += self.profile is not None
        if step == self.last:
            with pause:
                heartbeat.at("save", step - 1)
                self.finish()
                ranks.gather(None)

    def finish(self) -> None:
        """Writes trace and summary, if steps were profiled, and prints the shares.

        If they cannot be written, the run goes on with a warning.
        """
        if self.profile is None:
            return
        profile, self.profile, self.active = self.profile, None, False
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        profile.stop()
        try:
            self._write(profile)
        except OSError as error:
            print(f"warning: the profile of rank {self.rank} cannot be written: {error}", flush=True)

    def _write(self, profile: Any) -> None:
        self.run.own_folder(FOLDER)
        folder = self.run.path / FOLDER
        folder.mkdir(exist_ok=True)
        trace = folder / f"rank-{self.rank}.trace.json.gz"
        profile.export_chrome_trace(str(trace))
        document = {"rank": self.rank, "first_step": self.first, "steps": self.steps, **summary(profile),
                    "trace": trace.name}  # fmt: skip
        write_json(folder / f"rank-{self.rank}.json", document)
        print(profile_line(document, trace), flush=True)


def profile_line(document: dict[str, Any], trace: Path) -> str:
    """What the log says about a profile."""
    shares = ", ".join(f"{name} {document['shares'][name]:.0%}" for name in SHARES)
    last = document["first_step"] + document["steps"] - 1
    return (
        f"profile of steps {document['first_step']} to {last} on rank {document['rank']}: {shares}; "
        f"{trace} opens in https://ui.perfetto.dev"
    )


@dataclass(frozen=True)
class _Event:
    """What the profiler recorded: an operator, a kernel or an annotation, in microseconds."""

    name: str
    start: float
    end: float
    thread: int
    on_gpu: bool


def summary(profile: Any) -> dict[str, Any]:
    """Shares of the time and top operators of a stopped `torch.profiler.profile`.

    Returns:
        `device` (`cuda` or `cpu`), `seconds` (of the profiled steps), `shares` (see `time_shares`), and `operators`,
        the most expensive first: `name`, `calls`, `seconds` without those of operators that it calls, and `share`. On a
        GPU, operators are its kernels.
    """
    # The raw events: `profile.events()` builds a tree of them, which takes 0.1 ms for each.
    events = [event for raw in profile.profiler.kineto_results.events() if (event := _read(raw)) is not None]
    on_gpu = any(event.on_gpu for event in events)
    intervals = [interval for event in events if (interval := _interval(event, on_gpu))]
    start = min((event.start for event in events), default=0.0)
    end = max((event.end for event in events), default=0.0)
    span = max(end - start, 1e-9)
    operators = own_times([event for event in events if event.on_gpu == on_gpu])
    top = sorted(operators.items(), key=lambda entry: entry[1][1], reverse=True)[:_TOP]
    return {
        "device": "cuda" if on_gpu else "cpu",
        "seconds": (end - start) / _MICROSECONDS,
        "shares": time_shares(intervals, start, end),
        "operators": [
            {"name": name[:200], "calls": calls, "seconds": own / _MICROSECONDS, "share": own / span}
            for name, (calls, own) in top
        ],
    }  # fmt: skip


def _read(raw: Any) -> _Event | None:
    """An event of kineto; None for those that stand for no work of their own.

    A range of the host is repeated on the GPU's timeline, gaps between its kernels included.
    """
    on_gpu = raw.device_type() == DeviceType.CUDA
    if raw.is_hidden_event() or (on_gpu and raw.is_user_annotation()):
        return None
    start = raw.start_ns() / 1000
    thread = raw.device_resource_id() if on_gpu else raw.start_thread_id()
    return _Event(raw.name(), start, start + raw.duration_ns() / 1000, thread, on_gpu)


def own_times(events: Iterable[_Event]) -> dict[str, tuple[int, float]]:
    """Calls of each name, and microseconds without those of nested events of the same thread."""
    totals: dict[str, tuple[int, float]] = {}
    open_events: list[_Event] = []

    def add(name: str, calls: int, time: float) -> None:
        before = totals.get(name, (0, 0.0))
        totals[name] = (before[0] + calls, before[1] + time)

    for event in sorted(events, key=lambda each: (each.thread, each.start, -each.end)):
        while open_events and (open_events[-1].thread != event.thread or open_events[-1].end <= event.start):
            open_events.pop()
        add(event.name, 1, event.end - event.start)
        if open_events:
            add(open_events[-1].name, 0, -(min(event.end, open_events[-1].end) - event.start))
        open_events.append(event)
    return totals


def _interval(event: _Event, on_gpu: bool) -> Interval | None:
    """The kind of an event: on a GPU, work of the device counts; on a CPU, operators and gloo's collectives."""
    if event.name == _DATA and not event.on_gpu:
        return Interval("data", event.start, event.end)
    if on_gpu != event.on_gpu:
        return None
    if event.name.startswith(_COLLECTIVES):
        return Interval("communication", event.start, event.end)
    return Interval("compute", event.start, event.end) if on_gpu or event.name.startswith("aten::") else None
