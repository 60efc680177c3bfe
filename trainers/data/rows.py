"""Training rows: which documents share one, and the tensors of a micro-batch of rows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from types import MappingProxyType
from typing import Protocol

import numpy as np

from trainers.config.objectives import OBJECTIVES, ObjectiveSpec
from trainers.data.gathered import GatheredDocuments, GatheredSet, Piece
from trainers.data.joined import JoinedSet
from trainers.data.layout import (
    FULL_SEQUENCE,
    UNSCALED,
    DocumentLayout,
    Scales,
    ScoredDocuments,
    SequenceShard,
    TopTokens,
)
from trainers.data.micro_batch import LabelSources, MicroBatch
from trainers.data.mix import MixedSet
from trainers.data.noise import NoiseRule, TokenNoise
from trainers.data.packing import pack
from trainers.data.rollouts import Rollouts, TokenValues
from trainers.data.teacher_file import TeacherFile, values_of_labels


class Documents(Protocol):
    """What the plan needs of a `trainers.data.prepare.TokenSet`."""

    lengths: np.ndarray
    trained: np.ndarray
    fingerprint: str

    def document(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Token ids and the mask of trained tokens of one document."""

    def gather(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The same for several documents, concatenated."""

    def where(self, index: int) -> str:
        """File and line that a document came from."""


_Row = tuple[np.ndarray, np.ndarray, list[int]]
"""Token ids, the mask of trained tokens, and the lengths of the documents in a row of a micro-batch."""


class Rows:
    """Training rows: several examples per row if packed, otherwise one.

    The documents of an example stand side by side in a packed row. Without packing, each has a row of the micro-batch
    to itself.

    Args:
        documents: the tokenised data.
        max_length: maximum tokens per row.
        packing: whether rows hold several examples.
        fixed_length: pad every row to `max_length` (for compiled models), not to the longest in the micro-batch.
        shard: the shard of each row that micro-batches hold; `documents` still describes full rows.
        objective: says how many documents make an example, and what the loss is divided by.
        desirable: `[documents]` bool, the label of each; None without labels.
        mismatched: rows of the mismatched documents, as many as `documents`, if the objective compares those.
        columns: `[documents]` float32 each, by name: the numeric columns of the example of each document.
        teacher: what a teacher predicts, if it was recorded.

    `bounds` `[parts + 1]` is the first row of each part that is packed by itself, such as a source of a mix, and the
    end. `mix` is the mix that the data is of, or None. `splits_loss` says whether micro-batches tell which source a
    label is from. `noise` is what the embeddings of a step's micro-batches get. `reference`, once set, holds the
    log-probability `[documents]` of each document under the initial model.
    """

    def __init__(
        self, documents: Documents, max_length: int, packing: bool, fixed_length: bool = False,
        shard: SequenceShard = FULL_SEQUENCE, objective: ObjectiveSpec = OBJECTIVES["sft"],
        desirable: np.ndarray | None = None, mismatched: Rows | None = None,
        columns: Mapping[str, np.ndarray] = MappingProxyType({}), teacher: TeacherFile | None = None,
    ):  # fmt: skip
        self.documents = documents
        self.max_length = max_length
        self.packing = packing
        self.shard = shard
        self.objective = objective
        self.desirable, self.mismatched, self.columns = desirable, mismatched, columns
        self.teacher = teacher
        self.fixed_length = max_length if fixed_length else None
        self.reference: np.ndarray | None = None
        gathered = documents if isinstance(documents, GatheredSet) else None
        if isinstance(documents, GatheredDocuments):
            self.reference = documents.reference
        self.splits_loss = False
        self.noise: NoiseRule | None = None
        self._filler: int | None = None
        parts = objective.documents
        count = len(documents.lengths) // parts
        self.mixed = documents if isinstance(documents, MixedSet) else None
        self.mix = self.mixed.mix if self.mixed is not None else gathered.mix if gathered is not None else None
        apart = documents if isinstance(documents, JoinedSet) and documents.packs_apart else None
        if gathered is not None:
            members, parts = np.arange(len(gathered), dtype=np.int32), 1  # examples are in rows already
            self.offsets, self.bounds = gathered.row_offsets, gathered.row_bounds
        elif packing:
            lengths = documents.lengths if parts == 1 else documents.lengths.reshape(count, parts).sum(1)
            bounds = (0, count) if apart is None else tuple((apart.bounds // parts).tolist())
            members, offsets, self.bounds = _pack_each(lengths, bounds, max_length)
            self.offsets = offsets * parts
        else:
            members, self.offsets = np.arange(count, dtype=np.int32), np.arange(count + 1) * parts
            self.bounds = np.array([0, count]) if apart is None else apart.bounds // parts
        self.members = members if parts == 1 else (members[:, None] * parts + np.arange(parts)).reshape(-1)
        self.lengths = self._sums(documents.lengths)
        self.trained = self._sums(documents.trained)
        self.squared_lengths = self._sums(documents.lengths, power=2)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def _sums(self, values: np.ndarray, power: int = 1) -> np.ndarray:
        """`[rows]` sum of the values of each row's documents."""
        picked = values[self.members]
        picked **= power
        return np.add.reduceat(picked, self.offsets[:-1]) if len(picked) else np.zeros(0, dtype=np.int64)

    def locations(self, rows: np.ndarray) -> list[str]:
        """File and line of each example in the given rows."""
        members = (self._members(row)[:: self.objective.documents] for row in rows)
        return [self.documents.where(int(member)) for group in members for member in group]

    def divisor(self, rows: np.ndarray | None = None) -> int:
        """What the loss of the given rows (default: all) is divided by: their trained tokens, or their examples."""
        chosen = slice(None) if rows is None else rows
        if self.objective.divisor == "tokens":
            return int(self.trained[chosen].sum())
        return int(np.diff(self.offsets)[chosen].sum()) // self.objective.documents

    def trained_by_source(self, rows: np.ndarray) -> dict[str, int]:
        """Trained tokens of each source of a mix in the given rows; empty unless `splits_loss`."""
        if self.mix is None or not self.splits_loss:
            return {}
        sources = np.searchsorted(self.bounds, rows, side="right") - 1
        sums = np.bincount(sources, self.trained[rows], len(self.bounds) - 1).astype(np.int64)
        return dict(zip(self.mix.names, sums.tolist(), strict=True))

    def scales(self, rows: np.ndarray | None = None) -> Scales:
        """The factors of a batch of the given rows (default: all)."""
        if self.objective.loss_of != "documents":
            return UNSCALED
        members, examples = self.members if rows is None else self.members_of(rows), self.divisor(rows)
        nll = examples / max(int(self.documents.trained[members[:: self.objective.documents]].sum()), 1)
        if self.desirable is None:
            return Scales(nll)
        desirable = int(self.desirable[members].sum())
        return Scales(nll, *(examples / count if count else math.nan for count in (desirable, examples - desirable)))

    def collate(self, rows: np.ndarray, scales: Scales = UNSCALED) -> MicroBatch:
        """The tensors of the given rows; if empty, one row of weight zero, as every rank must do the same passes."""
        return self.collate_each([rows], scales)[0]

    def collate_each(
        self, shares: Sequence[np.ndarray], scales: Scales = UNSCALED, step: int | None = None
    ) -> list[MicroBatch]:
        """The tensors of several micro-batches; their documents are read at once.

        Args:
            shares: row numbers of each micro-batch.
            scales: factors of the global batch.
            step: the training step, from 0, for its `noise`; None for none.
        """
        groups = [[self._members(row) for row in share.tolist()] for share in shares]
        if not self.packing and self.objective.documents > 1:  # a row of the micro-batch for each document
            groups = [[members[part : part + 1] for members in group for part in range(len(members))]
                      for group in groups]  # fmt: skip
        return self._collate_groups(groups, scales, step)

    def collate_documents(self, numbers: np.ndarray, size: int, rank: int, world: int) -> list[MicroBatch]:
        """The tensors of this rank's share of some documents, packed among themselves if rows are.

        Args:
            numbers: numbers of the documents of all ranks.
            size: rows of a micro-batch.
            rank: this data-parallel rank.
            world: number of those; each gets the same number of micro-batches, some of which may be empty.
        """
        if self.packing:
            packed = pack(self.documents.lengths[numbers], self.max_length)
            lines = [numbers[packed.row(index)] for index in range(len(packed))]
        else:
            lines = list(numbers[:, None])
        starts = range(0, len(lines), size * world)
        groups = [lines[start + rank * size : start + (rank + 1) * size] for start in starts]
        return self._collate_groups(groups, UNSCALED)

    def _collate_groups(
        self, groups: list[list[np.ndarray]], scales: Scales, step: int | None = None
    ) -> list[MicroBatch]:
        """The micro-batches whose rows hold the documents with the given numbers."""
        members = [numbers for group in groups for numbers in group]
        contents = self._contents(members)
        micro_batches = []
        for start, end in pairwise(np.cumsum([0, *map(len, groups)]).tolist()):
            micro_batch, predicted_from = self._micro_batch(contents[start:end])
            if self.objective.loss_of == "documents":
                scored = self._scored(members[start:end], contents[start:end], micro_batch, predicted_from, scales)
                micro_batch = replace(micro_batch, scored=scored)
            elif self.splits_loss:
                of_sources = self._sources(members[start:end], micro_batch, predicted_from)
                micro_batch = replace(micro_batch, sources=of_sources)
            elif self.objective.teacher:
                taught = self._top_tokens(members[start:end], micro_batch, predicted_from) if self.teacher else True
                micro_batch = replace(micro_batch, taught=taught)
            if self.noise is not None and step is not None:
                width = micro_batch.slots // max(end - start, 1)
                noise = self._noise(self.noise, step, members[start:end], max(end - start, 1), width)
                micro_batch = replace(micro_batch, noise=noise)
            micro_batches.append(micro_batch)
        return micro_batches

    def _noise(self, rule: NoiseRule, step: int, members: list[np.ndarray], batch: int, width: int) -> TokenNoise:
        """This rank's shard of the noise of rows `[batch, width]` with the given documents."""
        import torch

        keys, lengths = np.zeros((batch, width), dtype=np.int64), np.zeros((batch, width), dtype=np.int64)
        for line, numbers in enumerate(members):
            of_each = self.documents.lengths[numbers].astype(np.int64)
            positions = np.concatenate([np.arange(length) for length in of_each.tolist()])
            keys[line, : len(positions)] = rule.keys(step, np.repeat(numbers, of_each), positions)
            lengths[line, : len(positions)] = np.repeat(of_each, of_each)
        columns = slice(None) if self.shard.count == 1 else self.shard.columns(width)
        own_keys, own_lengths = (
            torch.from_numpy(np.ascontiguousarray(values[:, columns])) for values in (keys, lengths)
        )
        return TokenNoise(own_keys, own_lengths, rule.alpha)

    def _members(self, row: int) -> np.ndarray:
        """Numbers of the documents in a row."""
        return self.members[self.offsets[row] : self.offsets[row + 1]]

    def members_of(self, rows: np.ndarray) -> np.ndarray:
        """Numbers of the documents in several rows."""
        return np.concatenate([self._members(row) for row in rows])

    def piece(self, rows: np.ndarray) -> Piece:
        """The documents of several rows; at least one row."""
        members, mismatched = self.members_of(rows), None
        counts = self.offsets[rows + 1] - self.offsets[rows]
        if (other := self.mismatched) is not None:
            values = None if other.reference is None else other.reference[members]
            mismatched = Piece(other.documents, members, counts, values)
        reference = None if self.reference is None else self.reference[members]
        return Piece(self.documents, members, counts, reference, mismatched)

    def _scored(
        self,
        members: list[np.ndarray],
        content: list[_Row],
        micro_batch: MicroBatch,
        predicted_from: np.ndarray,
        scales: Scales,
    ) -> ScoredDocuments:
        """The documents of a micro-batch, for objectives that compare them.

        Args:
            members: numbers of the documents in each row of the micro-batch.
            content: its rows.
            micro_batch: its tensors.
            predicted_from: `[labels]` flat index in the full rows of the token that predicts each label, or is scored.
            scales: factors of the global batch.
        """
        import torch

        width = micro_batch.slots // max(len(content), 1)
        starts = [line * width + before for line, (_, _, lengths) in enumerate(content)
                  for before in np.cumsum([0, *lengths[:-1]]).tolist()]  # fmt: skip
        numbers = np.concatenate(members) if members else np.zeros(0, dtype=np.int32)
        of_label = np.searchsorted(np.array(starts, dtype=np.int64), predicted_from, side="right") - 1
        reference = None if self.reference is None else torch.from_numpy(self.reference[numbers])
        tokens = torch.from_numpy(self.documents.trained[numbers].astype(np.float32))
        desirable = None if self.desirable is None else torch.from_numpy(self.desirable[numbers])
        columns = {name: torch.from_numpy(values[numbers]) for name, values in self.columns.items()}
        labels = torch.from_numpy(of_label)
        scored = ScoredDocuments(labels, tokens, reference, scales, numbers, desirable, columns=columns)
        if not isinstance(self.documents, Rollouts):
            return scored
        rollouts = self.documents

        def of_labels(values: TokenValues) -> torch.Tensor:
            in_rows = np.zeros(micro_batch.slots, dtype=np.float32)
            for line, in_row in enumerate(members):
                of_row = values.of(in_row)
                in_rows[line * width : line * width + len(of_row)] = of_row
            return torch.from_numpy(in_rows[predicted_from + 1])

        return replace(
            scored, advantages=torch.from_numpy(rollouts.advantages[numbers]), sampled=of_labels(rollouts.sampled),
            old=None if rollouts.old is None else of_labels(rollouts.old), is_fresh=rollouts.is_fresh,
        )  # fmt: skip

    def _sources(self, members: list[np.ndarray], micro_batch: MicroBatch, predicted_from: np.ndarray) -> LabelSources:
        """The source in a mix of each label of a micro-batch; the arguments are those of `_top_tokens`."""
        import torch

        assert self.mix is not None
        assert isinstance(self.documents, MixedSet | GatheredSet)
        firsts = [int(in_row[0]) for in_row in members]
        of_rows = np.searchsorted(self.documents.bounds, firsts, side="right") - 1
        of_labels = of_rows[predicted_from // (micro_batch.slots // max(len(members), 1))]
        return LabelSources(torch.from_numpy(of_labels), len(self.mix.sources))

    def _top_tokens(self, members: list[np.ndarray], micro_batch: MicroBatch, predicted_from: np.ndarray) -> TopTokens:
        """What the recorded teacher predicts at the labels of a micro-batch.

        Args:
            members: numbers of the documents in each row of the micro-batch.
            micro_batch: its tensors.
            predicted_from: `[labels]` flat index in the full rows of the token that predicts each label.
        """
        import torch

        assert self.teacher is not None
        width = micro_batch.slots // max(len(members), 1)
        in_rows = np.zeros(micro_batch.slots, dtype=np.int64)  # number of each label in the recording
        for line, in_row in enumerate(members):
            at = line * width
            for number in in_row.tolist():
                trained = np.flatnonzero(self.documents.document(number)[1])
                in_rows[at + trained] = self.teacher.starts[number] + np.arange(len(trained))
                at += int(self.documents.lengths[number])
        ids, log_probs = values_of_labels(self.teacher, in_rows[predicted_from + 1])
        return TopTokens(torch.from_numpy(ids), torch.from_numpy(log_probs), self.teacher.recording.vocab_size)

    def _contents(self, members: list[np.ndarray]) -> list[_Row]:
        """The contents of rows with the given documents."""
        if not members:
            return []
        together = np.concatenate(members)
        tokens, mask = self.documents.gather(together)
        lengths = self.documents.lengths[together].tolist()
        # The documents of all rows were read in one go; cut their tokens apart again.
        contents, start, first = [], 0, 0
        for in_row in members:
            row_lengths = lengths[first : first + len(in_row)]
            span = slice(start, start + sum(row_lengths))
            contents.append((tokens[span], mask[span], row_lengths))
            start, first = span.stop, first + len(in_row)
        return contents

    def _micro_batch(self, content: list[_Row]) -> tuple[MicroBatch, np.ndarray]:
        """The tensors of rows, and the flat index in the full rows of each token that predicts a label or is scored."""
        import torch

        filled = [len(tokens) for tokens, _, _ in content]
        width = self.shard.padded(self.fixed_length or max(filled, default=1))
        ids, trained, borders = self._lay_out(content, width)
        # Positions restart at each document; its first token is never a label.
        starts = np.array(borders)
        firsts, mask = starts[:-1], trained.reshape(-1)
        mask[firsts] = False  # nothing predicts the first token of a document
        position_ids = (np.arange(ids.size) - firsts.repeat(starts[1:] - firsts)).reshape(ids.shape)
        if self.packing:  # the padding of a row may be longer than any document, and than the model's maximum position
            position_ids = np.minimum(position_ids, max((max(lengths) for _, _, lengths in content), default=1) - 1)
        real = np.arange(width) < np.array(filled or [0])[:, None]  # padding is at the end of each row
        documents = DocumentLayout.of(starts, len(ids)) if self.packing else None
        # Labels come from full rows; the inputs are cut to this rank's shard.
        pooled = self.objective.scalar_head
        chosen = _ends(content, width) if pooled else mask.nonzero()[0] - 1
        *arrays, chosen = self._split(ids, position_ids, real, chosen)
        labels = ids.reshape(-1)[chosen if pooled else chosen + 1]
        tensors = (torch.from_numpy(np.ascontiguousarray(array)) for array in (*arrays, labels))
        local_ids, local_position_ids, local_real, positions, local_labels = tensors
        micro_batch = MicroBatch(
            local_ids, local_position_ids, documents, positions, local_labels, local_real, sum(filled), ids.size
        )
        return micro_batch, chosen

    def _lay_out(self, content: list[_Row], width: int) -> tuple[np.ndarray, np.ndarray, list[int]]:
        """Ids and mask `[batch, width]`, and where in the flattened batch each document starts, with the end.

        The padding of a row is a document of its own. It repeats the row's last token: a model may have no embedding of
        a token for padding, or one of zeros, whose gradient is not a number where a norm divides by it (Gemma 3n).
        Rows and documents are only tens: lists are faster than arrays.
        """
        shape = (max(len(content), 1), width)
        ids, trained = np.empty(shape, dtype=np.int64), np.zeros(shape, dtype=bool)
        borders: list[int] = [] if content else [0]
        if not content:
            ids[:] = self._any_token()
        for line, (tokens, mask, lengths) in enumerate(content):
            ids[line, : len(tokens)], ids[line, len(tokens) :] = tokens, tokens[-1]
            trained[line, : len(tokens)] = mask
            at = line * width
            for length in lengths:
                borders.append(at)
                at += length
            if len(tokens) < width:
                borders.append(at)
        return ids, trained, [*borders, ids.size]

    def _any_token(self) -> int:
        """A token of the data, for rows of weight zero."""
        if self._filler is None:
            self._filler = int(self.documents.gather(self.members[:1])[0][0])
        return self._filler

    def _split(
        self, ids: np.ndarray, position_ids: np.ndarray, real: np.ndarray, chosen: np.ndarray
    ) -> tuple[np.ndarray, ...]:
        """This rank's shard of full rows: the arrays, and flat indices of its chosen tokens, in the shard and the rows.

        Args:
            ids, position_ids, real: `[batch, width]`.
            chosen: `[labels]` flat indices of the tokens that predict a label, or are scored.
        """
        if self.shard.count == 1:
            return ids, position_ids, real, chosen, chosen
        # A label belongs to the rank that holds the preceding token, which predicts it, even if the label itself is in
        # the shard of another rank.
        width, columns = ids.shape[1], self.shard.columns(ids.shape[1])
        local_column = np.full(width, -1)
        local_column[columns] = np.arange(len(columns))
        row, column = np.divmod(chosen, width)
        local = local_column[column] >= 0
        positions = (row * len(columns) + local_column[column])[local]
        return ids[:, columns], position_ids[:, columns], real[:, columns], positions, chosen[local]


def _pack_each(
    lengths: np.ndarray, bounds: tuple[int, ...], max_length: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Packs the examples of each source among themselves.

    Args:
        lengths: `[examples]` tokens of each.
        bounds: the first example of each source, and the end.
        max_length: capacity of a row, in tokens.

    Returns:
        Examples, row after row; where each row starts among them, and the end; the first row of each source, and the
        end.
    """
    if len(bounds) == 2:
        packed = pack(lengths, max_length)
        return packed.documents, packed.offsets, np.array([0, len(packed)])
    each = [pack(lengths[start:end], max_length) for start, end in pairwise(bounds)]
    members = [packed.documents + np.int32(start) for packed, start in zip(each, bounds, strict=False)]
    starts = [packed.offsets[:-1] + start for packed, start in zip(each, bounds, strict=False)]
    return np.concatenate(members), np.concatenate([*starts, bounds[-1:]]), np.cumsum([0, *map(len, each)])


def _ends(content: list[_Row], width: int) -> np.ndarray:
    """`[documents]` flat index of the last token of each document in rows of this width."""
    ends = [line * width + np.cumsum(lengths) - 1 for line, (_, _, lengths) in enumerate(content)]
    return np.concatenate([np.zeros(0, dtype=np.int64), *ends])
