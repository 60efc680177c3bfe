"""Packing: which documents share a row of `max_length` tokens. Best-fit-decreasing, deterministic. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

_BLOCK = 1 << 16
IntArray = npt.NDArray[np.int32]  # half the memory of int64, enough for 2 billion documents


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
    room = np.empty(len(given), dtype=np.min_scalar_type(max_length))  # that a document leaves in a row
    np.subtract(max_length, given, out=room, casting="unsafe")
    longest_first, _ = _by_key(room, max_length)
    row_of, rows = _best_fit(room[longest_first], max_length)
    del room
    by_row, counts = _by_key(row_of, rows)
    del row_of
    offsets = np.zeros(rows + 1, dtype=np.int64)
    np.cumsum(counts, out=offsets[1:])
    return PackedRows(longest_first[by_row], offsets, max_length, int(given.sum()))


def _by_key(keys: npt.NDArray[Any], count: int) -> tuple[IntArray, npt.NDArray[np.int64]]:
    """A stable `argsort` of keys below `count`, and how many there are of each; sorts an eighth at a time.

    All at once would take four times the memory of the result, and packing is where a run of many rows takes most.
    """
    order: IntArray = np.empty(len(keys), dtype=np.int32)
    block = max(_BLOCK, -(-len(keys) // 8))
    starts = range(0, len(keys), block)
    counts = np.zeros(count, dtype=np.int64)
    for start in starts:
        counts += np.bincount(keys[start : start + block], minlength=count)
    place = np.cumsum(counts) - counts  # of the next item with each key
    for start in starts:
        part = keys[start : start + block]
        inside = np.argsort(part, kind="stable")
        ordered = part[inside]
        among_equals = np.arange(len(part)) - np.searchsorted(ordered, ordered)
        order[place[ordered] + among_equals] = start + inside
        place += np.bincount(part, minlength=count)
    return order, counts


def _best_fit(room: npt.NDArray[Any], max_length: int) -> tuple[IntArray, int]:
    """The row of each document, given longest first by what it leaves of a row, and the number of rows."""
    row_of: IntArray = np.empty(len(room), dtype=np.int32)
    starts = [0, *(np.flatnonzero(room[1:] != room[:-1]) + 1).tolist()] if len(room) else []
    shelf = _Shelf(max_length)
    for start, end in zip(starts, [*starts[1:], len(room)], strict=False):
        shelf.place(row_of, start, end, max_length - int(room[start]))
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
