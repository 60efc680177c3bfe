"""The batches of a stream, or of a mix with streams among its sources.

    rows of window 0, shuffled | rows of window 1, shuffled | ...      a batch may hold rows of two windows

How many rows a window has is known once it is tokenised. So a checkpoint holds, for each stream, the window that its
step has come to, and how many rows of it were trained: from there on, the batch of step `s` is a function of data, seed
and `s`. In a mix, the weights decide which source each row of a batch is from, and each goes on where it stopped.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np

from trainers.config.mistakes import ConfigError
from trainers.config.options import TrainConfig
from trainers.data.batches import Collective, TrainPlan, shuffled
from trainers.data.cache import TokenSet
from trainers.data.fill_cache import refuse_missing_numbers, refuse_other_numbers
from trainers.data.gathered import GatheredSet
from trainers.data.mix import MixedSet, Passes, SourceOrder
from trainers.data.rollouts import refuse_missing_columns, refuse_other_columns
from trainers.data.rows import Rows
from trainers.data.stream import Window, WindowSet, rows_of_epoch
from trainers.data.stream_rows import HeldRows, SourceRows, StreamedRows
from trainers.run.errors import TrainingError


class StreamPlan(TrainPlan):
    """Assigns rows to ranks at each step, of data that is read as the run goes.

    Args:
        first: a window of the stream that is tokenised; or a mix, with one of each of its streams.
        make_rows: the rows of tokenised documents.
        config: batch sizes, seed, steps.
        data_parallel_size: ranks that share a global batch.

    Raises:
        ConfigError: if the global batch does not divide evenly, or is larger than a window.
    """

    def __init__(
        self, first: TokenSet, make_rows: Callable[[TokenSet], Rows], config: TrainConfig, data_parallel_size: int
    ):
        assert config.max_steps is not None
        parts = first.parts if isinstance(first, MixedSet) else [first]
        self.mix = first.mix if isinstance(first, MixedSet) else None
        self.source_order = SourceOrder([1] if self.mix is None else self.mix.shares())
        self._first, rows = first, make_rows(first)
        pause = min(config.max_steps, config.stop_at_step or config.max_steps)
        stops, pauses = (self._counts(step * config.global_batch_size) for step in (config.max_steps, pause))
        pool = ThreadPoolExecutor(1, thread_name_prefix="windows")
        self._make_rows, self._fingerprint, self.sources = make_rows, first.fingerprint, list[SourceRows]()
        self._estimates = list[int]()  # rows of an epoch of each source
        for number, part in enumerate(parts):
            of_part = rows if self.mix is None else make_rows(part)
            if isinstance(part, WindowSet):
                self._refuse_small(part, of_part, config, self.source_order.shares[number] / self.source_order.period)
                order = partial(_in_window, config, None if self.mix is None else number)
                ends = stops[number], pauses[number]
                self.sources.append(StreamedRows(part, of_part, make_rows, order, *ends, self._check, pool))
            else:
                self.sources.append(HeldRows(of_part, Passes(number, len(of_part), config.seed)))
            self._estimates.append(rows_of_epoch(part, len(of_part)))
        is_start = all(part.window == (0, 0) for part in parts if isinstance(part, WindowSet))
        self._least_rows = 0 if is_start else config.global_batch_size
        super().__init__(rows, config, data_parallel_size)

    def _check(self, documents: TokenSet) -> None:
        """Raises ConfigError for a further window that the run cannot train on."""
        refuse_missing_numbers(self.config, documents)
        refuse_missing_columns(self.config, documents)
        refuse_other_numbers(self.config, self._first, documents)
        if self.config.objective_spec.samples:
            refuse_other_columns(self.config, self._first, documents, ("first", "further"))
        self.check(documents)

    @property
    def held_rows(self) -> list[Rows]:
        """The rows of the sources that are read in full before the first step."""
        return [source.rows for source in self.sources if isinstance(source, HeldRows)]

    @property
    def streamed_rows(self) -> list[StreamedRows]:
        """The rows of the streams."""
        return [source for source in self.sources if isinstance(source, StreamedRows)]

    def rows_of_epoch(self) -> int:
        """Rows of an epoch, an estimate by the first window of each stream."""
        ends = "first_exhausted" if self.mix is None else self.mix.stopping_strategy
        return max(self.source_order.rows_of_epoch(self._estimates, ends), self._least_rows)

    @staticmethod
    def _refuse_small(first: WindowSet, rows: Rows, config: TrainConfig, share: float) -> None:
        """Raises ConfigError if a window has no global batch of rows, where a larger one would have more of them."""
        size = -int(-config.global_batch_size * share // 1)
        if len(rows) < size and first.window == (0, 0):
            kind = f"{'packed ' * config.packing}rows"
            if len(first.stream.windows(0)) == 1:
                if share < 1:  # a source may be read several times for a batch
                    return
                problem, remedy = f"is larger than the data: {len(rows)} {kind}", "make it smaller"
                raise ConfigError.about("global_batch_size", config.global_batch_size, problem, remedy)
            of_batch = f"global_batch_size={config.global_batch_size}" + f" has of {first.stream.label}" * (share < 1)
            problem = f"gives {len(rows)} {kind} at first, fewer than {of_batch}"
            raise ConfigError.about("streaming_window", config.streaming_window, problem, "make it larger")

    def chosen(self, step: int) -> tuple[Rows, np.ndarray]:
        """The rows of the global batch of `step`, source after source, and their numbers in the order of the batch."""
        start, stop = step * self.config.global_batch_size, (step + 1) * self.config.global_batch_size
        sources = self.source_order.sources(start, stop)
        spans = zip(self.sources, self._counts(start), self._counts(stop), strict=True)
        pieces = [source.pieces(first, last) for source, first, last in spans]
        numbers = np.empty(len(sources), dtype=np.int64)
        numbers[np.argsort(sources, kind="stable")] = np.arange(len(sources))
        return self._make_rows(GatheredSet(pieces, self._fingerprint, self.mix)), numbers

    def rows_of(self, step: int) -> np.ndarray:
        """Numbers of the rows of the global batch of `step` among those that `chosen` returns."""
        return self.chosen(step)[1]

    def _counts(self, position: int) -> list[int]:
        """`[sources]` rows of each source before a position."""
        counts: list[int] = self.source_order.counts(position).tolist()
        return counts

    def _each(self, step: int) -> list[tuple[SourceRows, int]]:
        """Each source, and how many of its rows the first `step` steps read."""
        return list(zip(self.sources, self._counts(step * self.config.global_batch_size), strict=True))

    def epochs(self, step: int) -> float:
        """The epochs of the first `step` steps, by the rows of the data that were read."""
        ends = max if self.mix is None or self.mix.stopping_strategy == "first_exhausted" else min
        return ends(source.epochs(row) for source, row in self._each(step))

    def source_metrics(self, step: int) -> dict[str, float]:
        """Of each source of a mix, its share of the rows and its tokens in the first `step` steps; otherwise empty."""
        if self.mix is None or step == 0:
            return {}
        metrics, position = dict[str, float](), step * self.config.global_batch_size
        for name, (source, row) in zip(self.mix.names, self._each(step), strict=True):
            metrics[f"share/{name}"] = row / position
            if not self.config.objective_spec.samples:  # a prompt is a part of what is trained
                metrics[f"tokens/{name}"] = source.tokens(row)
        return metrics

    def agree(self, step: int, ranks: Collective, beat: Callable[[], None] = lambda: None) -> None:
        """Makes sure that all ranks read the same documents for `step`. Collective, once for each window.

        Raises:
            ConfigError, TrainingError: as for `StreamedRows.agree`.
        """
        for source, stop in self._each(step + 1):
            source.agree(stop, ranks, beat)

    def position(self, step: int) -> list[dict[str, int]]:
        """Of each source, the window that `step` has come to, and how many rows of it were trained."""
        return [source.position(row) for source, row in self._each(step)]

    def restore(self, step: int, position: list[dict[str, int]]) -> None:
        """Goes on from a checkpoint of `step`; without a position, from the beginning of the streams.

        Raises:
            TrainingError: if the position is in other sources, or of another format.
        """
        if position and len(position) != len(self.sources):
            raise TrainingError(
                f"the checkpoint has positions in {len(position)} sources, and this run has {len(self.sources)}; "
                "restore the data, or start a new run from its weights (from_run)"
            )
        for (source, row), own in zip(self._each(step), position, strict=False):
            source.restore(row, own)


def _in_window(config: TrainConfig, source: int | None, rows: Rows, window: Window) -> np.ndarray:
    """The order in which the rows of a window are trained; `source` is its number in a mix."""
    if source is None:
        return shuffled(rows, config, window.epoch, window.number + 1)
    rng = np.random.Generator(np.random.PCG64([config.seed, source, window.epoch, window.number + 1]))
    return rng.permutation(len(rows))
