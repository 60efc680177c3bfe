"""The documents of one batch, from the rows of several sets. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from trainers.config.mix import Mix
from trainers.data.cache import TokenSet
from trainers.data.report import Report


class Piece(NamedTuple):
    """Some rows of a set.

    Attributes:
        documents: the set: a `TokenSet`, or the mismatched documents of one.
        members: numbers of the documents in these rows, row after row.
        counts: `[rows]` how many of them each row has.
        reference: `[members]` log-probability of each under the initial model; None if there is no such.
        mismatched: the same of the mismatched documents of these rows; None if the objective compares none.
    """

    documents: Any
    members: npt.NDArray[np.integer]
    counts: npt.NDArray[np.int64]
    reference: npt.NDArray[np.float32] | None = None
    mismatched: Piece | None = None


class GatheredDocuments:
    """Documents of several sets, piece after piece.

    Args:
        pieces: the pieces; at least one.
        fingerprint: as for a `TokenSet`.

    `lengths` and `trained` are `[documents]` int64, as for a `TokenSet`.
    """

    def __init__(self, pieces: Sequence[Piece], fingerprint: str):
        self.pieces, self.fingerprint = pieces, fingerprint
        self._first = np.cumsum([0, *(len(piece.members) for piece in pieces)])
        self.lengths, self.trained = (self.values(name) for name in ("lengths", "trained"))

    def values(self, name: str) -> npt.NDArray[Any]:
        """`[documents, ...]` an attribute of the sets, of each document."""
        return np.concatenate([getattr(piece.documents, name)[piece.members] for piece in self.pieces])

    @property
    def reference(self) -> npt.NDArray[np.float32] | None:
        """`[documents]` log-probability of each under the initial model; None if there is no such."""
        values = [piece.reference for piece in self.pieces if piece.reference is not None]
        return np.concatenate(values) if len(values) == len(self.pieces) else None

    def document(self, index: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.bool_]]:
        """Token ids of a document, and the mask of trained tokens; read-only views."""
        documents, number = self.find(index)
        tokens, mask = documents.document(number)
        return tokens, mask

    def gather(self, indices: npt.NDArray[np.integer]) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.bool_]]:
        """Token ids of several documents, concatenated, and the mask of trained tokens; copies."""
        tokens, masks = zip(*map(self.document, indices.tolist()), strict=True)
        return np.concatenate(tokens), np.concatenate(masks)

    def where(self, index: int) -> str:
        """`file:line` of the row that a document comes from."""
        documents, number = self.find(index)
        return str(documents.where(number))

    def find(self, index: int) -> tuple[Any, int]:
        """The set of a document, and its number in it."""
        part = int(np.searchsorted(self._first, index, side="right")) - 1
        piece = self.pieces[part]
        return piece.documents, int(piece.members[index - self._first[part]])


class GatheredSet(GatheredDocuments, TokenSet):
    """The documents of a batch, which are in rows already.

    Args:
        sources: the pieces of each source, in the order of their rows; a source may have none.
        fingerprint: as for a `TokenSet`.
        mix: of which the sources are; None if it is a single one.

    `bounds` `[sources + 1]` is the first document of each source, and the end; `row_bounds` the same of rows, and
    `row_offsets` `[rows + 1]` where each row starts among the documents.
    """

    def __init__(self, sources: Sequence[Sequence[Piece]], fingerprint: str, mix: Mix | None = None):
        # It has no folder of its own.
        super().__init__([piece for pieces in sources for piece in pieces], fingerprint)
        self.report, self.mix = Report(), mix
        documents = [sum(len(piece.members) for piece in pieces) for pieces in sources]
        rows = [sum(len(piece.counts) for piece in pieces) for pieces in sources]
        self.bounds, self.row_bounds = np.cumsum([0, *documents]), np.cumsum([0, *rows])
        self.row_offsets = np.cumsum([0, *np.concatenate([piece.counts for piece in self.pieces]).tolist()])
        self.desirable, self.numbers, self.digests = map(self.values, ("desirable", "numbers", "digests"))

    @property
    def mismatched(self) -> GatheredDocuments:
        """The mismatched document of each document, as its window or its source has paired it."""
        pieces = [piece.mismatched for piece in self.pieces if piece.mismatched is not None]
        return GatheredDocuments(pieces, f"{self.fingerprint} mismatched")

    def largest_token_id(self) -> int:
        """The largest token id of all documents."""
        return max(int(self.document(index)[0].max()) for index in range(len(self)))

    def first_trained(self) -> npt.NDArray[np.int64]:
        """`[documents]` tokens before the first trained one of each document."""
        return np.array([self.document(index)[1].argmax() for index in range(len(self))], dtype=np.int64)

    def last_tokens(self) -> npt.NDArray[np.int32]:
        """`[documents]` last token of each document."""
        return np.array([self.document(index)[0][-1] for index in range(len(self))], dtype=np.int32)

    def columns(self, index: int) -> bytes:
        """The columns of a document that rewards read: a JSON object by role, or nothing."""
        documents, number = self.find(index)
        return bytes(documents.columns(number))
