"""The batch of step `s`: a pure function of (data, seed, `s`), then split across data-parallel ranks.

There is no data loader state to save: any rank can compute the rows of any step at any time.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from trainers.config.mistakes import ConfigError
from trainers.config.options import TrainConfig
from trainers.data.micro_batch import MicroBatch, StepBatch
from trainers.data.mix import MixOrder
from trainers.data.rows import Rows

_GROUPED_BATCHES = 50  # global batches per length-sorted block: enough to reduce padding, few enough to stay shuffled


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
        self.mix_order = MixOrder(rows.bounds, rows.mixed.mix, config.seed) if rows.mixed is not None else None
        size, kind = config.global_batch_size, "packed rows" if config.packing else "rows"
        available = len(rows) if self.mix_order is None else self.mix_order.epoch_rows
        if available < size:
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

    def _smaller(self, rows: int) -> str:
        """Suggests batch sizes that divide evenly and fit this many rows."""
        micro = self.config.per_device_train_batch_size
        if rows >= micro * self.world:
            return f"global_batch_size={rows // (micro * self.world) * micro * self.world}"
        if rows < self.world:
            return f"more data, or at most {max(rows, 1)} processes"
        micro = rows // self.world
        return f"global_batch_size={micro * self.world} with per_device_train_batch_size={micro}"

    def _order_of(self, epoch: int) -> np.ndarray:
        known, order = self._order  # in one attribute, as the next batch is prepared by another thread
        if epoch != known:
            rng = np.random.Generator(np.random.PCG64([self.config.seed, epoch]))
            order = rng.permutation(len(self.rows))
            if self.config.group_by_length and not self.config.packing:
                order = self._grouped(order, rng)
            self._order = epoch, order
        return order

    def _grouped(self, order: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Orders rows so that batches have similar lengths; batches in random order, the partial one last."""
        size = self.config.global_batch_size
        # Sort by length within blocks of many shuffled batches, then shuffle the batches.
        block = size * _GROUPED_BATCHES
        blocks = [order[start : start + block] for start in range(0, len(order), block)]
        ordered = np.concatenate([part[np.argsort(-self.rows.lengths[part], kind="stable")] for part in blocks])
        full = len(ordered) // size
        batches = ordered[: full * size].reshape(full, size)
        return np.concatenate([batches[rng.permutation(full)].reshape(-1), ordered[full * size :]])

    def rows_of(self, step: int) -> np.ndarray:
        """Row numbers of the global batch of `step`, from 0; the last batch of an epoch may be smaller."""
        size = self.config.global_batch_size
        if self.mix_order is not None:
            return self.mix_order.rows_at(step * size, (step + 1) * size)
        epoch, index = divmod(step, self.steps_per_epoch)
        return self._order_of(epoch)[index * size : (index + 1) * size]

    def shares(self, step: int, rank: int) -> list[np.ndarray]:
        """Row numbers of each micro-batch of `rank` in the global batch of `step`; some may be empty."""
        chosen, size = self.rows_of(step), self.config.per_device_train_batch_size
        # Interleaved between ranks: with rows sorted by length, all ranks do similar work at a time.
        starts = [(number * self.world + rank) * size for number in range(self.accumulation)]
        return [chosen[start : start + size] for start in starts]

    def batch(self, step: int, rank: int) -> StepBatch:
        """The share of `rank` in the global batch of `step`."""
        chosen, rows = self.rows_of(step), self.rows
        micro_batches = rows.collate_each(self.shares(step, rank), rows.scales(chosen), step)
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

    def batches(self, rank: int, first_step: int) -> Generator[StepBatch]:
        """Yields the batches of `rank` from `first_step` on; the next is prepared while the current step computes."""
        with ThreadPoolExecutor(1, thread_name_prefix="batches") as pool:
            upcoming = pool.submit(self.batch, first_step, rank)
            for step in range(first_step, self.total_steps):
                ready = upcoming.result()
                if step + 1 < self.total_steps:
                    upcoming = pool.submit(self.batch, step + 1, rank)
                yield ready


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
