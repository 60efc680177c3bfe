"""Several sets of tokenised documents as one. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from trainers.data.cache import TokenSet
from trainers.data.report import Report


class JoinedSet(TokenSet):
    """The documents of several sets, set after set.

    Args:
        parts: the sets; at least one.
        fingerprint: as for a `TokenSet`.
        report: of all parts.
        packs_apart: whether documents share rows with documents of the same part only.

    `bounds` `[parts + 1]` is the first document of each part, and the end.
    """

    def __init__(self, parts: Sequence[TokenSet], fingerprint: str, report: Report, packs_apart: bool = False):
        # It has no folder of its own.
        self.parts, self.fingerprint, self.report, self.packs_apart = list(parts), fingerprint, report, packs_apart
        self.bounds = np.cumsum([0, *map(len, parts)])
        self.lengths = np.concatenate([part.lengths for part in parts])
        self.trained = np.concatenate([part.trained for part in parts])
        self.desirable = np.concatenate([part.desirable for part in parts])
        self.numbers = np.concatenate([part.numbers for part in parts])
        self.digests = np.concatenate([part.digests for part in parts])

    def largest_token_id(self) -> int:
        """The largest token id of all documents."""
        return max(part.largest_token_id() for part in self.parts)

    def document(self, index: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.bool_]]:
        """Token ids of a document, and the mask of trained tokens; read-only views."""
        part, local = self._find(index)
        return part.document(local)

    def gather(self, indices: npt.NDArray[np.integer]) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.bool_]]:
        """Token ids of several documents, concatenated, and the mask of trained tokens; copies."""
        tokens, masks = zip(*map(self.document, indices.tolist()), strict=True)
        return np.concatenate(tokens), np.concatenate(masks)

    def first_trained(self) -> npt.NDArray[np.int64]:
        """`[documents]` tokens before the first trained one of each document."""
        return np.concatenate([part.first_trained() for part in self.parts])

    def last_tokens(self) -> npt.NDArray[np.int32]:
        """`[documents]` last token of each document."""
        return np.concatenate([part.last_tokens() for part in self.parts])

    def columns(self, index: int) -> bytes:
        """The columns of a document that rewards read: a JSON object by role, or nothing."""
        part, local = self._find(index)
        return part.columns(local)

    def where(self, index: int) -> str:
        """`file:line` of the row that a document comes from."""
        part, local = self._find(index)
        return part.where(local)

    def _find(self, index: int) -> tuple[TokenSet, int]:
        part = int(np.searchsorted(self.bounds, index, side="right")) - 1
        return self.parts[part], int(index - self.bounds[part])
