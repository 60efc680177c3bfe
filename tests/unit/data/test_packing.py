"""Packing: every document once, no row too full, deterministic, close to the best possible."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainers.data.packing import PackedRows, pack

cases = st.integers(8, 200).flatmap(lambda room: st.tuples(st.just(room), st.lists(st.integers(1, room), max_size=200)))


def faults(packed: PackedRows, lengths: np.ndarray, room: int) -> list[str]:
    """What is wrong with a packing."""
    found = []
    if sorted(packed.documents.tolist()) != list(range(len(lengths))):
        found.append("documents")
    rows = [packed.row(index) for index in range(len(packed))]
    if any(len(row) == 0 or lengths[row].sum() > room for row in rows):
        found.append("rows")
    if len(packed) and packed.efficiency != pytest.approx(lengths.sum() / (room * len(packed))):
        found.append("efficiency")
    return found


def slow_best_fit(lengths: list[int], room: int) -> int:
    """The number of rows of best-fit-decreasing, written as its definition."""
    rooms: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [index for index, left in enumerate(rooms) if left >= length]
        if fitting:
            rooms[min(fitting, key=lambda index: rooms[index])] -= length
        else:
            rooms.append(room - length)
    return len(rooms)


@settings(max_examples=200, deadline=None)
@given(cases)
def test_each_document_once_and_no_row_too_full(case):
    room, lengths = case
    assert faults(pack(lengths, room), np.array(lengths, dtype=np.int64), room) == []


@settings(max_examples=200, deadline=None)
@given(cases)
def test_it_is_best_fit_decreasing_and_within_its_bound(case):
    room, lengths = case
    rows = len(pack(lengths, room))
    assert rows == slow_best_fit(lengths, room)
    least = -(-sum(lengths) // room)
    assert rows <= max(1, 2 * least) or not lengths


@settings(max_examples=50, deadline=None)
@given(cases)
def test_the_same_lengths_give_the_same_rows(case):
    room, lengths = case
    one, two = pack(lengths, room), pack(np.array(lengths, dtype=np.int32), room)
    assert one.documents.tolist() == two.documents.tolist()
    assert one.offsets.tolist() == two.offsets.tolist()


def test_the_check_finds_a_wrong_packing():
    lengths = np.array([4, 4, 4])
    good = pack(lengths, 8)
    lost = PackedRows(np.array([0, 1, 1]), good.offsets, 8, 12)
    full = PackedRows(good.documents, np.array([0, 3]), 8, 12)
    assert faults(good, lengths, 8) == []
    assert "documents" in faults(lost, lengths, 8)
    assert "rows" in faults(full, lengths, 8)


def test_no_document_and_one_that_fills_a_row():
    assert len(pack([], 8)) == 0
    assert pack([], 8).efficiency == 1.0
    assert pack([8, 8], 8).efficiency == 1.0


@pytest.mark.parametrize("lengths", [[0, 3], [9], [-1]])
def test_a_length_that_fits_no_row_is_refused(lengths):
    with pytest.raises(ValueError, match="from 1 to 8 tokens"):
        pack(lengths, 8)


def test_many_documents_are_packed_tight():
    lengths = np.random.default_rng(0).integers(1, 513, 200_000)
    packed = pack(lengths, 1024)
    assert faults(packed, lengths, 1024) == []
    assert packed.efficiency > 0.999
