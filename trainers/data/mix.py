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


class MixOrder:
    """The row of each position in a run: sources by weight, and the rows of each in a new order at every pass.

    Of the first `n` rows of a run, the number of each source differs from its share by less than one, for every `n`:
    R. Tijdeman, The chairman assignment problem (1980). A source goes on from epoch to epoch where it stopped, so that
    all of its rows are read before one is repeated.

    Args:
        bounds: `[sources + 1]` first row of each source, and the end.
        mix: the weights, and when an epoch ends.
        seed: seed of the order within a source.
    """

    def __init__(self, bounds: npt.NDArray[np.int64], mix: Mix, seed: int):
        self.bounds, self.mix, self.seed = bounds, mix, seed
        self.rows: list[int] = np.diff(bounds).tolist()
        self.shares = mix.shares()
        self.period = sum(self.shares)
        self._chosen = bytearray()  # the source of each position, up to the end of the first period
        self._counts = [0] * len(self.shares)  # rows of each source in `_chosen`
        self._counts_before = [tuple(self._counts)]  # the same before each block of positions
        self._lock = Lock()  # the next batch is prepared by another thread
        self._order: dict[int, tuple[int, npt.NDArray[np.int64]]] = {}

    @property
    def epoch_rows(self) -> int:
        """Rows of an epoch: as many as repeat no row of any source, or as many as read every source in full."""
        ratios = [(rows * self.period, share) for rows, share in zip(self.rows, self.shares, strict=True)]
        if self.mix.stopping_strategy == "first_exhausted":
            return min(rows // share for rows, share in ratios)
        return max(-(-rows // share) for rows, share in ratios)

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

    def rows_at(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """The row numbers at the positions from `start` to `stop`."""
        sources, before = self.sources(start, stop), self.counts(start)
        rows = np.empty(stop - start, dtype=np.int64)
        for source in np.unique(sources).tolist():
            where = np.flatnonzero(sources == source)
            passes, index = np.divmod(before[source] + np.arange(len(where)), self.rows[source])
            for number in np.unique(passes).tolist():
                chosen = passes == number
                rows[where[chosen]] = self.bounds[source] + self._pass(source, number)[index[chosen]]
        return rows

    def values_until(self, position: int, values: npt.NDArray[np.int64]) -> list[int]:
        """`[sources]` sum over the rows before a position of a value `[rows]` of each row."""
        sums = []
        for source, count in enumerate(self.counts(position).tolist()):
            of_source = values[self.bounds[source] : self.bounds[source + 1]]
            passes, left = divmod(count, self.rows[source])
            sums.append(passes * int(of_source.sum()) + int(of_source[self._pass(source, passes)[:left]].sum()))
        return sums

    def _pass(self, source: int, number: int) -> npt.NDArray[np.int64]:
        """The order of a source's rows in one pass over them."""
        known, order = self._order.get(source, (-1, None))
        if known != number or order is None:
            rng = np.random.Generator(np.random.PCG64([self.seed, source, number]))
            order = rng.permutation(self.rows[source])
            self._order[source] = number, order
        return order

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
