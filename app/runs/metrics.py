"""A run's metrics as curves: read incrementally by byte offset, downsampled to few points that keep their extremes.

Rows are ordered by step and attempt. Where a later attempt repeated a step, its row counts, and the rows it replaced
are returned separately.
"""

from __future__ import annotations

import json
import math
import threading
import time
from array import array
from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from app.runs.rank_curves import RankTable
from app.runs.safe_read import read_span, stamp
from trainers.config.mix import MAX_SOURCES
from trainers.config.objectives import MOST_NAMES, OBJECTIVES, SAMPLED, evaluation_metrics, is_free_metric
from trainers.run.folder import RunFolder

BY_RANK = ("memory_reserved_gib", "host_memory_gib", "gpu_percent", "gpu_power_w")
"""Metrics whose rows have a list by rank, of which the curve is the mean."""
_OBJECTIVES = OBJECTIVES.values()
TRAIN = (
    "loss", "learning_rate", "grad_norm", "tokens_per_second", "trained_tokens_per_second", "mfu", "memory_gib",
    "data_wait", "aux_loss", *BY_RANK, *SAMPLED,
    *dict.fromkeys(name for spec in _OBJECTIVES if spec.reports_in_training for name in spec.metrics),
)  # fmt: skip
EVAL = tuple(dict.fromkeys(name for spec in _OBJECTIVES for name in evaluation_metrics(spec)))
AXES = ("tokens", "elapsed_s")
BY_SOURCE = ("loss/", "share/", "tokens/")
"""How the names of metrics begin that a mix of data has of each source, whose name follows."""
MAX_POINTS = 400
"""Most points of a curve."""
MAX_REPLACED_POINTS = 100
"""Most points of the losses that one attempt had replaced."""
MAX_CHECKPOINTS = 200
"""Most steps of checkpoints that are marked, the newest."""
MAX_REPLACED_RUNS = 20
"""Most attempts whose replaced losses are shown, the newest first."""
READ_SECONDS = 0.05
"""Seconds that one call may read for; the next call continues."""
_BLOCK_BYTES = 1 << 18
_MAX_ROW_BYTES = 1 << 20
_TAIL_BYTES = 1 << 14
_MAX_CACHED_ROWS = 4_000_000
_MAX_STEP = 2**53

Values = dict[str, Any]


class _Table:
    """The numbers of one kind of row (training or evaluation), as columns.

    `own` are the metrics that an objective in a file of the user's names, without the prefix of their column; `sources`
    those of a mix of data.
    """

    def __init__(self, columns: tuple[str, ...], prefix: str = ""):
        self.columns = {name: array("d") for name in columns}
        self.steps, self.attempts = array("q"), array("q")
        self.own, self.sources, self.prefix = list[str](), list[str](), prefix

    def add(self, step: int, attempt: int, row: dict[str, Any]) -> None:
        self._add_own(row)
        self.steps.append(step)
        self.attempts.append(attempt)
        for name, column in self.columns.items():
            column.append(_finite(row.get(name)))

    def _add_own(self, row: dict[str, Any]) -> None:
        """Begins a column for each number of a source, or under a name that is free for a metric of the user's."""
        for key, value in row.items():
            name = key.removeprefix(self.prefix)
            source = name.partition("/")[2]
            if source and name.startswith(BY_SOURCE) and key not in self.columns:
                self._begin(key, source, self.sources, MAX_SOURCES)
                continue
            if key in self.columns or not key.startswith(self.prefix) or not is_free_metric(name):
                continue
            if math.isfinite(_finite(value)):
                self._begin(key, name, self.own, MOST_NAMES)

    def _begin(self, key: str, name: str, names: list[str], most: int) -> None:
        """Begins a column, unless there are as many names as there may be."""
        if name not in names and len(names) >= most:
            return
        names += [name] if name not in names else []
        self.columns[key] = array("d", [math.nan]) * len(self.steps)

    def names(self) -> tuple[str, ...]:
        """Names of the metrics, without the axes."""
        return tuple(name for name in self.columns if name not in AXES)


def _finite(value: Any) -> float:
    """The value as a float; NaN where it is not a finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    try:
        number = float(value)
    except OverflowError:
        return math.nan
    return number if math.isfinite(number) else math.nan


def _mean(values: Any) -> float | None:
    """The mean of a list by rank; None without a number in it."""
    by_rank = values if isinstance(values, list) else []
    numbers = [number for value in by_rank if math.isfinite(number := _finite(value))]
    return math.fsum(number / len(numbers) for number in numbers) if numbers else None


@dataclass
class _MetricsFile:
    """What has been read of one metrics file."""

    inode: int = -1
    replacements: int = 0
    """How often the file was replaced or truncated."""
    offset: int = 0
    more: bool = False
    train: _Table = field(default_factory=lambda: _Table((*TRAIN, *AXES)))
    evals: _Table = field(default_factory=lambda: _Table(EVAL, "eval_"))
    ranks: RankTable = field(default_factory=RankTable)
    first_steps: dict[int, int] = field(default_factory=dict)
    """First step that each attempt logged."""
    saved_steps: dict[int, None] = field(default_factory=dict)
    """Steps of which a checkpoint was saved, in order."""
    latest: Values = field(default_factory=dict)
    """Newest value of every metric, including those that are not numbers."""
    slow_ranks: Counter[int] = field(default_factory=Counter)
    """How often each rank was reported as slow."""
    last_view: tuple[str, int] = ("", -1)
    """Token of the newest view, and the number of rows behind it."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def rows(self) -> int:
        return len(self.train.steps) + len(self.evals.steps)

    def read_new_rows(self, path: Path, seconds: float) -> None:
        """Reads complete rows added since the last call; starts over when the file was replaced or truncated."""
        status = stamp(path)
        inode, size = (status[0], status[2]) if status else (-1, 0)
        if inode != self.inode or size < self.offset:
            fresh = _MetricsFile(inode=inode)
            self.inode, self.offset = inode, 0
            self.train, self.evals, self.ranks = fresh.train, fresh.evals, fresh.ranks
            self.first_steps, self.saved_steps = fresh.first_steps, fresh.saved_steps
            self.latest, self.slow_ranks = fresh.latest, fresh.slow_ranks
            self.replacements += 1
        deadline = time.monotonic() + seconds
        self.more = self.offset < size
        while self.more and time.monotonic() < deadline:
            self.more = self._read_block(path) and self.offset < size

    def _read_block(self, path: Path) -> bool:
        """Reads one block; False when it holds no complete row yet."""
        data, _ = read_span(path, self.offset, _BLOCK_BYTES)
        if b"\n" not in data and len(data) == _BLOCK_BYTES:
            data, _ = read_span(path, self.offset, _MAX_ROW_BYTES)
        end = data.rfind(b"\n") + 1
        if end == 0:
            self.offset += len(data) if len(data) == _MAX_ROW_BYTES else 0  # no row is that long: skip it
            return len(data) == _MAX_ROW_BYTES
        self.offset += end
        for line in data[:end].splitlines():
            self.add_row(line)
        return True

    def add_row(self, line: bytes) -> None:
        """Adds one line of the file; ignores what is not a metrics row."""
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            return
        if not isinstance(row, dict) or not _is_count(row.get("step")):
            return
        attempt = row["attempt"] if _is_count(row.get("attempt")) else 0
        self.first_steps[attempt] = min(self.first_steps.get(attempt, _MAX_STEP), row["step"])
        if "checkpoint_bytes" in row:
            self.saved_steps[row["step"]] = None
        self.ranks.add(row["step"], attempt, row)
        row |= {name: mean for name in BY_RANK if (mean := _mean(row.get(f"{name}_by_rank"))) is not None}
        if any(name in row for name in TRAIN):
            self.train.add(row["step"], attempt, row)
        if any(name in row for name in EVAL):
            self.evals.add(row["step"], attempt, row)
        slow = row.get("slow_ranks")
        self.slow_ranks.update(
            [rank for rank in slow[:1024] if _is_count(rank) and rank < 1024] if isinstance(slow, list) else ()
        )
        self.latest.update(row)


def _last_rows(path: Path, offset: int) -> Values:
    status = stamp(path)
    data, _ = read_span(path, max(offset, (status[2] if status else 0) - _TAIL_BYTES), _TAIL_BYTES)
    tail = _MetricsFile()
    for line in data.splitlines():
        tail.add_row(line)
    return tail.latest


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _MAX_STEP


class Curves:
    """The curves of runs, cached between requests. One object serves a whole server."""

    def __init__(self) -> None:
        self.files: OrderedDict[Path, _MetricsFile] = OrderedDict()
        self.current: dict[Path, tuple[Any, Any]] = {}
        """What `columns` returned last, with the version of the file."""
        self.lock = threading.Lock()

    def _file(self, run: RunFolder) -> _MetricsFile:
        with self.lock:
            file = self.files.setdefault(run.path, _MetricsFile())
            self.files.move_to_end(run.path)
            while len(self.files) > 1 and sum(other.rows() for other in self.files.values()) > _MAX_CACHED_ROWS:
                self.files.popitem(last=False)
        return file

    def latest(self, run: RunFolder, seconds: float = READ_SECONDS) -> Values:
        """The newest value of every metric; taken from the last rows of a large file that is not fully read yet."""
        file = self._file(run)
        with file.lock:
            file.read_new_rows(run.metrics, seconds)
            return {**file.latest, **(_last_rows(run.metrics, file.offset) if file.more else {})}

    def columns(self, run: RunFolder, seconds: float = READ_SECONDS) -> tuple[dict[str, Any], dict[str, Any]]:
        """All training and evaluation rows read so far, as arrays in order of steps, without those a resume replaced.

        Rows are read for at most `seconds`. The same objects come back while nothing is new.
        """
        file = self._file(run)
        with file.lock:
            file.read_new_rows(run.metrics, seconds)
            version = (file.inode, file.replacements, file.rows())
            known = self.current.get(run.path)
            if known is None or known[0] != version:
                starts = sorted(file.first_steps.items())
                train, evals = (_split_replaced(table, starts)[0] for table in (file.train, file.evals))
                known = self.current[run.path] = (version, (train, evals))
        with self.lock:
            self.current = {path: entry for path, entry in self.current.items() if path in self.files}
        tables: tuple[dict[str, Any], dict[str, Any]] = known[1]
        return tables

    def has_more(self, run: RunFolder) -> bool:
        """Whether the last call for this run left rows unread."""
        return self._file(run).more

    def slow_ranks(self, run: RunFolder) -> dict[int, int]:
        """How often each rank was reported as slow, in what has been read."""
        file = self._file(run)
        with file.lock:
            return dict(file.slow_ranks)

    def peaks(self, run: RunFolder, seconds: float = READ_SECONDS) -> dict[str, list[float | None]]:
        """The largest value of each rank, by metric; see `app.runs.rank_curves`."""
        file = self._file(run)
        with file.lock:
            file.read_new_rows(run.metrics, seconds)
            return {name: file.ranks.peak(name) for name in file.ranks.peaks}

    def by_rank(self, run: RunFolder, metric: Any, every: bool = False, since: Any = None) -> Values:
        """The curves of each rank; see `RankTable.view`.

        Args:
            run: the run.
            metric: the metric.
            every: whether to return all ranks.
            since: `token` of what the caller has; if nothing has changed, only `same: true` and the token follow.
        """
        file, name = self._file(run), str(metric or "")[:40]
        with file.lock:
            file.read_new_rows(run.metrics, READ_SECONDS)
            token = f"{file.inode}.{file.replacements}.{file.ranks.rows}.{sum(file.slow_ranks.values())}.{name}.{every}"
            if token == since:
                return {"token": token, "same": True}
            return {"token": token, **file.ranks.view(name, every, file.slow_ranks)}

    def view(self, run: RunFolder, since: Any = None, seconds: float = READ_SECONDS) -> Values:
        """The curves, or only what changed in them.

        Args:
            run: the run.
            since: `token` of the view that the caller has.
            seconds: how long to read for; the next call reads the rest.

        Returns:
            `token`; `rows` read so far, and `more` where some are unread; `same: true` and nothing else when the caller
            is up to date. `width` of a point in steps; `attempts` (attempt and its first step); `checkpoints` (their
            steps); `own` (metrics of an objective in a file of the user's, without `eval_`); `sources` of a mix.
            `full`: whether all points follow; otherwise those from step `cut` on, which replace the caller's.
            `train` and `eval`: lists `step`, `tokens`, `elapsed_s`, and for each metric `mean` (over the steps of a
            point) and, where a point covers several steps, `min` and `max`. `replaced`: a list of `{attempt, step,
            loss}`.
        """
        file = self._file(run)
        with file.lock:
            file.read_new_rows(run.metrics, seconds)
            token = str(since or "")[:100]
            if (token, file.rows()) == file.last_view:
                return {"token": token, "rows": file.rows(), "more": file.more, "same": True}
            view = _view(file, token)
            file.last_view = view["token"], file.rows()
            return view


def _view(file: _MetricsFile, since: str) -> Values:
    first_steps = sorted(file.first_steps.items())
    train, replaced = _split_replaced(file.train, first_steps)
    evals, _ = _split_replaced(file.evals, first_steps)
    last = max((int(columns["step"][-1]) for columns in (train, evals) if len(columns["step"])), default=0)
    # A point covers a power of two of steps: as the run grows, existing points only ever merge in pairs.
    width = 1 << max(0, math.ceil(math.log2(max(1, last) / MAX_POINTS)))
    generation = (
        f"{file.inode}.{file.replacements}.{width}.{len(first_steps)}.{first_steps[-1][1] if first_steps else 0}"
    )
    # A token is `generation.rows.last`. If the generation is the same, the caller keeps its points up to its last one,
    # which may have grown: only the points from there on are sent.
    known_generation, _, known_step = since.rpartition(".")
    known_generation = known_generation.rpartition(".")[0]
    start = int(known_step) if known_generation == generation and known_step.isascii() and known_step.isdigit() else 0
    start = min(start, last) // width * width
    answer = {
        "token": f"{generation}.{file.rows()}.{last}",
        "rows": file.rows(),
        "more": file.more,
        "width": width,
        "attempts": first_steps[-MAX_REPLACED_RUNS:],
        "checkpoints": list(file.saved_steps)[-MAX_CHECKPOINTS:],
        "full": known_generation != generation,
        "cut": start,
        "own": list(dict.fromkeys((*file.train.own, *file.evals.own))),
        "sources": list(dict.fromkeys((*file.train.sources, *file.evals.sources))),
        "train": _downsample(_from_step(train, start), width, file.train.names()),
        "eval": _downsample(_with_axes(_from_step(evals, start), train), width, file.evals.names()),
    }
    if known_generation != generation:
        answer["replaced"] = _replaced_losses(replaced)
    return answer


def _split_replaced(table: _Table, first_steps: list[tuple[int, int]]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The columns sorted by step: the current rows, and those that a later attempt replaced."""
    steps = np.array(table.steps, dtype=np.int64)
    attempts = np.array(table.attempts, dtype=np.int64)
    # A row is replaced if a later attempt started at or before its step.
    limit = np.full(len(steps), _MAX_STEP)
    for number, (attempt, _) in enumerate(first_steps):
        later_starts = [step for _, step in first_steps[number + 1 :]]
        if later_starts:
            limit[attempts == attempt] = min(later_starts)
    columns = {"step": steps, "attempt": attempts, **{name: np.array(values) for name, values in table.columns.items()}}
    current = steps < limit
    return _select_sorted(columns, current), _select_sorted(columns, ~current)


def _select_sorted(columns: dict[str, Any], mask: Any) -> dict[str, Any]:
    selected = {name: column[mask] for name, column in columns.items()}
    if np.all(selected["step"][1:] >= selected["step"][:-1]):
        return selected
    order = np.lexsort((selected["attempt"], selected["step"]))
    return {name: column[order] for name, column in selected.items()}


def _from_step(columns: dict[str, Any], start: int) -> dict[str, Any]:
    first = int(np.searchsorted(columns["step"], start))
    return {name: column[first:] for name, column in columns.items()}


def _with_axes(evals: dict[str, Any], train: dict[str, Any]) -> dict[str, Any]:
    """Evaluations with tokens and seconds interpolated from the training rows."""
    if not len(train["step"]):
        return {**evals, **{axis: np.full(len(evals["step"]), np.nan) for axis in AXES}}
    return {**evals, **{axis: np.interp(evals["step"], train["step"], train[axis]) for axis in AXES}}


def _downsample(columns: dict[str, Any], width: int, names: tuple[str, ...]) -> Values:
    """One point per `width` steps that contain a row."""
    steps = columns["step"]
    if not len(steps):
        return {"step": []}
    buckets = steps // width
    starts = np.flatnonzero(np.concatenate(([True], buckets[1:] != buckets[:-1])))
    ends = np.append(starts[1:], len(steps)) - 1
    points: Values = {"step": steps[ends].tolist(), **{axis: _rounded(columns[axis][ends]) for axis in AXES}}
    for name in names:
        column = columns[name]
        known = np.isfinite(column)
        if not known.any():
            continue
        counts = np.add.reduceat(known, starts, dtype=np.int64)
        sums = np.add.reduceat(np.where(known, column, 0.0), starts)
        mean = np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)
        points[name] = {"mean": _rounded(mean)}
        if width > 1:
            points[name] |= {
                "min": _rounded(np.fmin.reduceat(column, starts)), "max": _rounded(np.fmax.reduceat(column, starts)),
            }  # fmt: skip
    return points


def _rounded(values: Any) -> list[float | None]:
    return [float(f"{value:.6g}") if math.isfinite(value) else None for value in values.tolist()]


def _replaced_losses(replaced: dict[str, Any]) -> list[Values]:
    """The losses that later attempts replaced, by attempt."""
    curves = []
    for attempt in np.unique(replaced["attempt"])[-MAX_REPLACED_RUNS:]:
        mask = replaced["attempt"] == attempt
        steps, losses = replaced["step"][mask], replaced["loss"][mask]
        indices = np.unique(np.linspace(0, len(steps) - 1, min(len(steps), MAX_REPLACED_POINTS)).astype(int))
        curves.append({"attempt": int(attempt), "step": steps[indices].tolist(), "loss": _rounded(losses[indices])})
    return curves
