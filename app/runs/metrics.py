"""A run's metrics as curves: read by byte offset, thinned to few points with their extremes kept.

Order comes from step and attempt. A step that a later attempt repeated counts as that one logged it; what it replaced
is kept apart.
"""

from __future__ import annotations

import json
import math
import threading
import time
from array import array
from collections import OrderedDict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from app.runs.safe_read import read_span, stamp
from trainers.run.folder import RunFolder

TRAIN = (
    "loss", "learning_rate", "grad_norm", "tokens_per_second", "trained_tokens_per_second", "mfu", "memory_gib",
    "data_wait",
)  # fmt: skip
EVAL = ("eval_loss", "eval_perplexity", "eval_token_accuracy")
AXES = ("tokens", "elapsed_s")
POINTS = 400
"""Most points of a curve."""
MOST_REPLACED = 100
"""Most points of a replaced piece."""
MOST_PIECES = 20
"""Most replaced pieces that are shown, the newest ones."""
PATIENCE = 0.05
"""Seconds of reading in one call; the next call goes on."""
_BLOCK = 1 << 18
_LONGEST_ROW = 1 << 20
_TAIL = 1 << 14
_CACHED_ROWS = 4_000_000
_MOST_STEP = 2**53

Values = dict[str, Any]


class _Table:
    """The numbers of one kind of row, as columns."""

    def __init__(self, columns: tuple[str, ...]):
        self.columns = {name: array("d") for name in columns}
        self.steps, self.attempts = array("q"), array("q")

    def add(self, step: int, attempt: int, row: dict[str, Any]) -> None:
        self.steps.append(step)
        self.attempts.append(attempt)
        for name, column in self.columns.items():
            column.append(_finite(row.get(name)))


def _finite(value: Any) -> float:
    """The number, or NaN for what is none or has no place on a chart."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    try:
        number = float(value)
    except OverflowError:
        return math.nan
    return number if math.isfinite(number) else math.nan


@dataclass
class _Run:
    """What was read of one metrics file."""

    inode: int = -1
    replaced: int = 0
    """How often the file was replaced or cut."""
    offset: int = 0
    more: bool = False
    train: _Table = field(default_factory=lambda: _Table((*TRAIN, *AXES)))
    evals: _Table = field(default_factory=lambda: _Table(EVAL))
    begins: dict[int, int] = field(default_factory=dict)
    """First step that each attempt logged."""
    latest: Values = field(default_factory=dict)
    """Newest value of every metric, also those that are no numbers."""
    told: tuple[str, int] = ("", -1)
    """Token of the newest view, and how many rows it was made of."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def rows(self) -> int:
        return len(self.train.steps) + len(self.evals.steps)

    def read_on(self, path: Path, patience: float) -> None:
        """Takes in what was added, in whole rows; begins anew when the file was replaced or cut."""
        found = stamp(path)
        inode, size = (found[0], found[2]) if found else (-1, 0)
        if inode != self.inode or size < self.offset:
            fresh = _Run(inode=inode)
            self.inode, self.offset, self.train, self.evals = inode, 0, fresh.train, fresh.evals
            self.begins, self.latest = fresh.begins, fresh.latest
            self.replaced += 1
        deadline = time.monotonic() + patience
        self.more = self.offset < size
        while self.more and time.monotonic() < deadline:
            self.more = self._take(path) and self.offset < size

    def _take(self, path: Path) -> bool:
        """One block; False when it held no whole row yet."""
        data, _ = read_span(path, self.offset, _BLOCK)
        if b"\n" not in data and len(data) == _BLOCK:
            data, _ = read_span(path, self.offset, _LONGEST_ROW)
        end = data.rfind(b"\n") + 1
        if end == 0:
            self.offset += len(data) if len(data) == _LONGEST_ROW else 0  # no row is that long: it is skipped
            return len(data) == _LONGEST_ROW
        self.offset += end
        for line in data[:end].splitlines():
            self.take_row(line)
        return True

    def take_row(self, line: bytes) -> None:
        """One line of the file; what is no row is left out."""
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            return
        if not isinstance(row, dict) or not _is_count(row.get("step")):
            return
        attempt = row["attempt"] if _is_count(row.get("attempt")) else 0
        self.begins[attempt] = min(self.begins.get(attempt, _MOST_STEP), row["step"])
        if any(name in row for name in TRAIN):
            self.train.add(row["step"], attempt, row)
        if any(name in row for name in EVAL):
            self.evals.add(row["step"], attempt, row)
        self.latest.update(row)


def _last_rows(path: Path, offset: int) -> Values:
    found = stamp(path)
    data, _ = read_span(path, max(offset, (found[2] if found else 0) - _TAIL), _TAIL)
    tail = _Run()
    for line in data.splitlines():
        tail.take_row(line)
    return tail.latest


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _MOST_STEP


class Curves:
    """The curves of runs, with what was read kept between two looks. One object serves a whole server."""

    def __init__(self) -> None:
        self.runs: OrderedDict[Path, _Run] = OrderedDict()
        self.lock = threading.Lock()

    def _run(self, run: RunFolder) -> _Run:
        with self.lock:
            kept = self.runs.setdefault(run.path, _Run())
            self.runs.move_to_end(run.path)
            while len(self.runs) > 1 and sum(one.rows() for one in self.runs.values()) > _CACHED_ROWS:
                self.runs.popitem(last=False)
        return kept

    def latest(self, run: RunFolder, patience: float = PATIENCE) -> Values:
        """The newest value of every metric; of a large file that is not read yet, of its last rows."""
        kept = self._run(run)
        with kept.lock:
            kept.read_on(run.metrics, patience)
            return {**kept.latest, **(_last_rows(run.metrics, kept.offset) if kept.more else {})}

    def view(self, run: RunFolder, since: Any = None, patience: float = PATIENCE) -> Values:
        """The curves, or what is new in them.

        Args:
            run: the run.
            since: `token` of the view that the caller has.
            patience: seconds of reading; what is left is read by the next call.

        Returns:
            `token`; `rows` read so far, and `more` when there are others; `same: true` and nothing else when the
            caller has it all. `width` in steps of a point; `attempts` (attempt and its first step).
            `full`: whether all points follow; else those of steps from `cut` on, which
            replace the caller's. `train` and `eval`: lists `step`, `tokens`, `elapsed_s`, and for each metric `mean`
            (the mean of a point's steps) and, where a point is of several steps, `min` and `max`. `replaced`: a
            list of `{attempt, step, loss}`.
        """
        kept = self._run(run)
        with kept.lock:
            kept.read_on(run.metrics, patience)
            asked = str(since or "")[:100]
            if (asked, kept.rows()) == kept.told:
                return {"token": asked, "rows": kept.rows(), "more": kept.more, "same": True}
            seen = _view(kept, asked)
            kept.told = seen["token"], kept.rows()
            return seen


def _view(kept: _Run, since: str) -> Values:
    begins = sorted(kept.begins.items())
    train, gone = _order(kept.train, begins)
    evals, _ = _order(kept.evals, begins)
    last = max((int(part["step"][-1]) for part in (train, evals) if len(part["step"])), default=0)
    width = 1 << max(0, math.ceil(math.log2(max(1, last) / POINTS)))
    generation = f"{kept.inode}.{kept.replaced}.{width}.{len(begins)}.{begins[-1][1] if begins else 0}"
    before, _, shown = since.rpartition(".")
    before = before.rpartition(".")[0]
    cut = int(shown) if before == generation and shown.isascii() and shown.isdigit() else 0
    cut = min(cut, last) // width * width
    answer = {
        "token": f"{generation}.{kept.rows()}.{last}",
        "rows": kept.rows(),
        "more": kept.more,
        "width": width,
        "attempts": begins[-MOST_PIECES:],
        "full": before != generation,
        "cut": cut,
        "train": _thin(_from(train, cut), width, TRAIN),
        "eval": _thin(_with_axes(_from(evals, cut), train), width, EVAL),
    }
    if before != generation:
        answer["replaced"] = _pieces(gone)
    return answer


def _order(table: _Table, begins: list[tuple[int, int]]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The columns sorted by step: the rows that count, and those that a later attempt replaced."""
    steps = np.array(table.steps, dtype=np.int64)
    attempts = np.array(table.attempts, dtype=np.int64)
    limit = np.full(len(steps), _MOST_STEP)
    for number, (attempt, _) in enumerate(begins):
        later = [step for _, step in begins[number + 1 :]]
        if later:
            limit[attempts == attempt] = min(later)
    columns = {"step": steps, "attempt": attempts, **{name: np.array(one) for name, one in table.columns.items()}}
    stays = steps < limit
    return _picked(columns, stays), _picked(columns, ~stays)


def _picked(columns: dict[str, Any], mask: Any) -> dict[str, Any]:
    some = {name: column[mask] for name, column in columns.items()}
    if np.all(some["step"][1:] >= some["step"][:-1]):
        return some
    order = np.lexsort((some["attempt"], some["step"]))
    return {name: column[order] for name, column in some.items()}


def _from(columns: dict[str, Any], cut: int) -> dict[str, Any]:
    first = int(np.searchsorted(columns["step"], cut))
    return {name: column[first:] for name, column in columns.items()}


def _with_axes(evals: dict[str, Any], train: dict[str, Any]) -> dict[str, Any]:
    """Evaluations with the tokens and seconds of the training row at their step."""
    if not len(train["step"]):
        return {**evals, **{axis: np.full(len(evals["step"]), np.nan) for axis in AXES}}
    return {**evals, **{axis: np.interp(evals["step"], train["step"], train[axis]) for axis in AXES}}


def _thin(columns: dict[str, Any], width: int, names: tuple[str, ...]) -> Values:
    """One point for every `width` steps that hold a row."""
    steps = columns["step"]
    if not len(steps):
        return {"step": []}
    marks = steps // width
    starts = np.flatnonzero(np.concatenate(([True], marks[1:] != marks[:-1])))
    ends = np.append(starts[1:], len(steps)) - 1
    made: Values = {"step": steps[ends].tolist(), **{axis: _rounded(columns[axis][ends]) for axis in AXES}}
    for name in names:
        column = columns[name]
        known = np.isfinite(column)
        if not known.any():
            continue
        counts = np.add.reduceat(known, starts, dtype=np.int64)
        sums = np.add.reduceat(np.where(known, column, 0.0), starts)
        mean = np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)
        made[name] = {"mean": _rounded(mean)}
        if width > 1:
            made[name] |= {
                "min": _rounded(np.fmin.reduceat(column, starts)), "max": _rounded(np.fmax.reduceat(column, starts)),
            }  # fmt: skip
    return made


def _rounded(values: Any) -> list[float | None]:
    return [float(f"{value:.6g}") if math.isfinite(value) else None for value in values.tolist()]


def _pieces(gone: dict[str, Any]) -> list[Values]:
    """The losses that later attempts replaced, by attempt."""
    made = []
    for attempt in np.unique(gone["attempt"])[-MOST_PIECES:]:
        mask = gone["attempt"] == attempt
        steps, losses = gone["step"][mask], gone["loss"][mask]
        picked = np.unique(np.linspace(0, len(steps) - 1, min(len(steps), MOST_REPLACED)).astype(int))
        made.append({"attempt": int(attempt), "step": steps[picked].tolist(), "loss": _rounded(losses[picked])})
    return made
