"""The mesh: its sizes, which of them go together, and every process's place."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest

from trainers.config.mistakes import ConfigError
from trainers.strategy.mesh import (
    APART,
    AXES,
    BACKENDS,
    MEANS,
    Mesh,
    MeshSizes,
    combination_mistakes,
    fitted,
    heads_mistake,
    matrix,
    size_option,
)


@pytest.mark.parametrize(
    ("asked", "processes", "expected"),
    [
        ({}, 1, MeshSizes()),
        ({"dp_shard": -1}, 8, MeshSizes(dp_shard=8)),
        ({"dp_replicate": 2, "dp_shard": -1, "cp": 2}, 16, MeshSizes(dp_replicate=2, dp_shard=4, cp=2)),
        ({"sp": 2, "dp_shard": 1}, 2, MeshSizes(sp=2)),
    ],
)
def test_sizes_that_fit(asked: dict[str, int], processes: int, expected: MeshSizes) -> None:
    assert fitted(asked, processes) == expected


@pytest.mark.parametrize(
    ("asked", "processes", "line"),
    [
        (
            {"dp_replicate": 2, "dp_shard": 3}, 4,
            "dp_replicate 2 x dp_shard 3 = 6, but num_processes=4; make them equal, or write -1 for one size, the rest",
        ),
        ({"dp_shard": -1, "cp": 3}, 8, "cp 3 = 3, but num_processes=8; use a multiple of that"),
        ({"dp_shard": -1, "cp": -1}, 8, "dp_shard and cp are both -1, the rest; write -1 once"),
        ({"sp": 0}, 2, "sp=0 is not a size; write at least 1, or -1 for the rest"),
        ({"sp": -2}, 2, "sp=-2 is not a size; write at least 1, or -1 for the rest"),
    ],
)  # fmt: skip
def test_sizes_that_do_not_fit_are_told_with_the_numbers(asked: dict[str, int], processes: int, line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        fitted(asked, processes)
    assert str(caught.value) == f"parallelism_config: {line}"


def test_what_goes_with_what_is_one_table() -> None:
    assert set(MEANS) == set(AXES)
    assert set().union(*BACKENDS.values()) <= set(AXES)
    for kind, axes in BACKENDS.items():
        for axis in AXES:
            found = combination_mistakes(kind, MeshSizes(**{axis: 2}))
            assert bool(found) == (axis not in axes)
            line = f"{size_option(axis)}=2 cannot be combined with distributed_type={kind}; use"
            assert all(str(mistake).startswith(line) for mistake in found)
    for pair in APART:
        assert len(combination_mistakes("FSDP", MeshSizes(**dict.fromkeys(pair, 2)))) == 1


def test_the_matrix_says_what_the_rules_say() -> None:
    head, _, *lines = matrix().splitlines()
    columns = [cell.strip().partition(" (")[0] for cell in head.strip("|").split("|")]
    for line in lines:
        axis, *cells = [cell.strip() for cell in line.strip("|").split("|")]
        for column, cell in zip(columns[1:], cells, strict=True):
            if column in BACKENDS:
                assert (cell == "yes") == (not combination_mistakes(column, MeshSizes(**{axis: 2})))
            elif column != axis:
                both = MeshSizes(**{axis: 2, column: 2})
                fits = any(not combination_mistakes(kind, both) for kind in BACKENDS)
                assert (cell == "yes") == fits
            else:
                assert cell == ""


def test_every_process_has_a_place_of_its_own_and_tensor_ranks_are_neighbours() -> None:
    sizes = MeshSizes(pp=2, dp_replicate=2, dp_shard=3, cp=2, tp=2)
    places = [tuple(Mesh(sizes, rank).index(axis) for axis in AXES) for rank in range(sizes.world)]
    assert places == list(product(*(range(size) for size in sizes.by_axis.values())))
    first, second = Mesh(sizes, 0), Mesh(sizes, 1)
    assert (first.index("tp"), second.index("tp")) == (0, 1)
    assert (first.data_rank, first.sequence_shard) == (second.data_rank, second.sequence_shard)
    assert first.contributes_loss != second.contributes_loss


def test_shares_of_the_batch_and_parts_of_rows_are_all_there() -> None:
    sizes = MeshSizes(dp_replicate=2, dp_shard=2, sp=3)
    shares = [(Mesh(sizes, rank).data_rank, Mesh(sizes, rank).sequence_shard) for rank in range(sizes.world)]
    assert sorted(shares) == list(product(range(4), range(3)))
    assert (sizes.data, sizes.sequence_shards, sizes.grad_group_size, sizes.world) == (4, 3, 12, 12)


def test_heads_that_do_not_divide_are_told_with_the_sizes_that_would() -> None:
    assert heads_mistake(MeshSizes(sp=3), 6, "llama") is None
    line = "sp=4 does not divide the 6 attention heads of llama; use 2, 3, 6, or cp"
    assert heads_mistake(MeshSizes(sp=4), 6, "llama") == line
    left = "sp=4 does not divide the 2 attention heads that tp=4 leaves a rank of llama; use 2, or cp"
    assert heads_mistake(MeshSizes(sp=4, tp=4), 8, "llama") == left


def test_the_docs_have_the_matrix_of_the_rules() -> None:
    page = Path(__file__).resolve().parents[3] / "docs" / "strategies.md"
    assert matrix() in page.read_text(encoding="utf-8")
