"""What must hold between two plans, whatever the model, the batch and the hardware."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import app.plan.estimate
from app.plan.estimate import Row
from app.plan.hardware import GIB, ROOM, Hardware
from app.plan.scale import Shape, scale_config
from app.plan.search import Request, best_rows, fewest_gpus
from trainers.strategy.strategy import Strategy, load_strategy, strategy_names

ALL = [load_strategy(name) for name in strategy_names()]
SHARDED = ("fsdp1", "fsdp1_grad_op", "fsdp2", "zero2", "zero3")
FEW = settings(max_examples=4, deadline=None, database=None, derandomize=True)


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    heads = draw(st.sampled_from([8, 9, 16, 32, 64]))
    key_heads = draw(st.sampled_from([count for count in (1, 2, 4, 8) if heads % count == 0]))
    hidden = heads * draw(st.sampled_from([64, 128]))
    layers, width = draw(st.sampled_from([6, 16, 30, 80])), draw(st.sampled_from([2, 3, 4]))
    vocabulary = draw(st.sampled_from([32_000, 128_256]))
    return Shape("drawn", hidden, layers, heads, key_heads, width * hidden, vocabulary, draw(st.booleans()))


@st.composite
def requests(draw: st.DrawFn, most_gpus: int = 32) -> tuple[Shape, Request]:
    shape = draw(shapes())
    count = draw(st.sampled_from([count for count in (1, 2, 4, 6, 8, 16, 24, 32) if count <= most_gpus]))
    memory, host = draw(st.sampled_from([8, 24, 48, 80, 141])), draw(st.sampled_from([None, 64, 512, 4000]))
    hardware = Hardware("gpu", count, memory * GIB, is_local=False, machines=max(1, count // 8),
                        host=host and host * GIB)  # fmt: skip
    batch, rows = draw(st.sampled_from([(1, 1), (4, 2), (8, 8), (48, 1), (64, 4), (1024, 8)]))
    config = scale_config().model_copy(update={"global_batch_size": batch, "per_device_train_batch_size": rows})
    return shape, Request(config, hardware, shape.counted())


def rows_of(request: Request, strategies: Sequence[Strategy] = ALL) -> dict[str, Row]:
    return {row.strategy: row for row in best_rows(strategies, request)}


def on(request: Request, **changes: object) -> Request:
    return replace(request, hardware=replace(request.hardware, **changes))  # type: ignore[arg-type]


def lost(before: dict[str, Row], after: dict[str, Row]) -> list[str]:
    """The strategies that fitted before, and no longer do."""
    return [name for name, row in before.items() if row.fits and not after[name].fits]


@FEW
@given(requests())
def test_more_memory_loses_no_strategy(drawn: tuple[Shape, Request]) -> None:
    request = drawn[1]
    rows = rows_of(request)
    larger = rows_of(on(request, memory=1.5 * request.hardware.memory))
    assert lost(rows, larger) == []
    for name, row in rows.items():
        if row.sizes == larger[name].sizes:
            assert (row.largest or 0) <= (larger[name].largest or 0), name
    if request.hardware.host:
        assert lost(rows, rows_of(on(request, host=2 * request.hardware.host))) == []


@FEW
@given(requests(most_gpus=16))
def test_more_gpus_lose_no_strategy_and_take_no_more_of_each(drawn: tuple[Shape, Request]) -> None:
    """A strategy gets as many GPUs as it can use; one GPU is another case, as sharding over it is no sharding."""
    request = drawn[1]
    hardware = request.hardware
    assume(hardware.processes > 1)
    rows = rows_of(request)
    count = 2 * hardware.processes
    more = rows_of(on(request, processes=count, machines=max(1, count // 8)))
    assert lost(rows, more) == []
    for name in SHARDED:
        row, wider = rows[name], more[name]
        if row.sizes.world < wider.sizes.world and row.micro_batch == wider.micro_batch and wider.memory:
            assert wider.total <= 1.001 * row.total, name


@FEW
@given(requests())
def test_a_larger_model_fits_nowhere_else_and_takes_no_less(drawn: tuple[Shape, Request]) -> None:
    shape, request = drawn
    rows = rows_of(request)
    deeper = rows_of(replace(request, counted=replace(shape, layers=2 * shape.layers).counted()))
    wider = rows_of(replace(request, counted=replace(shape, inner=2 * shape.inner).counted()))
    for larger in (deeper, wider):
        # Twice as many layers can be divided into more stages.
        assert [name for name in lost(larger, rows) if "stages" not in str(rows[name].reason)] == []
        for name, row in rows.items():
            # DeepSpeed gathers whole layers up to a number of parameters, of which more small layers fill more evenly.
            if not name.startswith("zero3") and row.sizes == larger[name].sizes and row.memory and larger[name].memory:
                same = row.micro_batch == larger[name].micro_batch
                assert not same or larger[name].total >= row.total, name


@FEW
@given(requests(most_gpus=8))
def test_as_many_gpus_as_are_said_to_be_needed_are_enough(drawn: tuple[Shape, Request]) -> None:
    request = on(drawn[1], memory=24 * GIB)
    some = [strategy for strategy in ALL if strategy.name in ("single", "ddp", "fsdp2", "pp")]
    assume(not any(row.fits for row in rows_of(request, some).values()))
    needed = fewest_gpus(some, request)
    assume(needed is not None)
    assert needed
    row, batch = needed
    config = request.config.model_copy(update={"global_batch_size": batch})

    def on_gpus(count: int) -> dict[str, Row]:
        larger = on(replace(request, config=config), processes=count, machines=max(1, count // 8))
        return rows_of(larger, some)

    tried = [count for count in request.hardware.larger_counts() if count >= row.sizes.world]
    assert on_gpus(tried[0])[row.strategy].fits
    fewer = [count for count in request.hardware.larger_counts() if count < row.sizes.world]
    assert not any(row.fits for count in fewer[-1:] for row in on_gpus(count).values())


def test_a_model_that_refuses_all_gpus_gets_as_many_as_it_takes() -> None:
    """Four key-value heads: tp is 4 at most, and a batch of four rows lets no more than 16 GPUs work."""
    shape = Shape("four key-value heads", 2048, 80, 32, 4, 8192, 128_256)
    config = scale_config().model_copy(update={"global_batch_size": 4, "per_device_train_batch_size": 1})
    hardware = Hardware("gpu", 32, 80 * GIB, is_local=False, machines=4)
    row = rows_of(Request(config, hardware, shape.counted()))["tp"]
    assert (row.fits, row.sizes.world, row.sizes.tp) == (True, 16, 4)


def test_the_comparison_sees_a_plan_that_is_not_monotone(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = Shape("7B", 4096, 32, 32, 32, 11_008, 32_000)
    request = Request(scale_config(), Hardware("gpu", 8, 48 * GIB, is_local=False), shape.counted())
    rows = rows_of(request)
    monkeypatch.setitem(app.plan.estimate.ROOM, "gpu", ROOM["gpu"] / 3)  # as if more memory lost more of it
    assert "hsdp" in lost(rows, rows_of(on(request, memory=1.5 * request.hardware.memory)))
