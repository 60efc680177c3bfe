"""The rows of one source of a run, from any position on: of a stream, window after window; of other data, pass after
pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from threading import Lock
from typing import Any, NamedTuple, Protocol

import numpy as np

from trainers.config.mistakes import ConfigError
from trainers.data.batches import Collective
from trainers.data.cache import TokenSet
from trainers.data.gathered import Piece
from trainers.data.mix import Passes
from trainers.data.report import Report
from trainers.data.rows import Rows
from trainers.data.stream import Window, WindowSet
from trainers.run.errors import Interrupted, TrainingError

_BEAT = 5.0
"""Seconds between heartbeats while a window is tokenised."""


class SourceRows(Protocol):
    """The rows of a source, in the order in which a run trains them."""

    def pieces(self, start: int, stop: int) -> list[Piece]:
        """The rows from `start` to `stop`, counted from the start of the run."""

    def epochs(self, row: int) -> float:
        """The epochs of the first `row` rows."""

    def tokens(self, row: int) -> int:
        """The tokens of the first `row` rows."""

    def agree(self, stop: int, ranks: Collective, beat: Callable[[], None]) -> None:
        """Makes sure that all ranks read the same documents in the rows before `stop`. Collective."""

    def position(self, row: int) -> dict[str, int]:
        """What a checkpoint needs to go on from `row`."""

    def restore(self, row: int, position: dict[str, int]) -> None:
        """Goes on from a checkpoint at `row`."""


class HeldRows:
    """The rows of a source that is read in full before the first step.

    Args:
        rows: its rows.
        passes: their order.
    """

    def __init__(self, rows: Rows, passes: Passes):
        self.rows, self.passes = rows, passes

    def pieces(self, start: int, stop: int) -> list[Piece]:
        """The rows from `start` to `stop`, counted from the start of the run."""
        return [self.rows.piece(self.passes.rows_at(start, stop))] if stop > start else []

    def epochs(self, row: int) -> float:
        """The epochs of the first `row` rows."""
        return row / len(self.rows)

    def tokens(self, row: int) -> int:
        """The tokens of the first `row` rows."""
        return self.passes.sum_until(row, self.rows.lengths)

    def agree(self, stop: int, ranks: Collective, beat: Callable[[], None]) -> None:
        """All ranks read the same documents, as the source was read in full before."""

    def position(self, row: int) -> dict[str, int]:
        """Nothing: the order is a function of the row."""
        return {}

    def restore(self, row: int, position: dict[str, int]) -> None:
        """Nothing: the order is a function of the row."""


@dataclass(frozen=True)
class References:
    """Log-probabilities under the initial model of what a run reads of a stream.

    Attributes:
        shards: `[documents]` fp32 of each shard.
        windows: `[documents]` fp32 of the mismatched documents of each window, which its documents make together.
    """

    shards: Mapping[int, np.ndarray]
    windows: Mapping[Window, np.ndarray]


@dataclass(frozen=True)
class _Read:
    """A window that is tokenised and packed.

    Attributes:
        rows: its rows.
        order: the order in which they are trained.
        documents: its documents.
    """

    rows: Rows
    order: np.ndarray
    documents: WindowSet


class _Start(NamedTuple):
    """Where a window begins: rows and tokens of the source before it, in the run."""

    rows: int
    tokens: int


class Position(NamedTuple):
    """The window that a run has come to, how many rows of it were trained, and the tokens before it."""

    window: Window
    rows: int
    tokens: int


def position_in(saved: Any) -> Position | None:
    """The position that a checkpoint holds; None if it is of another format."""
    if not isinstance(saved, dict) or saved.keys() != {"epoch", "window", "rows", "tokens"}:
        return None
    if not all(type(value) is int and value >= 0 for value in saved.values()):
        return None
    return Position(Window(saved["epoch"], saved["window"]), saved["rows"], saved["tokens"])


class StreamedRows:
    """The rows of a stream, window after window; each is tokenised while the one before it is trained.

    Args:
        first: a window of the stream that is tokenised: its first, or the one that a checkpoint has come to.
        rows: the rows of it.
        make_rows: the rows of tokenised documents.
        order: the order in which the rows of a window are trained.
        stop: rows of this source that the run reads until `max_steps`.
        pause: the same until `stop_at_step`; no window after them is tokenised ahead.
        check: called with each further window; raises `ConfigError` if the model cannot be trained on it.
        pool: tokenises one window at a time, of all streams of a run.
    """

    def __init__(
        self, first: WindowSet, rows: Rows, make_rows: Callable[[TokenSet], Rows],
        order: Callable[[Rows, Window], np.ndarray], stop: int, pause: int, check: Callable[[TokenSet], None],
        pool: ThreadPoolExecutor,
    ):  # fmt: skip
        self.stream, self._make_rows, self._order, self._check = first.stream, make_rows, order, check
        self.report = Report()
        """Of the windows whose rows were compared so far."""
        self._lock, self._pool = Lock(), pool  # the next batch is prepared by another thread
        self.stop, self._pause = stop, pause
        begin = Window(0, 0)
        self._starts = {begin: _Start(0, 0)}
        self._agreed, self._agreed_rows = begin, 0
        self._references: References | None = None
        ready = Future[_Read]()
        ready.set_result(_Read(rows, order(rows, first.window), first))
        self._read = {first.window: ready}

    def _open(self, window: Window) -> _Read:
        documents = self.stream.open(window)
        self._check(documents)
        rows = self._make_rows(documents)
        if (known := self._references) is not None:
            of_shards, of_window = [*map(known.shards.get, documents.shards)], known.windows.get(window)
            if any(part is None for part in of_shards) or (rows.mismatched is not None and of_window is None):
                raise TrainingError(
                    f"window {window.number + 1} of epoch {window.epoch + 1} of {self.stream.label} has no "
                    "log-probabilities under the initial model: they were computed of the rows that max_steps was to "
                    "read at the start; restore it, or start anew"
                )
            rows.reference = np.concatenate([part for part in of_shards if part is not None])
            if rows.mismatched is not None:
                rows.mismatched.reference = of_window
        return _Read(rows, self._order(rows, window), documents)

    def windows(self, ranks: Collective, beat: Callable[[], None]) -> Iterator[tuple[WindowSet, Rows]]:
        """The windows that the run reads, from the first one on, and the rows of each. Collective."""
        window = Window(0, 0)
        while (start := self._starts[window].rows) < self.stop:
            self.agree(start + 1, ranks, beat)
            read = self._window(window)
            yield read.documents, read.rows
            window = self.stream.after(window)

    def set_references(self, references: References) -> None:
        """Sets the log-probabilities under the initial model."""
        with self._lock:
            self._references, self._read = references, {}

    def _reading(self, window: Window) -> Future[_Read]:
        """A window that is tokenised, or being tokenised by another thread."""
        with self._lock:
            if window not in self._read:
                self._read[window] = self._pool.submit(self._open, window)
            return self._read[window]

    def _window(self, window: Window) -> _Read:
        """A window, once it is tokenised; the one after it is then begun, unless the run stops before."""
        read = self._reading(window).result()
        following = self.stream.after(window)
        with self._lock:
            before = self._starts[window]
            after = _Start(before.rows + len(read.rows), before.tokens + int(read.rows.lengths.sum()))
            start = self._starts.setdefault(following, after).rows
            for old in [known for known in sorted(self._read) if known < window][:-1]:  # a step may still ask about one
                del self._read[old]
        if start < self._pause:
            self._reading(following)
        return read

    def _at(self, row: int) -> Window:
        """The window of a row of the run."""
        window = max((window for window, start in list(self._starts.items()) if start.rows <= row), default=None)
        if window is None:
            raise TrainingError(f"row {row} of the stream is before the checkpoint that the run goes on from")
        while row >= self._starts[window].rows + len(self._window(window).rows):
            window = self.stream.after(window)
        return window

    def pieces(self, start: int, stop: int) -> list[Piece]:
        """The rows from `start` to `stop`, counted from the start of the run; a piece for each window."""
        pieces, row = list[Piece](), start
        window = self._at(row) if stop > start else Window(0, 0)
        while row < stop:
            read, first = self._window(window), self._starts[window].rows
            chosen = read.order[row - first : stop - first]
            if len(chosen):
                pieces.append(read.rows.piece(chosen))
            row += len(chosen)
            window = self.stream.after(window)
        return pieces

    def epochs(self, row: int) -> float:
        """The epochs of the first `row` rows, by the rows of the data that were read."""
        window = self._at(max(row - 1, 0))
        read, start = self._window(window), self._starts[window].rows
        of_window = self.stream.rows_in(window) * (row - start) / len(read.rows)
        return window.epoch + (self.stream.rows_before(window) + of_window) / self.stream.rows

    def tokens(self, row: int) -> int:
        """The tokens of the first `row` rows."""
        window = self._at(max(row - 1, 0))
        read, start = self._window(window), self._starts[window]
        return start.tokens + int(read.rows.lengths[read.order[: row - start.rows]].sum())

    def agree(self, stop: int, ranks: Collective, beat: Callable[[], None]) -> None:
        """Makes sure that all ranks read the same documents in the rows before `stop`. Collective, once a window.

        Args:
            stop: rows that a step and those before it read of this source.
            ranks: the ranks of the run.
            beat: called every few seconds while it waits.

        Raises:
            ConfigError: on every rank, if the rows of a window cannot be used.
            TrainingError: on every rank, if some ranks cannot read a window, or read another one; `Interrupted` if it
                lies behind a URL, which may be read again later.
        """
        while self._agreed_rows < stop:
            window, error, digest = self._agreed, None, ""
            try:
                while not self._reading(window).done():
                    wait([self._reading(window)], _BEAT)
                    beat()
                read = self._window(window)
                digest = read.documents.digest
            except (ConfigError, TrainingError, OSError) as problem:
                error = problem
            outcomes = ranks.gather((digest, None if error is None else str(error)))
            name = f"window {window.number + 1} of epoch {window.epoch + 1} of {self.stream.label}"
            _refuse_difference(name, outcomes, error, self.stream.is_remote)
            self._agreed_rows, self._agreed = self._starts[window].rows + len(read.rows), self.stream.after(window)
            lines = self._news(read.documents.report)
            if ranks.is_main and window > (0, 0) and lines:
                print(*lines, sep="\n", flush=True)

    def _news(self, report: Report) -> list[str]:
        """What a window holds that those before it did not: bad rows that are skipped, fields that are not used."""
        lines = list[str]()
        if report.bad:
            lines = [f"{report.dataset}: {report.bad:,} bad rows skipped, such as", *report.examples()[:5]]
        if fields := sorted({*report.unused} - {*self.report.unused}):
            lines.append(f"{report.dataset}: unused fields: {', '.join(f'`{name}`' for name in fields[:20])}")
        self.report.merge(report)
        return lines

    def position(self, row: int) -> dict[str, int]:
        """The window that a row has come to, how many rows of it were trained, and the tokens before it."""
        window = self._at(max(row - 1, 0))
        start = self._starts[window]
        return {"epoch": window.epoch, "window": window.number, "rows": row - start.rows, "tokens": start.tokens}

    def restore(self, row: int, position: dict[str, int]) -> None:
        """Goes on from a checkpoint at `row`.

        Raises:
            TrainingError: if the stream has no such window, or the position is of another format.
        """
        if not position:  # the source was held in full, or the checkpoint is of a run without streams
            return
        if (known := position_in(position)) is None:
            raise TrainingError(
                f"the checkpoint's position in {self.stream.label} is of another format: {str(position)[:200]}; resume "
                "with the version of Tunesmith that wrote it, or start a new run from its weights (from_run)"
            )
        window = known.window
        if window.number >= len(self.stream.windows(window.epoch)):
            raise TrainingError(
                f"the checkpoint is in window {window.number + 1} of epoch {window.epoch + 1}, which has "
                f"{len(self.stream.windows(window.epoch))} now; restore streaming_window and the data, or start anew"
            )
        start = row - known.rows
        with self._lock:
            self._starts = {window: _Start(start, known.tokens)}
            self._agreed, self._agreed_rows = window, start
            self._read = {known: reading for known, reading in self._read.items() if known == window}


def _is_outage(error: Exception) -> bool:
    """Whether a file could not be read, as against what its rows hold."""
    return any(text in str(error) for text in ("cannot read ", "cannot be downloaded"))


def _refuse_difference(
    name: str, outcomes: list[tuple[str, str | None]], error: Exception | None, is_remote: bool
) -> None:
    """Raises on every rank, unless all ranks read the same documents of a window."""
    problems = {problem for _, problem in outcomes}
    if error is not None and len(problems) == 1 and not (is_remote and _is_outage(error)):
        raise error
    failed = [f"rank {rank}: {problem}" for rank, (_, problem) in enumerate(outcomes) if problem is not None]
    if failed:
        kind = Interrupted if is_remote else TrainingError
        raise kind(f"{name} cannot be read: {'; '.join(failed)}") from error
    first = outcomes[0][0]
    if others := [rank for rank, (digest, _) in enumerate(outcomes) if digest != first]:
        raise TrainingError(
            f"{name} is not the same on rank 0 and on ranks {', '.join(map(str, others))}; all machines must read the "
            "same files"
        )
