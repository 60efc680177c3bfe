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
        documents: `[documents]` int32, document numbers, row after row, each exactly once.
        offsets: `[rows + 1]` int64, where each row starts in `documents`, and the end of the last.
        max_length: Capacity of a row, in tokens.
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
        """Fraction of token slots that hold a token, from 0 to 1 (1.0 if there are no rows)."""
        return self.tokens / (len(self) * self.max_length) if len(self) else 1.0


def pack(lengths: npt.ArrayLike, max_length: int) -> PackedRows:
    """Packs documents into rows of `max_length` tokens by best-fit-decreasing.

    Longest documents first, each into the fullest row that still has room. Documents of the same length are placed
    together, so the cost grows with the number of distinct lengths, not with the number of documents.

    Args:
        lengths: Tokens of each document, from 1 to `max_length`.
        max_length: Capacity of a row, in tokens.

    Returns:
        The rows; deterministic, on every machine.

    Raises:
        ValueError: if a document is empty or longer than a row.
    """
    sizes = np.asarray(lengths, dtype=np.int64)
    if sizes.size and (sizes.min() < 1 or sizes.max() > max_length):
        raise ValueError(f"lengths go from {sizes.min()} to {sizes.max()}; each must be from 1 to {max_length} tokens")
    # Sort by the room that a document leaves in an empty row (longest first), assign rows, then group by row. Arrays
    # are narrow and deleted early, because packing sets a run's peak host memory.
    room = np.empty(len(sizes), dtype=np.min_scalar_type(max_length))
    np.subtract(max_length, sizes, out=room, casting="unsafe")
    longest_first, _ = _by_key(room, max_length)
    row_of, rows = _best_fit(room[longest_first], max_length)
    del room
    by_row, counts = _by_key(row_of, rows)
    del row_of
    offsets = np.zeros(rows + 1, dtype=np.int64)
    np.cumsum(counts, out=offsets[1:])
    return PackedRows(longest_first[by_row], offsets, max_length, int(sizes.sum()))


def _by_key(keys: npt.NDArray[Any], count: int) -> tuple[IntArray, npt.NDArray[np.int64]]:
    """Stable `argsort` of keys in `[0, count)`, and the count of each key; sorts an eighth of them at a time.

    Sorting all at once would take four times the memory of the result, and packing sets a run's peak host memory.
    """
    order: IntArray = np.empty(len(keys), dtype=np.int32)
    block = max(_BLOCK, -(-len(keys) // 8))
    starts = range(0, len(keys), block)
    counts = np.zeros(count, dtype=np.int64)
    for start in starts:
        counts += np.bincount(keys[start : start + block], minlength=count)
    # Counting sort: place the items of each block, sorted, after those of earlier blocks with the same key.
    next_index = np.cumsum(counts) - counts  # where the next item with each key goes
    for start in starts:
        chunk = keys[start : start + block]
        inside = np.argsort(chunk, kind="stable")
        ordered = chunk[inside]
        among_equals = np.arange(len(chunk)) - np.searchsorted(ordered, ordered)
        order[next_index[ordered] + among_equals] = start + inside
        next_index += np.bincount(chunk, minlength=count)
    return order, counts


def _best_fit(room: npt.NDArray[Any], max_length: int) -> tuple[IntArray, int]:
    """The row of each document, and the number of rows.

    Args:
        room: `[documents]` tokens that each document leaves in an empty row, longest document first.
        max_length: Capacity of a row, in tokens.
    """
    row_of: IntArray = np.empty(len(room), dtype=np.int32)
    # Documents of equal length are adjacent; each such run is placed at once.
    starts = [0, *(np.flatnonzero(room[1:] != room[:-1]) + 1).tolist()] if len(room) else []
    open_rows = _OpenRows(max_length)
    for start, end in zip(starts, [*starts[1:], len(room)], strict=False):
        open_rows.fill(row_of, start, end, max_length - int(room[start]))
    return row_of, open_rows.rows


class _OpenRows:
    """Open rows, indexed by the room left in them."""

    def __init__(self, max_length: int):
        self.max_length = max_length
        self.rows = 0
        self.by_room: dict[int, list[int]] = {}
        self.rooms = 0  # bit r is set if a row has room r: the tightest fit is the lowest set bit from `size` up

    def fill(self, row_of: IntArray, start: int, end: int, size: int) -> None:
        """Places documents `start` to `end`, all of `size` tokens, where they fit tightest, opening rows as needed."""
        while start < end:
            # The tightest fit is the lowest set bit from `size` up; if there is none, open rows.
            fitting = self.rooms >> size
            room = size + (fitting & -fitting).bit_length() - 1 if fitting else self.max_length
            per_row = room // size
            wanted = -(-(end - start) // per_row)
            chosen = self._take(room, wanted) if fitting else self._open(wanted)
            # A row that took one document is now the tightest fit for the next of that size, so it is filled up first.
            taken = min(end - start, per_row * len(chosen))
            row_of[start : start + taken] = np.repeat(chosen, per_row)[:taken] if per_row > 1 else chosen
            start += taken
            # Put the rows back under their new room; the last one may not be full.
            in_last_row = taken - per_row * (len(chosen) - 1)
            self._put(room - per_row * size, chosen[:-1])
            self._put(room - in_last_row * size, chosen[-1:])

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
