"""The batches of a stream: the rows of its windows one after another, cut into global batches.

    rows of window 0, shuffled | rows of window 1, shuffled | ...      a batch may hold rows of two windows

How many rows a window has is known once it is tokenised. So a checkpoint holds the window that its step has come to,
and how many rows of it were trained: from there on, the batch of step `s` is a function of data, seed and `s`.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from threading import Lock

import numpy as np

from trainers.config.mistakes import ConfigError
from trainers.config.options import TrainConfig
from trainers.data.batches import Collective, TrainPlan, shuffled
from trainers.data.cache import TokenSet
from trainers.data.joined import JoinedSet
from trainers.data.report import Report
from trainers.data.rows import Rows
from trainers.data.stream import Window, WindowSet
from trainers.run.errors import Interrupted, TrainingError

_BEAT = 5.0
"""Seconds between heartbeats while a window is tokenised."""
_HELD = 3
"""Windows whose rows are held: one that a step may still ask about, the current one, and the next."""


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


class StreamPlan(TrainPlan):
    """Assigns rows to ranks at each step, of data that is read as the run goes.

    Args:
        first: the first window of the stream.
        make_rows: the rows of tokenised documents.
        config: batch sizes, seed, steps.
        data_parallel_size: ranks that share a global batch.

    Raises:
        ConfigError: if the global batch does not divide evenly, or is larger than a window.
    """

    def __init__(
        self, first: WindowSet, make_rows: Callable[[TokenSet], Rows], config: TrainConfig, data_parallel_size: int
    ):
        rows, self.stream, self._make_rows = make_rows(first), first.stream, make_rows
        self._refuse_small(first.window, rows)
        super().__init__(rows, config, data_parallel_size)
        of_epoch = len(rows) * self.stream.rows / max(first.report.rows, 1)
        self.steps_per_epoch = max(round(of_epoch / config.global_batch_size), 1)
        self.report = Report()
        """Of the windows whose rows were compared so far."""
        self._lock = Lock()  # the next batch is prepared by another thread
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="windows")
        self._starts: dict[Window, int] = {first.window: 0}  # its first row among those of the run
        self._read: dict[Window, Future[_Read]] = {}
        self._last_step = min(self.total_steps, config.stop_at_step or self.total_steps)
        self._agreed = first.window
        self._agreed_rows = 0
        ready = Future[_Read]()
        ready.set_result(self._packed(first, self.rows))
        self._read[first.window] = ready

    def _packed(self, documents: WindowSet, rows: Rows) -> _Read:
        epoch, number = documents.window
        return _Read(rows, shuffled(rows, self.config, epoch, number + 1), documents)

    def _open(self, window: Window) -> _Read:
        documents = self.stream.open(window)
        self.check(documents)
        rows = self._make_rows(documents)
        self._refuse_small(window, rows)
        return self._packed(documents, rows)

    def _refuse_small(self, window: Window, rows: Rows) -> None:
        """Raises ConfigError if a window has no global batch of rows, where a larger one would have more of them."""
        config = self.stream.config
        if len(rows) < config.global_batch_size and window == (0, 0):
            kind = f"{'packed ' * config.packing}rows"
            if len(self.stream.windows(0)) == 1:
                problem, remedy = f"is larger than the data: {len(rows)} {kind}", "make it smaller"
                raise ConfigError.about("global_batch_size", config.global_batch_size, problem, remedy)
            problem = f"gives {len(rows)} {kind} at first, fewer than global_batch_size={config.global_batch_size}"
            raise ConfigError.about("streaming_window", config.streaming_window, problem, "make it larger")

    def _reading(self, window: Window) -> Future[_Read]:
        """A window that is tokenised, or being tokenised by another thread."""
        with self._lock:
            if window not in self._read:
                self._read[window] = self._pool.submit(self._open, window)
            return self._read[window]

    def _window(self, window: Window) -> _Read:
        """A window, once it is tokenised; the one after it is then begun, unless the run ends before."""
        read = self._reading(window).result()
        following = self.stream.after(window)
        with self._lock:
            start = self._starts.setdefault(following, self._starts[window] + len(read.rows))
            for old in sorted(self._read)[:-_HELD]:
                del self._read[old]
        if start < self._last_step * self.config.global_batch_size:
            self._reading(following)
        return read

    def _at(self, row: int) -> Window:
        """The window of a row of the run."""
        window = max((window for window, start in list(self._starts.items()) if start <= row), default=None)
        if window is None:
            raise TrainingError(f"row {row} of the stream is before the checkpoint that the run goes on from")
        while row >= self._starts[window] + len(self._window(window).rows):
            window = self.stream.after(window)
        return window

    def chosen(self, step: int) -> tuple[Rows, np.ndarray]:
        """The rows of a window, or of several, and the numbers of those in the global batch of `step`."""
        size = self.config.global_batch_size
        window = self._at(step * size)
        read, first = self._window(window), step * size - self._starts[window]
        chosen, sets, rows = read.order[first : first + size], [read.documents], len(read.rows)
        if len(chosen) == size:
            return read.rows, chosen
        while len(chosen) < size:
            window = self.stream.after(window)
            read = self._window(window)
            chosen = np.concatenate([chosen, rows + read.order[: size - len(chosen)]])
            sets.append(read.documents)
            rows += len(read.rows)
        return self._make_rows(JoinedSet(sets, self.stream.fingerprint, self.report, packs_apart=True)), chosen

    def rows_of(self, step: int) -> np.ndarray:
        """Row numbers of the global batch of `step` in its window, or in it and the following ones together."""
        return self.chosen(step)[1]

    def epochs(self, step: int) -> float:
        """The epochs of the first `step` steps, by the rows of the data that were read."""
        row = step * self.config.global_batch_size
        window = self._at(max(row - 1, 0))
        read, start = self._window(window), self._starts[window]
        rows = self.stream.rows_before(window) + read.documents.report.rows * (row - start) / len(read.rows)
        return window.epoch + rows / self.stream.rows

    def agree(self, step: int, ranks: Collective, beat: Callable[[], None] = lambda: None) -> None:
        """Makes sure that all ranks read the same documents for `step`. Collective, once for each window.

        Args:
            step: the step, from 0.
            ranks: the ranks of the run.
            beat: called every few seconds while it waits.

        Raises:
            ConfigError: on every rank, if the rows of a window that the step needs cannot be used.
            TrainingError: on every rank, if some ranks cannot read a window, or read another one; `Interrupted` if it
                lies behind a URL, which may be read again later.
        """
        while self._agreed_rows < (step + 1) * self.config.global_batch_size:
            window, error, digest = self._agreed, None, ""
            try:
                while not self._reading(window).done():
                    wait([self._reading(window)], _BEAT)
                    beat()
                read = self._window(window)
                digest = read.documents.digest
            except (ConfigError, OSError) as problem:
                error = problem
            outcomes = ranks.gather((digest, None if error is None else str(error)))
            _refuse_difference(window, outcomes, error, self.stream.is_remote)
            self._agreed_rows, self._agreed = self._starts[window] + len(read.rows), self.stream.after(window)
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

    def position(self, step: int) -> dict[str, int]:
        """The window that `step` has come to, and how many rows of it were trained."""
        row = step * self.config.global_batch_size
        window = self._at(max(row - 1, 0))
        return {"epoch": window.epoch, "window": window.number, "rows": row - self._starts[window]}

    def restore(self, step: int, position: dict[str, int]) -> None:
        """Goes on from a checkpoint of `step`; without a position, from the beginning of the stream."""
        if not position:
            return
        window = Window(position["epoch"], position["window"])
        if window.number >= len(self.stream.windows(window.epoch)):
            raise TrainingError(
                f"the checkpoint is in window {window.number + 1} of epoch {window.epoch + 1}, which has "
                f"{len(self.stream.windows(window.epoch))} now; restore streaming_window and the data, or start anew"
            )
        start = step * self.config.global_batch_size - position["rows"]
        with self._lock:
            self._starts, self._agreed, self._agreed_rows = {window: start}, window, start
            self._read = {known: reading for known, reading in self._read.items() if known >= window}


def _is_outage(error: Exception) -> bool:
    """Whether a file could not be read, as against what its rows hold."""
    return any(text in str(error) for text in ("cannot read ", "cannot be downloaded"))


def _refuse_difference(
    window: Window, outcomes: list[tuple[str, str | None]], error: Exception | None, is_remote: bool
) -> None:
    """Raises on every rank, unless all ranks read the same documents of a window."""
    problems = {problem for _, problem in outcomes}
    if error is not None and len(problems) == 1 and not (is_remote and _is_outage(error)):
        raise error
    name = f"window {window.number + 1} of epoch {window.epoch + 1}"
    failed = [f"rank {rank}: {problem}" for rank, (_, problem) in enumerate(outcomes) if problem is not None]
    if failed:
        kind = Interrupted if is_remote else TrainingError
        raise kind(f"{name} of the data cannot be read: {'; '.join(failed)}") from error
    first = outcomes[0][0]
    if others := [rank for rank, (digest, _) in enumerate(outcomes) if digest != first]:
        raise TrainingError(
            f"{name} of the data is not the same on rank 0 and on ranks {', '.join(map(str, others))}; all machines "
            "must read the same files"
        )
