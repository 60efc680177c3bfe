"""The batch of step `s`: a pure function of (data, seed, `s`), then cut across data-parallel ranks.

There is no loader state to save: any rank can compute any step's rows at any time.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from trainers.config.options import ConfigError, TrainConfig
from trainers.data.layout import WHOLE, DocumentLayout, RowPart
from trainers.data.packing import pack

if TYPE_CHECKING:  # the pre-flight check plans batches without waiting for torch
    import torch

_GROUPED_BATCHES = 50  # global batches per length-sorted block: enough to save padding, few enough to stay shuffled


class Documents(Protocol):
    """What the plan needs of a `trainers.data.prepare.TokenSet`."""

    lengths: np.ndarray
    trained: np.ndarray
    fingerprint: str

    def document(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Token ids and the mask of trained tokens of one document."""

    def gather(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The same of several documents, one after another."""

    def where(self, index: int) -> str:
        """File and line that a document came from."""


_Row = tuple[np.ndarray, np.ndarray, list[int]]
"""Token ids, which of them are trained, and the lengths of its documents."""


@dataclass(frozen=True)
class MicroBatch:
    """Tensors of one forward pass on one rank; the fields of `SupervisedLoss.forward`.

    Args:
        real: `[batch, sequence]`, False for the padding of rows.
        tokens: real input tokens in it.
        slots: tokens with padding.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    documents: DocumentLayout | None
    positions: torch.Tensor
    labels: torch.Tensor
    real: torch.Tensor
    tokens: int
    slots: int

    def inputs(self, device: torch.device, expert_weights: torch.Tensor | None = None) -> dict[str, Any]:
        """The model's arguments on its device.

        Args:
            expert_weights: of a load-balancing loss, which goes by the real tokens too.
        """
        names = ("input_ids", "position_ids", "documents", "positions", "labels")
        tensors = {name: getattr(self, name) for name in names}
        moved = {name: None if one is None else one.to(device, non_blocking=True) for name, one in tensors.items()}
        if expert_weights is None:
            return moved
        return {**moved, "real_tokens": self.real.to(device, non_blocking=True), "expert_weights": expert_weights}


@dataclass(frozen=True)
class StepBatch:
    """One rank's share of one step.

    Args:
        micro: its micro-batches, as many on every rank.
        trained_tokens: trained tokens of the whole global batch, the divisor of the loss.
        tokens: real tokens of the whole global batch.
        squared_lengths: sum of the squared document lengths of the whole global batch, for counting FLOPs.
    """

    micro: list[MicroBatch]
    trained_tokens: int
    tokens: int
    squared_lengths: int


class Rows:
    """Training rows: several documents each when packed, one each otherwise.

    Args:
        documents: the tokenised data.
        max_length: tokens per row at most.
        packing: whether rows hold several documents.
        pad_token_id: fills the rest of a row.
        fixed_length: pad every row to `max_length` (for compiled models), not to the longest of its micro-batch.
        part: of each row, that micro-batches hold; the layout of documents is that of whole rows.
    """

    def __init__(
        self, documents: Documents, max_length: int, packing: bool, pad_token_id: int, fixed_length: bool = False,
        part: RowPart = WHOLE,
    ):  # fmt: skip
        self.documents, self.packing, self.pad_token_id, self.part = documents, packing, pad_token_id, part
        self.fixed_length = max_length if fixed_length else None
        count = len(documents.lengths)
        if packing:
            packed = pack(documents.lengths, max_length)
            self.members, self.offsets = packed.documents, packed.offsets
        else:
            self.members, self.offsets = np.arange(count, dtype=np.int32), np.arange(count + 1)
        self.lengths = self._sums(documents.lengths)
        self.trained = self._sums(documents.trained)
        self.squared_lengths = self._sums(documents.lengths, power=2)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def _sums(self, values: np.ndarray, power: int = 1) -> np.ndarray:
        """One number for each row, of which none is empty."""
        picked = values[self.members]
        picked **= power
        return np.add.reduceat(picked, self.offsets[:-1]) if len(picked) else np.zeros(0, dtype=np.int64)

    def places(self, rows: np.ndarray) -> list[str]:
        """File and line of each document in some rows."""
        members = (self.members[self.offsets[row] : self.offsets[row + 1]] for row in rows)
        return [self.documents.where(int(member)) for group in members for member in group]

    def collate(self, rows: np.ndarray) -> MicroBatch:
        """The tensors of some rows; without any, one row of weight zero, so that every rank does as many passes."""
        return self.collate_each([rows])[0]

    def collate_each(self, shares: Sequence[np.ndarray]) -> list[MicroBatch]:
        """The tensors of several micro-batches, whose documents are read in one go."""
        whole = self._rows([row for share in shares for row in share.tolist()])
        ends = np.cumsum([0, *map(len, shares)]).tolist()
        return [self._micro_batch(whole[start:end]) for start, end in pairwise(ends)]

    def _rows(self, rows: list[int]) -> list[_Row]:
        """What is in some rows."""
        if not rows:
            return []
        members = [self.members[self.offsets[row] : self.offsets[row + 1]] for row in rows]
        together = np.concatenate(members)
        tokens, mask = self.documents.gather(together)
        lengths, found, taken, first = self.documents.lengths[together].tolist(), [], 0, 0
        for inside in members:
            own = lengths[first : first + len(inside)]
            run = slice(taken, taken + sum(own))
            found.append((tokens[run], mask[run], own))
            taken, first = run.stop, first + len(inside)
        return found

    def _micro_batch(self, content: list[_Row]) -> MicroBatch:
        import torch

        filled = [len(tokens) for tokens, _, _ in content]
        width = self.part.padded(self.fixed_length or max(filled, default=1))
        ids, trained, borders = self._laid_out(content, width)
        starts = np.array(borders)
        firsts, mask = starts[:-1], trained.reshape(-1)
        mask[firsts] = False  # the first token of a document is predicted by nothing
        place = (np.arange(ids.size) - firsts.repeat(starts[1:] - firsts)).reshape(ids.shape)
        if self.packing:  # the padding of a row may be longer than any document, and than the model has positions for
            place = np.minimum(place, max((max(lengths) for _, _, lengths in content), default=1) - 1)
        real = np.arange(width) < np.array(filled or [0])[:, None]
        ids_here, place_here, real_here, positions, flat = self._part(ids, place, real, mask.nonzero()[0])
        parts = (ids_here, place_here, positions, ids.reshape(-1)[flat], real_here)
        ids_t, place_t, positions_t, labels, real_t = (torch.from_numpy(np.ascontiguousarray(part)) for part in parts)
        documents = DocumentLayout.of(starts, len(ids)) if self.packing else None
        return MicroBatch(ids_t, place_t, documents, positions_t, labels, real_t, sum(filled), ids.size)

    def _laid_out(self, content: list[_Row], width: int) -> tuple[np.ndarray, np.ndarray, list[int]]:
        """Ids and mask `[batch, width]`, and where in their flattened form each document starts, with the end.

        The padding of a row is a document of its own. Rows and documents are tens: lists are quicker than arrays.
        """
        shape = (max(len(content), 1), width)
        ids, trained = np.full(shape, self.pad_token_id, dtype=np.int64), np.zeros(shape, dtype=bool)
        borders: list[int] = [] if content else [0]
        for line, (tokens, mask, lengths) in enumerate(content):
            ids[line, : len(tokens)] = tokens
            trained[line, : len(tokens)] = mask
            at = line * width
            for length in lengths:
                borders.append(at)
                at += length
            if len(tokens) < width:
                borders.append(at)
        return ids, trained, [*borders, ids.size]

    def _part(
        self, ids: np.ndarray, place: np.ndarray, real: np.ndarray, trained: np.ndarray
    ) -> tuple[np.ndarray, ...]:
        """What of whole rows is this rank's: ids, places, real tokens, where predictions are made, and of which tokens.

        Args:
            ids: `[batch, width]`.
            place: `[batch, width]`.
            real: `[batch, width]`.
            trained: flat places of the tokens that are to be predicted.
        """
        if self.part.count == 1:
            return ids, place, real, trained - 1, trained
        width, columns = ids.shape[1], self.part.columns(ids.shape[1])
        column_here = np.full(width, -1)
        column_here[columns] = np.arange(len(columns))
        row, before = np.divmod(trained - 1, width)  # the token whose successor is to be predicted
        here = column_here[before] >= 0
        positions = (row * len(columns) + column_here[before])[here]
        return ids[:, columns], place[:, columns], real[:, columns], positions, trained[here]


class TrainPlan:
    """Which rows each rank trains on at each step.

    Args:
        rows: the training rows.
        config: batch sizes, seed, epochs.
        data_parallel_size: ranks that share a global batch.

    Raises:
        ConfigError: when the global batch does not divide, or is larger than the data.
    """

    def __init__(self, rows: Rows, config: TrainConfig, data_parallel_size: int):
        self.rows, self.config, self.world = rows, config, data_parallel_size
        self.accumulation = config.accumulation_steps(data_parallel_size)
        size, kind = config.global_batch_size, "packed rows" if config.packing else "rows"
        if len(rows) < size:
            way = ", or packing=false" if config.packing and len(rows.documents.lengths) >= size else ""
            raise ConfigError(
                f"global_batch_size={size} is larger than the data: {len(rows)} {kind} of "
                f"{len(rows.documents.lengths)} documents; use {self._smaller(len(rows))}{way}"
            )
        self.steps_per_epoch = math.ceil(len(rows) / size)
        self.total_steps = config.max_steps or math.ceil(config.num_train_epochs * self.steps_per_epoch)
        self._epoch = -1
        self._order = np.empty(0, dtype=np.int64)

    def _smaller(self, rows: int) -> str:
        """Batch sizes that fit this many rows and divide."""
        micro = self.config.per_device_train_batch_size
        if rows >= micro * self.world:
            return f"global_batch_size={rows // (micro * self.world) * micro * self.world}"
        if rows < self.world:
            return f"more data, or at most {max(rows, 1)} processes"
        micro = rows // self.world
        return f"global_batch_size={micro * self.world} with per_device_train_batch_size={micro}"

    def _order_of(self, epoch: int) -> np.ndarray:
        if epoch != self._epoch:
            rng = np.random.Generator(np.random.PCG64([self.config.seed, epoch]))
            order = rng.permutation(len(self.rows))
            if self.config.group_by_length and not self.config.packing:
                order = self._grouped(order, rng)
            self._epoch, self._order = epoch, order
        return self._order

    def _grouped(self, order: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Rows of like length in one batch, batches in random order, the partial batch last."""
        size = self.config.global_batch_size
        block = size * _GROUPED_BATCHES
        blocks = [order[start : start + block] for start in range(0, len(order), block)]
        ordered = np.concatenate([part[np.argsort(-self.rows.lengths[part], kind="stable")] for part in blocks])
        full = len(ordered) // size
        batches = ordered[: full * size].reshape(full, size)
        return np.concatenate([batches[rng.permutation(full)].reshape(-1), ordered[full * size :]])

    def rows_of(self, step: int) -> np.ndarray:
        """Row numbers of the global batch of `step`, counted from 0; fewer in an epoch's last one."""
        epoch, place = divmod(step, self.steps_per_epoch)
        size = self.config.global_batch_size
        return self._order_of(epoch)[place * size : (place + 1) * size]

    def shares(self, step: int, rank: int) -> list[np.ndarray]:
        """Row numbers of each micro-batch of `rank` in the global batch of `step`; some may be empty."""
        chosen, size = self.rows_of(step), self.config.per_device_train_batch_size
        starts = [(number * self.world + rank) * size for number in range(self.accumulation)]
        return [chosen[start : start + size] for start in starts]

    def batch(self, step: int, rank: int) -> StepBatch:
        """The share of `rank` in the global batch of `step`."""
        chosen, rows = self.rows_of(step), self.rows
        micro = rows.collate_each(self.shares(step, rank))
        counts = (int(values[chosen].sum()) for values in (rows.trained, rows.lengths, rows.squared_lengths))
        return StepBatch(micro, *counts)

    def batches(self, rank: int, first_step: int) -> Generator[StepBatch]:
        """The batches of `rank` from `first_step` on; the next one is made while the step in hand computes."""
        with ThreadPoolExecutor(1, thread_name_prefix="batches") as pool:
            coming = pool.submit(self.batch, first_step, rank)
            for step in range(first_step, self.total_steps):
                ready = coming.result()
                if step + 1 < self.total_steps:
                    coming = pool.submit(self.batch, step + 1, rank)
                yield ready


def evaluation_batches(rows: Rows, batch_size: int, rank: int, world: int) -> Iterator[MicroBatch]:
    """Every row once over all ranks, as many micro-batches on each, rows of weight zero filling the last."""
    for start in range(0, len(rows), batch_size * world):
        first = start + rank * batch_size
        yield rows.collate(np.arange(first, min(first + batch_size, len(rows))))
