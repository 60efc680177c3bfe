"""The search for the best mesh: what it tries, what it prefers, and over which links it sends."""

from __future__ import annotations

import copy
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from transformers import AutoConfig

from app.launch.machines import MOST_MACHINES
from app.plan.advice import needed_line
from app.plan.cases import counted_case
from app.plan.estimate import Row, best_first, candidate, plan_row
from app.plan.hardware import GIB, Hardware
from app.plan.scale import SHAPES, Shape, scale_config
from app.plan.search import Request, best_row, best_rows, fewest_gpus
from app.plan.speed import link_speed
from trainers.strategy.mesh import MeshSizes
from trainers.strategy.strategy import load_strategy, strategy_names
from trainers.strategy.traffic import head_size, term

SEVEN, SEVENTY = (next(shape for shape in SHAPES if shape.name == name).counted() for name in ("7B", "70B"))
PLAIN = ("single", "ddp", "fsdp2", "hsdp", "tp", "fsdp2_tp", "pp", "3d", "fsdp2_offload")


def request(count: int, counted: dict[str, Any] = SEVEN, **values: Any) -> Request:
    own = {name: values.pop(name) for name in ("link", "machine_link", "memory") if name in values}
    gib = own.pop("memory", 80)
    hardware = Hardware("gpu", count, gib * GIB, is_local=False, machines=max(1, count // 8), **own)
    sizes = values.pop("sizes", {})
    return Request(scale_config().model_copy(update=values), hardware, counted, sizes)


def rows_of(asked: Request, *names: str) -> dict[str, Row]:
    return {row.strategy: row for row in best_rows([load_strategy(name) for name in names or PLAIN], asked)}


# -- the mesh --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [2, 6, 8, 64, 1024])
def test_every_mesh_divides(count: int) -> None:
    for name, row in rows_of(request(count), *strategy_names()).items():
        if row.seconds is None:
            assert row.reason, name
            continue
        sizes, own = row.sizes, load_strategy(name)
        assert row.micro_batch
        assert sizes.world <= count
        assert 32 % sizes.tp == 0
        assert sizes.tp <= 8, "inside a machine"
        assert sizes.pp <= 32
        assert 1024 % (sizes.data * row.micro_batch) == 0
        # A row has the axes of its strategy, and no others.
        assert (sizes.pp > 1) == (own.pp_size > 1)
        assert all((getattr(sizes, axis) > 1) == (own.mesh.get(axis, 1) > 1) for axis in ("cp", "sp", "tp"))


def test_64_gpus_get_the_mesh_that_is_best_and_not_that_of_the_file() -> None:
    """Slow links between machines: the sharding stays inside, 8 x 8. The file's 2 replicas would be slower."""
    asked = request(64, link=200.0, machine_link=1.0, per_device_train_batch_size=1, global_batch_size=64)
    assert rows_of(asked, "hsdp")["hsdp"].sizes == MeshSizes(dp_replicate=8, dp_shard=8)
    of_file = plan_row(*candidate(load_strategy("hsdp"), asked.config, asked.hardware), SEVEN, asked.hardware)
    assert of_file.sizes == MeshSizes(dp_replicate=2, dp_shard=32)
    assert (of_file.seconds or 0) > 1.2 * (rows_of(asked, "hsdp")["hsdp"].seconds or 0)


def test_three_axes_where_two_do_not_fit() -> None:
    small = rows_of(request(64, SEVENTY, memory=50, global_batch_size=64, per_device_train_batch_size=1))
    assert small["3d"].fits
    assert min(small["3d"].sizes.pp, small["3d"].sizes.dp_shard, small["3d"].sizes.tp) >= 2
    assert not small["fsdp2"].fits


def test_sizes_of_the_user_are_kept() -> None:
    rows = rows_of(request(8, sizes={"tp": 4}))
    assert {name: row.sizes.tp for name, row in rows.items() if row.seconds} == dict.fromkeys(
        ("ddp", "fsdp2", "tp", "fsdp2_tp", "pp", "fsdp2_offload"), 4
    )
    assert "tp_size=4 cannot be combined" in str(rows["single"].reason)
    assert "leaves" in str(rows["3d"].reason) or "nothing to shard" in str(rows["3d"].reason)


def test_tensor_parallelism_leaves_a_machine_only_if_nothing_else_fits() -> None:
    deep = copy.deepcopy(SEVENTY)
    inside = rows_of(request(16, deep, memory=400), "tp")["tp"]
    outside = rows_of(request(16, deep, memory=120), "tp")["tp"]
    assert inside.fits
    assert inside.sizes.tp <= 8
    assert outside.sizes.tp == 8 or outside.fits


def test_what_the_model_cannot_do_is_said() -> None:
    counted = copy.deepcopy(SEVEN)
    counted["limits"]["tp"] = dict.fromkeys(counted["limits"]["tp"], "no plan for it")
    row = best_row(load_strategy("tp"), request(8, counted))
    assert (row.seconds, row.reason) == (None, "no plan for it")


# -- the micro-batch -------------------------------------------------------------------------------------------------


def test_a_micro_batch_that_does_not_fit_is_made_smaller() -> None:
    row = rows_of(request(8, memory=26))["fsdp2"]
    assert row.fits
    assert row.micro_batch == row.largest == 4
    assert rows_of(request(8, memory=80))["fsdp2"].micro_batch == 8


@pytest.mark.parametrize("name", ["fsdp2", "pp", "tp"])
def test_the_largest_micro_batch_is_the_last_that_fits(name: str) -> None:
    asked = request(8)
    row = rows_of(asked, name)[name]
    assert row.largest
    own = {axis: size for axis, size in row.sizes.by_axis.items() if size > 1 and axis not in ("dp_shard",)}
    own.pop("dp_replicate", None)

    def at(size: int) -> Row:
        config = asked.config.model_copy(update={"per_device_train_batch_size": size})
        return plan_row(*candidate(load_strategy(name), config, asked.hardware, own), SEVEN, asked.hardware)

    assert at(row.largest).fits
    assert at(2 * row.largest).micro_batch != 2 * row.largest or not at(2 * row.largest).fits


# -- how many GPUs ---------------------------------------------------------------------------------------------------


def test_the_fewest_gpus_are_the_first_on_which_something_fits() -> None:
    strategies = [load_strategy(name) for name in ("single", "fsdp2", "fsdp2_tp")]
    asked = request(2, SEVENTY)
    assert not any(row.fits for row in best_rows(strategies, asked))
    found = fewest_gpus(strategies, asked)
    assert found
    row, batch = found
    assert (row.sizes.world, batch) == (32, 1024)
    assert not any(each.fits for each in best_rows(strategies, request(16, SEVENTY)))
    assert fewest_gpus([load_strategy("single")], asked) is None


def test_a_batch_that_is_too_small_for_them_grows() -> None:
    found = fewest_gpus([load_strategy("fsdp2")], request(2, SEVENTY, global_batch_size=4))
    assert found
    assert (found[0].sizes.world, found[1]) == (32, 32)


@pytest.mark.parametrize(("each", "expected"), [(6, 48), (10, 40), (12, 48), (20, 80)])
def test_machines_of_any_size_are_doubled(each: int, expected: int) -> None:
    hardware = replace(request(2, SEVENTY).hardware, processes=2 * each, machines=2)
    asked = replace(request(2, SEVENTY, global_batch_size=4), hardware=hardware)
    strategy = load_strategy("fsdp2")
    found = fewest_gpus([strategy], asked)
    assert found
    assert (found[0].sizes.world, found[1]) == (expected, expected)
    assert f"nothing fits; {expected} GPUs of 80.0 GiB would do with" in needed_line(found, asked.config, hardware)
    most = hardware.larger_counts()[-1]
    assert 512 < most <= 1024
    assert f"not even on {most} GPUs" in needed_line(None, asked.config, hardware)


def test_more_gpus_are_tried_in_a_machine_then_in_machines_that_a_run_can_have() -> None:
    assert Hardware("gpu", 2, GIB).larger_counts() == [4, 8, 16, 32, 64, 128, 256, 512, 1024]
    assert Hardware("gpu", 6, GIB).larger_counts()[:3] == [8, 16, 32]
    assert Hardware("gpu", 12, GIB).larger_counts()[:2] == [24, 48]
    assert Hardware("gpu", 18, GIB, machines=3).larger_counts()[:2] == [24, 48]
    assert Hardware("gpu", 2, GIB, machines=2).larger_counts()[-1] == MOST_MACHINES
    full = Hardware("gpu", 1024, GIB, machines=128)
    assert full.larger_counts() == []
    assert "not even on 1024 GPUs" in needed_line(None, scale_config(), full)


# -- the links -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("axes", "sizes", "collective", "speed"),
    [
        (("tp",), {"dp_shard": 8, "tp": 8}, "all-reduce", 200),
        (("dp_shard", "cp", "sp"), {"dp_shard": 8, "tp": 8}, "all-gather", 10),  # one rank of each machine
        (("dp_shard", "cp", "sp"), {"dp_shard": 64}, "all-gather", 80),  # eight, each over its own card
        (("dp_shard", "cp", "sp"), {"dp_replicate": 8, "dp_shard": 8}, "all-gather", 200),
        (("dp_replicate",), {"dp_replicate": 8, "dp_shard": 8}, "all-reduce", 10),
        (("dp_replicate",), {"dp_replicate": 16, "dp_shard": 4}, "all-reduce", 20),
        (("pp",), {"pp": 8, "tp": 8}, "send", 10),
        (("sp",), {"dp_shard": 4, "sp": 16}, "all-to-all", 10),
        (("tp",), {"dp_shard": 4, "tp": 16}, "all-reduce", 80),
    ],
)  # fmt: skip
def test_axes_that_span_machines_use_the_slow_link(
    axes: tuple[str, ...], sizes: dict[str, int], collective: str, speed: float
) -> None:
    hardware = Hardware("gpu", 64, GIB, machines=8, link=200, machine_link=10)
    part = term(collective, "", 1.0, 8, *axes)
    assert link_speed(part, MeshSizes(**sizes), hardware) == speed
    assert link_speed(part, MeshSizes(**sizes), replace(hardware, machines=1)) == 200


# -- the order -------------------------------------------------------------------------------------------------------


def made(name: str, seconds: float, gib: float, host: float = 0.0, **sizes: int) -> Row:
    memory = {"weights": gib * GIB}
    return Row(name, MeshSizes(**sizes), 1, memory, host=host, fits=True, seconds=seconds, sent=1.0)


def test_a_small_model_gets_no_mesh_that_sends_often(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = Shape("tiny", 128, 4, 4, 2, 384, 1024, tied=True)
    strategies = [load_strategy(name) for name in ("ddp", "fsdp2", "pp", "pp_fsdp2", "tp", "3d")]
    asked = request(8, tiny.counted(), memory=80, max_length=128, global_batch_size=16)
    assert best_rows(strategies, asked)[0].strategy in ("ddp", "fsdp2")
    monkeypatch.setattr("app.plan.speed.LATENCIES", {"gpu": 0.0})
    assert best_rows(strategies, asked)[0].strategy not in ("ddp", "fsdp2")  # the control: by bytes alone it does


def test_the_order_is_speed_then_memory_then_simplicity() -> None:
    rows = [
        made("slow", 1.2, 5), made("large", 1.0, 55, dp_shard=8), made("small", 1.04, 31, dp_shard=8),
        made("meshed", 1.03, 30, dp_shard=4, tp=2), made("offloaded", 0.5, 1, host=1.0),
    ]  # fmt: skip
    assert [row.strategy for row in best_first(rows)] == ["small", "meshed", "large", "slow", "offloaded"]
    assert [row.strategy for row in best_first(rows[::-1])] == ["small", "meshed", "large", "slow", "offloaded"]


@pytest.mark.parametrize("count", [2, 4, 8, 16, 64])
@pytest.mark.parametrize("memory", [24, 40, 80, 200])
def test_offload_is_never_first_where_a_shard_fits_nor_more_memory_for_nothing(count: int, memory: float) -> None:
    rows = best_rows([load_strategy(name) for name in strategy_names()], request(count, memory=memory, link=200))
    fitting = [row for row in rows if row.fits]
    assert [bool(row.host) for row in fitting] == sorted(bool(row.host) for row in fitting)
    first = fitting[0]
    for row in fitting:
        if not row.host and (row.seconds or 0) <= (first.seconds or 0):
            assert first.total <= 1.05 * row.total


# -- the textbook ----------------------------------------------------------------------------------------------------


def states(name: str, count: int, parameters: float) -> float:
    """Bytes of weights, gradients and Adam's states on each rank, as planned, for so many parameters."""
    counted = copy.deepcopy(SEVEN)
    weights = dict.fromkeys(SEVEN["whole"], 0.0) | {"trained_inside": parameters, "parameters": parameters}
    counted["whole"] = weights
    counted["cases"] = {key: {**case, **weights} for key, case in SEVEN["cases"].items()}
    memory = plan_row(*candidate(load_strategy(name), scale_config(), Hardware("gpu", count, GIB)), counted,
                      Hardware("gpu", count, GIB)).memory  # fmt: skip
    assert memory
    return sum(memory[use] for use in ("weights", "gradients", "optimizer"))


def test_7b_in_fp32_with_adam_is_112_gb() -> None:
    assert states("single", 1, 7e9) == states("ddp", 8, 7e9) == 112e9


@pytest.mark.parametrize("count", [2, 4, 8, 64])
def test_zero_shards_as_its_paper_says(count: int) -> None:
    """4 bytes of weights and of gradients, 8 of Adam's states; DeepSpeed keeps 4 more, a flat copy that it updates."""
    params = 7e9
    assert states("zero1", count, params) == pytest.approx(params * (4 + 4 + (8 + 4) / count))
    assert states("zero2", count, params) == pytest.approx(params * (4 + (4 + 8 + 4) / count))
    assert states("zero3", count, params) == pytest.approx(params * (4 + 4 + 8 + 4) / count)
    assert states("fsdp2", count, params) == pytest.approx(params * 16 / count)


# -- what was not counted --------------------------------------------------------------------------------------------


def test_other_cases_follow_from_those_that_were_counted() -> None:
    """Counted at 1 and 8 ranks, and few rows; the rest lies on lines between."""
    counted = copy.deepcopy(SEVEN)
    exact = {f"{tp}:1:1:1:{rows}": SHAPES[1]._case(tp, rows) for tp in (1, 2, 4, 8) for rows in (1, 2, 4, 8)}
    for name, case in exact.items():
        tp, *_, rows = map(int, name.split(":"))
        config = scale_config().model_copy(update={"per_device_train_batch_size": rows})
        strategy, config = candidate(load_strategy("tp"), config, Hardware("gpu", 8, GIB), {"tp": tp})
        derived = counted_case(strategy, config, counted)
        assert derived["trained_inside"] == pytest.approx(case["trained_inside"])
        assert derived["layer"] == pytest.approx(case["layer"])
        assert derived["fixed"] == pytest.approx(case["fixed"], rel=0.2)


def test_more_tokens_need_more_memory() -> None:
    totals = []
    for rows in (1, 2, 4, 8, 16, 32, 64):
        config = scale_config().model_copy(update={"per_device_train_batch_size": rows})
        row = plan_row(*candidate(load_strategy("fsdp2"), config, Hardware("gpu", 8, GIB)), SEVEN,
                       Hardware("gpu", 8, GIB))  # fmt: skip
        totals.append(row.total)
    assert all(less < more for less, more in pairwise(totals))


def test_a_head_size_that_differs_by_layer_is_the_mean() -> None:
    """transformers refuses to say one number for Gemma 4."""
    gemma = AutoConfig.for_model("gemma4_text", num_hidden_layers=6, head_dim=256, global_head_dim=512)
    assert head_size(gemma) == round((5 * 256 + 512) / 6)
    assert head_size(AutoConfig.for_model("llama", hidden_size=64, num_attention_heads=4)) == 16
