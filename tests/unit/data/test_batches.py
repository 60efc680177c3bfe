"""The batch of a step is a pure function of data, seed and step, cut across ranks so that no row is lost or doubled."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainers.config.mistakes import ConfigError
from trainers.config.validation import build
from trainers.data.batches import TrainPlan, evaluation_batches
from trainers.data.rows import Rows


@dataclass
class FakeDocuments:
    """Documents in memory: token = 1000 * document + place, every token but the first trained."""

    lengths: np.ndarray
    fingerprint: str = "x"
    trained: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self.trained = self.lengths - 1

    def document(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        tokens = np.arange(self.lengths[index], dtype=np.int32) + 1000 * index
        return tokens, np.ones(len(tokens), dtype=bool)

    def gather(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        tokens, masks = zip(*(self.document(int(index)) for index in indices), strict=True)
        return np.concatenate(tokens), np.concatenate(masks)

    def where(self, index: int) -> str:
        return f"memory:{index + 1}"


def plan(lengths: list[int], world: int, packing: bool = False, **changes: Any) -> TrainPlan:
    options = {"global_batch_size": 8, "per_device_train_batch_size": 2, "num_train_epochs": 2, "max_length": 64}
    config = build({"model_name_or_path": "x", "dataset_name": "x", "packing": packing} | options | changes)
    rows = Rows(FakeDocuments(np.array(lengths)), config.max_length, packing)
    return TrainPlan(rows, config, world)


def labels_of_step(one: TrainPlan, step: int) -> list[int]:
    parts = [micro.labels for rank in range(one.world) for micro in one.batch(step, rank).micro_batches]
    return sorted(torch.cat(parts).tolist())


# Packed, too, they fill the four rows of a global batch.
lengths_strategy = st.lists(st.integers(2, 40), min_size=40, max_size=90).filter(lambda lengths: sum(lengths) > 3 * 64)


@settings(max_examples=25, deadline=None)
@given(lengths_strategy, st.booleans(), st.booleans())
def test_each_epoch_trains_every_token_once_on_any_number_of_ranks(
    lengths: list[int], packing: bool, grouped: bool
) -> None:
    plans = [plan(lengths, world, packing, group_by_length=grouped, global_batch_size=4) for world in (1, 2)]
    for epoch in range(2):
        steps = range(epoch * plans[0].steps_per_epoch, (epoch + 1) * plans[0].steps_per_epoch)
        for one in plans:
            seen = sorted(label for step in steps for label in labels_of_step(one, step))
            assert seen == sorted(1000 * doc + at for doc, size in enumerate(lengths) for at in range(1, size))
        for step in steps:
            assert labels_of_step(plans[0], step) == labels_of_step(plans[1], step)


def test_every_rank_makes_as_many_passes_in_a_partial_batch() -> None:
    one = plan([5] * 9, world=2)
    last = [one.batch(1, rank) for rank in range(2)]
    assert [len(batch.micro_batches) for batch in last] == [2, 2]
    assert [batch.trained_tokens for batch in last] == [4, 4]
    assert sum(micro.tokens for batch in last for micro in batch.micro_batches) == 5
    assert len(one.rows_of(1)) == 1


def test_the_divisor_is_the_count_of_the_whole_global_batch() -> None:
    one = plan(list(range(2, 42)), world=4)
    for step in range(one.total_steps):
        batches = [one.batch(step, rank) for rank in range(4)]
        counted = sum(len(micro.labels) for batch in batches for micro in batch.micro_batches)
        assert {batch.trained_tokens for batch in batches} == {counted}


def test_the_order_depends_on_seed_and_epoch_alone() -> None:
    first, again, other = plan([5] * 64, 1), plan([5] * 64, 1), plan([5] * 64, 1, seed=7)
    orders = [[one.rows_of(step).tolist() for step in range(16)] for one in (first, again, other)]
    assert orders[0] == orders[1]
    assert orders[0] != orders[2]
    assert orders[0][:8] != orders[0][8:]
    assert first.rows_of(3).tolist() == orders[0][3]  # asked out of order


def test_length_grouping_saves_padding() -> None:
    rng = np.random.default_rng(0)
    lengths = np.exp(rng.normal(3, 0.6, 800)).astype(int).clip(2, 60).tolist()

    def padding(grouped: bool) -> float:
        one = plan(lengths, 1, group_by_length=grouped, num_train_epochs=1)
        micro = [micro for step in range(one.total_steps) for micro in one.batch(step, 0).micro_batches]
        return 1 - sum(part.tokens for part in micro) / sum(part.slots for part in micro)

    assert padding(True) < padding(False) / 3


def test_packed_rows_restart_positions_and_predict_only_within_a_document() -> None:
    one = plan([10, 20, 30, 7, 50, 64, 3, 9, 12, 40, 33, 21] * 2, 1, packing=True, global_batch_size=2)
    for micro in one.batch(0, 0).micro_batches:
        assert micro.documents is not None
        flat, place = micro.input_ids.reshape(-1), micro.position_ids.reshape(-1)
        assert torch.equal(flat[micro.positions + 1], micro.labels)
        assert torch.equal(flat[micro.positions] // 1000, micro.labels // 1000)
        real = micro.real.reshape(-1)
        assert torch.equal(place[real], flat[real] % 1000)
        borders = micro.documents.borders
        assert set(place[borders[:-1].long()].tolist()) == {0}
        assert len(borders) - 1 == int((place == 0).sum()), "every document, and the padding of each row, is one"


def test_padding_has_no_position_that_no_document_has() -> None:
    """A model may have positions for its longest document and not for a row."""
    (micro,) = plan([30, 30, 5], 1, packing=True, global_batch_size=2).batch(0, 0).micro_batches
    assert micro.slots - micro.tokens > 30, "control: the padding is longer"
    assert int(micro.position_ids.max()) == 29


@pytest.mark.parametrize("packing", [True, False])
def test_padding_repeats_the_last_token_of_its_row(packing: bool) -> None:
    """The model has an embedding for it, which training fills; a token for padding may have none, or zeros."""
    sizes = {"global_batch_size": 3, "per_device_train_batch_size": 3, "max_length": 40}
    (micro,) = plan([30, 20, 25], 1, packing, **sizes).batch(0, 0).micro_batches
    assert not micro.real.all(), "control: there is padding"
    for ids, real in zip(micro.input_ids, micro.real, strict=True):
        assert set(ids[~real].tolist()) <= {int(ids[real][-1])}


def test_a_row_of_weight_zero_has_a_token_of_the_data() -> None:
    """A model's token 0 may be the one for padding, of zeros."""
    rows = Rows(FakeDocuments(np.array([3, 4])), 64, packing=False)
    rows.documents.document = lambda index: (np.array([7 + index, 8]), np.ones(2, dtype=bool))  # type: ignore[method-assign]
    micro = rows.collate(np.array([], dtype=int))
    assert micro.input_ids.tolist() == [[7]]
    assert not len(micro.labels)
    assert not micro.real.any()


def test_data_smaller_than_a_global_batch_is_refused_with_the_way_out() -> None:
    with pytest.raises(ConfigError, match=r"global_batch_size=8 is larger than the data: 1 packed rows of 9 documents"):
        plan([5] * 9, 1, packing=True)
    with pytest.raises(ConfigError, match=r"; use global_batch_size=2$"):
        plan([5] * 3, 1)
    with pytest.raises(ConfigError, match=r"; use global_batch_size=2 with per_device_train_batch_size=1$"):
        plan([5] * 3, 2)


@given(st.integers(1, 40), st.integers(1, 4), st.integers(1, 5))
@settings(max_examples=40, deadline=None)
def test_evaluation_sees_every_row_once(count: int, world: int, size: int) -> None:
    rows = Rows(FakeDocuments(np.full(count, 6)), 64, False)
    per_rank = [list(evaluation_batches(rows, size, rank, world)) for rank in range(world)]
    assert len({len(batches) for batches in per_rank}) == 1
    labels = torch.cat([micro.labels for batches in per_rank for micro in batches]).tolist()
    assert sorted(labels) == sorted(1000 * doc + at for doc in range(count) for at in range(1, 6))
