"""A mix of sources: their tokenised documents as one set, and the order in which their rows are trained.

Each source is tokenised and cached by itself. Its documents share rows with documents of the same source only, so a
weight is a share of rows. Imports no torch.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from threading import Lock

import numpy as np
import numpy.typing as npt

from trainers.config.mix import Mix
from trainers.data.cache import TokenSet
from trainers.data.joined import JoinedSet
from trainers.data.report import Report

_BLOCK = 1 << 12
"""Positions after which the rows of each source are counted."""


class MixedSet(JoinedSet):
    """The documents of several sources, source after source.

    Args:
        mix: the sources' names and weights, and when an epoch ends.
        parts: the documents of each source.
        dataset: name of the mix.
        split: `train` or `eval`.
    """

    def __init__(self, mix: Mix, parts: Sequence[TokenSet], dataset: str, split: str):
        self.mix = mix
        names = zip(mix.names, mix.shares(), parts, strict=True)
        weights = [[share, part.fingerprint] for _, share, part in names]
        identity = json.dumps([mix.stopping_strategy if split == "train" else None, weights])
        report = Report(dataset, split, sorted({name for part in parts for name in part.report.formats}))
        report.limit = "limit" if split == "train" else ""
        for part in parts:
            report.merge(part.report)
            report.files += part.report.files
            report.held_out += part.report.held_out
            report.left_out += part.report.left_out
        super().__init__(parts, hashlib.sha256(f"mix {identity}".encode()).hexdigest(), report, packs_apart=True)

    @property
    def reports(self) -> list[Report]:
        """The report of each source, which names it."""
        labelled = zip(self.mix.names, self.parts, strict=True)
        limit = self.report.limit
        return [replace(part.report, dataset=f"{name} ({part.report.dataset})", limit=limit) for name, part in labelled]


class SourceOrder:
    """The source of each position in a run.

    Of the first `n` rows of a run, the number of each source differs from its share by less than one, for every `n`:
    R. Tijdeman, The chairman assignment problem (1980). A source goes on from epoch to epoch where it stopped, so that
    all of its rows are read before one is repeated.

    Args:
        shares: integers in the ratio of the sources' weights.
    """

    def __init__(self, shares: list[int]):
        self.shares, self.period = shares, sum(shares)
        self._chosen = bytearray()  # the source of each position, up to the end of the first period
        self._counts = [0] * len(self.shares)  # rows of each source in `_chosen`
        self._counts_before = [tuple(self._counts)]  # the same before each block of positions
        self._lock = Lock()  # the next batch is prepared by another thread

    def sources(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """The source of each position from `start` to `stop`."""
        chosen, position = list[npt.NDArray[np.int64]](), start
        while position < stop:
            first = position % self.period
            last = min(first + stop - position, self.period)
            chosen.append(self._chosen_in(first, last))
            position += last - first
        return np.concatenate([np.zeros(0, dtype=np.int64), *chosen])

    def counts(self, position: int) -> npt.NDArray[np.int64]:
        """`[sources]` rows of each source before a position."""
        periods, left = divmod(position, self.period)
        block = left // _BLOCK
        since = np.bincount(self._chosen_in(block * _BLOCK, left), minlength=len(self.shares))
        return periods * np.array(self.shares) + np.array(self._counts_before[block]) + since

    def rows_of_epoch(self, rows: Sequence[int], stopping_strategy: str) -> int:
        """Rows of an epoch: as many as repeat no row of any source, or as many as read every source in full.

        Args:
            rows: rows of each source.
            stopping_strategy: of the mix.
        """
        ratios = [(count * self.period, share) for count, share in zip(rows, self.shares, strict=True)]
        if stopping_strategy == "first_exhausted":
            return min(count // share for count, share in ratios)
        return max(-(-count // share) for count, share in ratios)

    def _chosen_in(self, first: int, last: int) -> npt.NDArray[np.int64]:
        """The source of each position of a part of the first period."""
        with self._lock:
            while len(self._chosen) < last:
                self._choose()
            return np.frombuffer(self._chosen[first:last], dtype=np.uint8).astype(np.int64)

    def _choose(self) -> None:
        """Chooses the source of the next position: of those whose turn has come, the one whose turn ends first."""
        position, several = len(self._chosen) + 1, max(2 * len(self.shares) - 2, 1)
        best, deadline = 0, (1, 0)  # as a fraction; 1/0 is later than any
        for source, (share, count) in enumerate(zip(self.shares, self._counts, strict=True)):
            behind = several * (share * position - self.period * count)
            if behind < self.period and several > 1:
                continue
            left = (several - 1) * self.period - behind
            if left * deadline[1] < deadline[0] * share:
                best, deadline = source, (left, share)
        self._chosen.append(best)
        self._counts[best] += 1
        if len(self._chosen) % _BLOCK == 0:
            self._counts_before.append(tuple(self._counts))


class Passes:
    """The rows of a source that is held in full: pass after pass over them, each in an order of its own.

    Args:
        source: its number in the mix.
        rows: how many it has.
        seed: seed of the order.
    """

    def __init__(self, source: int, rows: int, seed: int):
        self.source, self.rows, self.seed = source, rows, seed
        self._known: tuple[int, npt.NDArray[np.int64]] = (-1, np.zeros(0, dtype=np.int64))

    def rows_at(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """The numbers of its rows from `start` to `stop`, counted from the start of the run."""
        numbers, position = list[npt.NDArray[np.int64]](), start
        while position < stop:
            index, first = divmod(position, self.rows)
            numbers.append(self.order(index)[first : first + stop - position])
            position += len(numbers[-1])
        return np.concatenate([np.zeros(0, dtype=np.int64), *numbers])

    def sum_until(self, count: int, values: npt.NDArray[np.int64]) -> int:
        """The sum over its first `count` rows of a value `[rows]` of each."""
        passes, left = divmod(count, self.rows)
        return passes * int(values.sum()) + int(values[self.order(passes)[:left]].sum())

    def order(self, number: int) -> npt.NDArray[np.int64]:
        """The order of its rows in one pass."""
        known, order = self._known  # in one attribute, as the next batch is prepared by another thread
        if known != number:
            order = np.random.Generator(np.random.PCG64([self.seed, self.source, number])).permutation(self.rows)
            self._known = number, order
        return order


class MixOrder(SourceOrder):
    """The row of each position in a run: sources by weight, and the rows of each in a new order at every pass.

    Args:
        bounds: `[sources + 1]` first row of each source, and the end.
        mix: the weights, and when an epoch ends.
        seed: seed of the order within a source.
    """

    def __init__(self, bounds: npt.NDArray[np.int64], mix: Mix, seed: int):
        super().__init__(mix.shares())
        self.bounds, self.mix = bounds, mix
        self.rows: list[int] = np.diff(bounds).tolist()
        self.passes = [Passes(source, rows, seed) for source, rows in enumerate(self.rows)]

    @property
    def epoch_rows(self) -> int:
        """Rows of an epoch."""
        return self.rows_of_epoch(self.rows, self.mix.stopping_strategy)

    def rows_at(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """The row numbers at the positions from `start` to `stop`."""
        sources, before = self.sources(start, stop), self.counts(start).tolist()
        rows = np.empty(stop - start, dtype=np.int64)
        for source in np.unique(sources).tolist():
            where = np.flatnonzero(sources == source)
            of_source = self.passes[source].rows_at(before[source], before[source] + len(where))
            rows[where] = self.bounds[source] + of_source
        return rows

    def values_until(self, position: int, values: npt.NDArray[np.int64]) -> list[int]:
        """`[sources]` sum over the rows before a position of a value `[rows]` of each row."""
        counts, parts = self.counts(position).tolist(), np.split(values, self.bounds[1:-1])
        return [source.sum_until(count, part)
                for source, count, part in zip(self.passes, counts, parts, strict=True)]  # fmt: skip
