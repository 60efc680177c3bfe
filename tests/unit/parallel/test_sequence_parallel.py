"""Attention over parts of rows on several ranks gives what whole rows on one give, and so do its gradients."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import distributed, multiprocessing

from trainers.config.mistakes import ConfigError
from trainers.data.layout import AttentionMetadata, DocumentLayout, SequenceShard
from trainers.model import attention
from trainers.parallel import sequence
from trainers.parallel.sequence import (
    ContextParallel,
    Ulysses,
    _causal,
    in_blocks,
    masked_blocks,
    pieces,
    refuse_unsplittable_rows,
)
from trainers.strategy.mesh import MeshSizes

LENGTH, ROWS, SIZE = 48, 2, 8
BORDERS = np.array([0, 5, 6, 29, 48, 48 + 17, 48 + 40, 96])
CASES: list[dict[str, Any]] = [
    {"packed": packed, "heads": heads, "keys": keys, **more}
    for packed in (True, False)
    for heads, keys, more in (
        (8, 4, {}),
        (4, 2, {}),  # fewer key heads than ranks, where there are four
        (4, 1, {"sliding_window": 7}),
        (4, 4, {"softcap": 5.0}),
    )
]


def outcome(case: dict[str, Any], way: Any, part: SequenceShard, dtype: torch.dtype) -> list[torch.Tensor]:
    """Output and gradients of query, key and value, of this part of the rows."""
    made = torch.Generator().manual_seed(3)
    heads, keys = case["heads"], case["keys"]
    whole = [torch.randn(ROWS, count, LENGTH, SIZE, generator=made, dtype=dtype) for count in (heads, keys, keys)]
    weights = torch.randn(ROWS, LENGTH, heads, SIZE, generator=made, dtype=dtype)
    columns = torch.from_numpy(part.columns(LENGTH))
    query, key, value = (one[:, :, columns].requires_grad_() for one in whole)
    metadata = AttentionMetadata(DocumentLayout.of(BORDERS, ROWS) if case["packed"] else None, way)
    rest = {name: case[name] for name in ("sliding_window", "softcap") if name in case}
    kernel = attention.eager if "softcap" in case else attention.documents
    module: Any = SimpleNamespace(training=True, num_key_value_groups=heads // keys)
    found, _ = attention.attention_function(kernel)(module, query, key, value, None, metadata, **rest)
    (found * weights[:, columns]).sum().backward()
    return [found.detach(), *(one.grad for one in (query, key, value))]


def on_a_rank(rank: int, world: int, folder: str, port: int) -> None:
    """Writes what this rank gets for every case and way."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", rank=rank, world_size=world)
    group = distributed.group.WORLD
    ways = {
        "sp": (Ulysses(group), SequenceShard(rank, world)),
        "cp": (ContextParallel(group), SequenceShard(rank, world, True)),
    }
    found = {
        (name, number): outcome(case, *way, torch.float64)
        for name, way in ways.items()
        for number, case in enumerate(CASES)
        if name == "cp" or case["heads"] % world == 0
    }
    with mock.patch.object(sequence, "LARGEST_MASK", 24):  # queries of long documents in blocks of one or two
        cp = ContextParallel(group), SequenceShard(rank, world, True)
        found |= {("cp in blocks", number): outcome(case, *cp, torch.float64) for number, case in enumerate(CASES)}
    torch.save(found, Path(folder) / f"{rank}.pt")
    distributed.barrier()
    distributed.destroy_process_group()


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Any]]:
    """What each of two, or four, ranks got."""
    folder, world = tmp_path_factory.mktemp("parts"), request.param
    more = {"nprocs": world, "start_method": "forkserver"}
    multiprocessing.start_processes(on_a_rank, (world, str(folder), free_port()), **more)
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(world)]


@pytest.mark.parametrize("name", ["sp", "cp", "cp in blocks"])
@pytest.mark.parametrize("number", range(len(CASES)))
def test_parts_of_rows_give_what_whole_rows_give(ranks: list[dict[Any, Any]], name: str, number: int) -> None:
    expected, world = outcome(CASES[number], None, SequenceShard(), torch.float64), len(ranks)
    for rank, found in enumerate(ranks):
        columns = torch.from_numpy(SequenceShard(rank, world, name != "sp").columns(LENGTH))
        for axis, mine, whole in zip((1, 2, 2, 2), found[name, number], expected, strict=True):
            close = 1e-5 if "softcap" in CASES[number] else 1e-12  # whose softmax is in fp32
            torch.testing.assert_close(mine, whole.index_select(axis, columns), rtol=close, atol=close)


def test_a_mask_ignored_at_a_border_would_be_seen() -> None:
    """Control: the same rows with one border moved by a token."""
    case, moved = CASES[0], BORDERS.copy()
    before = outcome(case, None, SequenceShard(), torch.float64)
    moved[3] += 1
    try:
        globals()["BORDERS"], kept = moved, BORDERS
        after = outcome(case, None, SequenceShard(), torch.float64)
    finally:
        globals()["BORDERS"] = kept
    assert all((one - other).abs().max() > 1e-3 for one, other in zip(before, after, strict=True))


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("zigzag", [False, True])
def test_parts_are_equal_and_make_up_the_row(count: int, zigzag: bool) -> None:
    parts = [SequenceShard(index, count, zigzag) for index in range(count)]
    width = parts[0].padded(37)
    assert 37 <= width < 37 + 2 * count
    columns = [part.columns(width) for part in parts]
    assert {len(one) for one in columns} == {width // count}
    assert sorted(np.concatenate(columns)) == list(range(width))


def test_zigzag_shares_out_causal_attention_evenly() -> None:
    def looks(part: SequenceShard) -> int:
        return sum(
            (one[1] - one[0]) * (one[2] + one[3])
            for one in (
                (start, stop, first, last) for start, stop, first, last in pieces([0, 64], part.spans(64), None)
            )
        )

    zigzag, plain = ([looks(SequenceShard(index, 4, way)) for index in range(4)] for way in (True, False))
    assert len(set(zigzag)) == 1
    assert max(plain) > 3 * min(plain)  # control


def test_pieces_are_queries_of_one_document_and_the_keys_they_may_see() -> None:
    spans = SequenceShard(1, 2, True).spans(16)  # columns 4 to 12
    assert spans == [(4, 8), (8, 12)]
    assert list(pieces([0, 6, 16], spans, None)) == [(0, 2, 0, 6), (2, 4, 6, 8), (4, 8, 6, 12)]
    assert list(pieces([0, 6, 16], spans, 3)) == [(0, 2, 2, 6), (2, 4, 6, 8), (4, 8, 6, 12)]


@pytest.mark.parametrize("window", [None, 5])
def test_blocks_have_small_masks_and_every_query_and_key_of_their_piece(
    window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    piece = (4, 20, 0 if window is None else 12, 32)
    before = _causal(16, 20 if window else 32, window, torch.device("cpu"))
    assert list(in_blocks(piece, window)) == [piece], "the control: a mask that is small enough"
    monkeypatch.setattr(sequence, "LARGEST_MASK", 100)
    blocks = list(in_blocks(piece, window))
    assert len(blocks) > 3
    assert before is not None
    rebuilt = torch.zeros_like(before)
    for start, stop, first, last in blocks:
        assert (stop - start) * (last - first) <= 100
        allowed = _causal(stop - start, last - first, window, torch.device("cpu"))
        seen = rebuilt[start - 4 : stop - 4, first - piece[2] : last - piece[2]]
        seen |= torch.ones_like(seen).tril() if allowed is None else allowed
    assert torch.equal(rebuilt, before)
    assert list(in_blocks((0, 64, 0, 64), None)) == [(0, 64, 0, 64)], "a triangle needs no mask"


@pytest.mark.parametrize(
    ("shape", "part"),
    [
        ({"layer_types": ["full_attention", "linear_attention"]}, "linear_attention layers, which carry state"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "chooses its rotary frequencies"),
        ({"num_attention_heads": 6}, "sp=4 does not divide the 6 attention heads"),
    ],
)
def test_models_whose_rows_cannot_be_cut_are_refused(shape: dict[str, Any], part: str) -> None:
    fitting = {"model_type": "x", "num_attention_heads": 8, "layer_types": ["full_attention", "sliding_attention"]}
    refuse_unsplittable_rows(SimpleNamespace(**fitting), MeshSizes(sp=4))
    with pytest.raises(ConfigError, match=part):
        refuse_unsplittable_rows(SimpleNamespace(**fitting | shape), MeshSizes(sp=4))
    refuse_unsplittable_rows(SimpleNamespace(**fitting | shape), MeshSizes(dp_shard=4))


@pytest.mark.parametrize("window", [None, 5])
def test_masks_of_blocks_are_views_of_one(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last 16 of 32 positions, in blocks that do not divide them evenly."""
    monkeypatch.setattr(sequence, "LARGEST_MASK", 100)
    device, piece = torch.device("cpu"), (0, 16, 12 if window else 0, 32)
    blocks = masked_blocks(piece, window, device)
    assert len(blocks) > 1
    masks = [allowed for _, allowed, _ in blocks if allowed is not None]
    assert len({mask.untyped_storage().data_ptr() for mask in masks}) == 1
    for (start, stop, first, last), allowed, _ in blocks:
        assert allowed is not None
        expected = _causal(stop - start, last - first, window, device)
        assert expected is not None
        assert torch.equal(allowed, expected)
    sizes = [(block[1] - block[0], block[3] - block[2]) for block, _, _ in blocks]
    shared = _causal(max(queries for queries, _ in sizes), max(keys for _, keys in sizes), window, device)
    assert shared is not None
    corners = [shared[:queries, :keys] for queries, keys in sizes]
    if window is None:  # with one, these blocks are equally large
        assert not all(map(torch.equal, corners, masks)), "control: from the upper left corner"
