"""The batch of step `s`: a pure function of (data, seed, `s`), then split across data-parallel ranks.

There is no data loader state to save: any rank can compute the rows of any step at any time. `StreamPlan` does the same
for data that is read as the run goes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import numpy as np

from trainers.config.mistakes import ConfigError
from trainers.config.options import TrainConfig
from trainers.data.micro_batch import MicroBatch, StepBatch
from trainers.data.mix import MixOrder
from trainers.data.rows import Rows

_GROUPED_BATCHES = 50  # global batches per length-sorted block: enough to reduce padding, few enough to stay shuffled


class Collective(Protocol):
    """What a plan needs of the ranks of a run."""

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0."""

    def gather(self, value: Any) -> list[Any]:
        """A small object of every rank, in rank order."""


class TrainPlan:
    """Assigns rows to ranks at each step.

    Args:
        rows: the training rows.
        config: batch sizes, seed, epochs.
        data_parallel_size: ranks that share a global batch.

    Raises:
        ConfigError: if the global batch does not divide evenly, or is larger than the data.
    """

    def __init__(self, rows: Rows, config: TrainConfig, data_parallel_size: int):
        self.rows = rows
        self.config = config
        self.world = data_parallel_size
        self.accumulation = config.accumulation_steps(data_parallel_size)
        self.mix_order = MixOrder(rows.bounds, rows.mix, config.seed) if rows.mix is not None else None
        size, kind = config.global_batch_size, "packed rows" if config.packing else "rows"
        available = self.rows_of_epoch()
        if available < size and not config.eval_only:
            alternative = ", or packing=false" if config.packing and len(rows.documents.lengths) >= size else ""
            ends = "" if self.mix_order is None else ", and an epoch ends with the first source that has no more"
            raise ConfigError.about(
                "global_batch_size",
                size,
                f"is larger than the data: {available} {kind} of {len(rows.documents.lengths)} documents{ends}",
                f"use {self._smaller(available)}{alternative}",
            )
        # The batches of a mix are full ones, as its order goes on from epoch to epoch.
        repeats = self.mix_order is None or self.mix_order.mix.stopping_strategy == "all_exhausted"
        self.steps_per_epoch = math.ceil(available / size) if repeats else available // size
        self.total_steps = config.max_steps or math.ceil(config.num_train_epochs * self.steps_per_epoch)
        self._order = (-1, np.empty(0, dtype=np.int64))
        self.check: Callable[..., None] = lambda documents: None
        """Called with each further window of a stream; raises `ConfigError` if the model cannot be trained on it."""

    def rows_of_epoch(self) -> int:
        """Rows of an epoch; of a stream, an estimate by its first window."""
        return len(self.rows) if self.mix_order is None else self.mix_order.epoch_rows

    def _smaller(self, rows: int) -> str:
        """Suggests batch sizes that divide evenly and fit this many rows."""
        micro = self.config.per_device_train_batch_size
        if rows >= micro * self.world:
            return f"global_batch_size={rows // (micro * self.world) * micro * self.world}"
        if rows < self.world:
            return f"more data, or at most {max(rows, 1)} processes"
        micro = rows // self.world
        return f"global_batch_size={micro * self.world} with per_device_train_batch_size={micro}"

    @property
    def held_rows(self) -> list[Rows]:
        """The rows of the data that is read in full before the first step; of a mix with streams, source by source."""
        return [self.rows]

    def _order_of(self, epoch: int) -> np.ndarray:
        known, order = self._order  # in one attribute, as the next batch is prepared by another thread
        if epoch != known:
            order = shuffled(self.rows, self.config, epoch)
            self._order = epoch, order
        return order

    def rows_of(self, step: int) -> np.ndarray:
        """Row numbers of the global batch of `step`, from 0; the last batch of an epoch may be smaller."""
        size = self.config.global_batch_size
        if self.mix_order is not None:
            return self.mix_order.rows_at(step * size, (step + 1) * size)
        epoch, index = divmod(step, self.steps_per_epoch)
        return self._order_of(epoch)[index * size : (index + 1) * size]

    def chosen(self, step: int) -> tuple[Rows, np.ndarray]:
        """The rows of the data, and the numbers of those in the global batch of `step`."""
        return self.rows, self.rows_of(step)

    def shares(self, step: int, rank: int) -> list[np.ndarray]:
        """Row numbers of each micro-batch of `rank` in the global batch of `step`; some may be empty."""
        return self._shares(self.chosen(step)[1], rank)

    def _shares(self, chosen: np.ndarray, rank: int) -> list[np.ndarray]:
        """Row numbers of each micro-batch of `rank`, of a global batch; some may be empty."""
        size = self.config.per_device_train_batch_size
        # Interleaved between ranks: with rows sorted by length, all ranks do similar work at a time.
        starts = [(number * self.world + rank) * size for number in range(self.accumulation)]
        return [chosen[start : start + size] for start in starts]

    def batch(self, step: int, rank: int) -> StepBatch:
        """The share of `rank` in the global batch of `step`."""
        rows, chosen = self.chosen(step)
        micro_batches = rows.collate_each(self._shares(chosen, rank), rows.scales(chosen), step)
        mismatched = list[MicroBatch]()
        trained, tokens, squared = (
            int(values[chosen].sum()) for values in (rows.trained, rows.lengths, rows.squared_lengths)
        )
        if rows.mismatched is not None:
            numbers, size = rows.members_of(chosen), self.config.per_device_train_batch_size
            mismatched = rows.mismatched.collate_documents(numbers, size, rank, self.world)
        return StepBatch(
            micro_batches, trained, tokens, squared, rows.divisor(chosen), mismatched,
            trained_by_source=rows.trained_by_source(chosen),
        )  # fmt: skip

    def locations(self, step: int, rank: int | None = None) -> list[str]:
        """File and line of each example in the global batch of `step`, or in the share of `rank`."""
        rows, chosen = self.chosen(step)
        shares = [chosen] if rank is None else self._shares(chosen, rank)
        return [location for share in shares for location in rows.locations(share)]

    def epochs(self, step: int) -> float:
        """The epochs of the first `step` steps."""
        return step / self.steps_per_epoch

    def source_metrics(self, step: int) -> dict[str, float]:
        """Of each source of a mix, its share of the rows and its tokens in the first `step` steps; otherwise empty."""
        if self.mix_order is None or step == 0:
            return {}
        position = step * self.config.global_batch_size
        shares = self.mix_order.counts(position) / position
        tokens = self.mix_order.values_until(position, self.rows.lengths)
        labelled = zip(self.mix_order.mix.names, shares.tolist(), tokens, strict=True)
        return {f"{kind}/{name}": value for name, share, count in labelled
                for kind, value in (("share", share), ("tokens", count))
                if kind == "share" or not self.config.objective_spec.samples}  # fmt: skip

    def agree(self, step: int, ranks: Collective, beat: Callable[[], None] = lambda: None) -> None:
        """Makes sure that all ranks read the same data for `step`: here they do, as it was read in full before."""

    def position(self, step: int) -> list[dict[str, int]]:
        """What a checkpoint of `step` needs beside its number, to go on with the next batch; empty here."""
        return []

    def restore(self, step: int, position: list[dict[str, int]]) -> None:
        """Goes on from a checkpoint of `step`, with what `position` was then."""

    def batches(self, rank: int, first_step: int) -> Generator[StepBatch]:
        """Yields the batches of `rank` from `first_step` on; the next is prepared while the current step computes."""
        pool = ThreadPoolExecutor(1, thread_name_prefix="batches")
        try:
            upcoming = pool.submit(self.batch, first_step, rank)
            for step in range(first_step, self.total_steps):
                ready = upcoming.result()
                if step + 1 < self.total_steps:
                    upcoming = pool.submit(self.batch, step + 1, rank)
                yield ready
        finally:  # without waiting for the next window of a stream: the run may be about to be killed
            pool.shutdown(wait=False, cancel_futures=True)


def shuffled(rows: Rows, config: TrainConfig, *number: int) -> np.ndarray:
    """`[rows]` row numbers in the order of training.

    Args:
        rows: the rows.
        config: `seed`, and whether batches have similar lengths.
        number: of the epoch, or of a part of it; each has another order.
    """
    rng = np.random.Generator(np.random.PCG64([config.seed, *number]))
    order = rng.permutation(len(rows))
    if not config.group_by_length or config.packing:
        return order
    # Sort by length within blocks of many shuffled batches, then shuffle the batches; the partial one is the last.
    size = config.global_batch_size
    block = size * _GROUPED_BATCHES
    blocks = [order[start : start + block] for start in range(0, len(order), block)]
    ordered = np.concatenate([part[np.argsort(-rows.lengths[part], kind="stable")] for part in blocks])
    full = len(ordered) // size
    batches = ordered[: full * size].reshape(full, size)
    return np.concatenate([batches[rng.permutation(full)].reshape(-1), ordered[full * size :]])


def evaluation_batches(
    rows: Rows, batch_size: int, rank: int, world: int, source: int | None = None
) -> Iterator[MicroBatch]:
    """Yields this rank's micro-batches of an evaluation: each row once over all ranks, the same number on each rank.

    Ranks without rows left get a micro-batch of weight zero.

    Args:
        rows: the evaluation data.
        batch_size: rows of a micro-batch.
        rank: this data-parallel rank.
        world: number of those.
        source: the source of a mix whose rows are evaluated; None for all rows.
    """
    scales = rows.scales()
    begin, end = (0, len(rows)) if source is None else rows.bounds[source : source + 2].tolist()
    for start in range(begin, end, batch_size * world):
        first = start + rank * batch_size
        yield rows.collate(np.arange(first, min(first + batch_size, end)), scales)
