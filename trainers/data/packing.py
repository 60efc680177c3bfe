"""Packing: which documents share a row of `max_length` tokens. Best-fit-decreasing, deterministic. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int32]  # half the memory of int64, and two milliards of documents


@dataclass(frozen=True)
class PackedRows:
    """Rows of documents, flat: row `r` holds `documents[offsets[r]:offsets[r + 1]]`.

    Attributes:
        documents: Document numbers, row after row, each exactly once; int32.
        offsets: Where each row starts in `documents`, and the end of the last; int64, rows + 1.
        max_length: Room of a row, in tokens.
        tokens: Tokens of all documents.
    """

    documents: IntArray
    offsets: npt.NDArray[np.int64]
    max_length: int
    tokens: int

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def row(self, index: int) -> IntArray:
        """The documents of one row, longest first."""
        return self.documents[self.offsets[index] : self.offsets[index + 1]]

    @property
    def efficiency(self) -> float:
        """Share of the rows' slots that hold a token, between 0 and 1 (1.0 when there is no row)."""
        return self.tokens / (len(self) * self.max_length) if len(self) else 1.0


def pack(lengths: npt.ArrayLike, max_length: int) -> PackedRows:
    """Puts documents into as few rows of `max_length` tokens as best-fit-decreasing finds.

    Longest documents first, each into the fullest row that still has room. Documents of one length are placed
    together, so the cost grows with the number of different lengths and not with that of documents.

    Args:
        lengths: Tokens of each document, from 1 to `max_length`.
        max_length: Room of a row, in tokens.

    Returns:
        The rows; the same for the same lengths, on every machine.

    Raises:
        ValueError: when a document is empty or longer than a row.
    """
    given = np.asarray(lengths, dtype=np.int64)
    if given.size and (given.min() < 1 or given.max() > max_length):
        raise ValueError(f"lengths go from {given.min()} to {given.max()}; each must be from 1 to {max_length} tokens")
    # Sorted as the smallest numbers that hold them: the least memory, and two bytes are sorted by counting.
    shorter = np.empty(len(given), dtype=np.min_scalar_type(max_length))
    np.subtract(max_length, given, out=shorter, casting="unsafe")
    order = np.argsort(shorter, kind="stable").astype(np.int32)
    row_of, rows = _best_fit(max_length - shorter[order].astype(np.int32), max_length)
    del shorter
    by_row = np.argsort(row_of, kind="stable").astype(np.int32)
    offsets = np.zeros(rows + 1, dtype=np.int64)
    np.cumsum(np.bincount(row_of, minlength=rows), out=offsets[1:])
    return PackedRows(order[by_row], offsets, max_length, int(given.sum()))


def _best_fit(sizes: IntArray, max_length: int) -> tuple[IntArray, int]:
    """The row of each document (given longest first), and the number of rows."""
    row_of = np.empty(len(sizes), dtype=np.int32)
    starts = np.flatnonzero(np.diff(sizes, prepend=-1))
    ends = np.append(starts[1:], len(sizes))[: len(starts)]
    shelf = _Shelf(max_length)
    for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
        shelf.place(row_of, start, end, int(sizes[start]))
    return row_of, shelf.rows


class _Shelf:
    """Rows by the room left in them."""

    def __init__(self, max_length: int):
        self.max_length = max_length
        self.rows = 0
        self.by_room: dict[int, list[int]] = {}
        self.rooms = 0  # bit r is set when some row has room r: the tightest fit is the lowest bit from the size on

    def place(self, row_of: IntArray, start: int, end: int, size: int) -> None:
        """Puts documents `start` to `end`, all of one size, where they fit tightest; new rows take the rest."""
        while start < end:
            fitting = self.rooms >> size
            room = size + (fitting & -fitting).bit_length() - 1 if fitting else self.max_length
            each = room // size
            wanted = -(-(end - start) // each)
            chosen = self._take(room, wanted) if fitting else self._open(wanted)
            # A row that took one document of this size is now the tightest fit for the next, so it is filled up first.
            taken = min(end - start, each * len(chosen))
            row_of[start : start + taken] = np.repeat(chosen, each)[:taken] if each > 1 else chosen
            start += taken
            rest = taken - each * (len(chosen) - 1)
            self._put(room - each * size, chosen[:-1])
            self._put(room - rest * size, chosen[-1:])

    def _open(self, count: int) -> list[int]:
        self.rows += count
        return list(range(self.rows - count, self.rows))

    def _take(self, room: int, count: int) -> list[int]:
        rows = self.by_room[room]
        chosen, self.by_room[room] = rows[:count], rows[count:]
        if count >= len(rows):
            self.rooms &= ~(1 << room)
        return chosen

    def _put(self, room: int, rows: list[int]) -> None:
        if room and rows:
            self.by_room.setdefault(room, []).extend(rows)
            self.rooms |= 1 << room
