"""`benchmarks/parallelism.py` and `traffic.py`: formulas, tables, and that real runs send what the formulas say."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.collectives import PAYLOAD, SILENT, Traffic, payload, sent_bytes
from benchmarks.parallelism import (
    COLLECTIVES,
    STRATEGIES,
    Measured,
    first_row,
    format_bytes,
    head,
    line,
    measure,
    sized,
)  # fmt: skip
from benchmarks.traffic import MICRO_BATCHES, NAMES, compared, counted, mixture, published, row, sizes_of
from tests.parity.runs import mostly_long
from trainers.config.mistakes import ConfigError
from trainers.embedded import BASE_DIR
from trainers.strategy.mesh import MeshSizes
from trainers.strategy.strategy import load_strategy
from trainers.strategy.traffic import ModelSizes, predicted

SHAPE = ModelSizes(
    parameters=1000, vectors=40, outside=330, layers=2, hidden=10, heads=4, key_heads=2, head_size=3, vocab_size=32,
    tied=True,
)  # fmt: skip
STEPS = [[[8, 5], [6, 4]], [[4, 3], [8, 8]], [[4, 2], [4, 4]]]
"""Two micro-batches in each step; the first step is not counted."""


def bytes_of(kind: str, chunks: int = 1, **sizes: int) -> dict[str, float]:
    terms = predicted(kind, MeshSizes(**sizes), chunks, SHAPE, STEPS, 1)
    return {term.collective: term.bytes for term in terms}


def test_ddp_sums_gradients_once_a_step() -> None:
    assert bytes_of("MULTI_GPU", dp_replicate=2) == {"all-reduce": 2 * 4 * 1000}


def test_fsdp_gathers_and_reduces_in_each_micro_batch() -> None:
    # Four micro-batches; of the 1000 weights 670 are in layers, and gathered twice.
    assert bytes_of("FSDP", dp_shard=2) == {"all-gather": 4 * 4 * 1670 / 2, "reduce-scatter": 4 * 4 * 1000}


def test_groups_of_hsdp_sum_their_shards_once_a_step() -> None:
    assert bytes_of("FSDP", dp_shard=2, dp_replicate=2)["all-reduce"] == 2 * 4 * 1000 / 2


def test_tensor_parallel_gathers_and_scatters_activations() -> None:
    slots, trained = 20, 17
    activations, norms, loss = slots * 10 * 4, 4 * 40 * 4, trained * 13 * 4
    assert bytes_of("MULTI_GPU", tp=2) == {
        "all-reduce": activations + norms + loss,
        "all-gather": (4 * 2 + 2) * activations / 2,
        "reduce-scatter": 4 * 2 * activations,
    }


def test_tensor_parallel_sums_activations_where_tokens_are_not_divided() -> None:
    [term] = predicted("MULTI_GPU", MeshSizes(tp=2), 1, replace(SHAPE, divides_tokens=False), STEPS, 1)
    assert (term.collective, term.bytes, term.calls) == ("all-reduce", 9 * 20 * 10 * 4 + 17 * 13 * 4, 4 * (4 * 2 + 4))


def test_experts_get_tokens_and_their_copies_are_summed() -> None:
    mixture = replace(SHAPE, experts=600, expert_layers=2, chosen=3)
    for world, copies in ((2, 0), (4, 600 / 2)):
        terms = predicted("MULTI_GPU", MeshSizes(dp_replicate=world, ep=2), 1, mixture, STEPS, 1)
        sent = {term.collective: (term.bytes, term.calls) for term in terms}
        assert sent["all-reduce"] == (2 * 4 * (400 + copies), 2 * (1 + (4 if copies else 0)))
        assert sent["all-to-all"] == (4 * 2 * 20 * 3 * 10 * 4, 4 * 2 * 5)


def test_parts_of_rows_meet_in_attention() -> None:
    vector, plain = 20 * 3 * 4, bytes_of("FSDP", dp_shard=2)
    assert bytes_of("FSDP", sp=2)["all-to-all"] == 2 * 2 * (2 * 4 + 2 * 2) * vector
    assert bytes_of("FSDP", sp=4)["all-to-all"] == 2 * 2 * (2 * 4 + 2 * 4) * vector  # key heads are repeated
    gathered = 2 * 2 * 2 * vector
    found = bytes_of("FSDP", cp=2)
    assert found["all-gather"] == plain["all-gather"] + gathered
    assert found["reduce-scatter"] == plain["reduce-scatter"] + 2 * gathered


def test_pipelines_send_hidden_states_in_full_buffers() -> None:
    hidden, tied = 4 * 8 * 10 * 4, 2 * 32 * 10 * 4  # of four micro-batches; in two steps
    assert bytes_of("MULTI_GPU", pp=2) == {"send": (2 * hidden + 2 * tied) / 2}
    assert bytes_of("MULTI_GPU", chunks=2, pp=2) == {"send": (2 * 3 * hidden + 2 * tied) / 2}
    held = (1000 + 320) / 2 * 4 * 2
    assert bytes_of("MULTI_GPU", pp=2, dp_replicate=2)["all-reduce"] == held
    cut = bytes_of("FSDP", pp=2, dp_shard=2)
    assert cut == {"all-gather": held / 2, "reduce-scatter": held, "send": (2 * hidden + 2 * tied / 2) / 2}


def test_zero_sums_gradients_and_gathers_what_was_updated() -> None:
    assert bytes_of("ZERO1", dp_shard=2) == {"reduce": 2 * 4000, "all-gather": 2 * 4000 / 2}
    assert bytes_of("ZERO2", dp_shard=2) == {"reduce": 4 * 4000, "all-gather": 2 * 4000 / 2}
    assert bytes_of("ZERO3", dp_shard=2) == {"all-gather": 4 * 4000 / 2, "reduce-scatter": 4 * 4000}


def test_zero_3_gathers_small_weights_once_a_step_and_what_it_cannot_keep_twice() -> None:
    def gathered(shape: ModelSizes) -> tuple[float, float]:
        terms = predicted("ZERO3", MeshSizes(dp_shard=2), 1, shape, STEPS, 1)
        return next((term.bytes, term.calls) for term in terms if term.collective == "all-gather")

    assert gathered(replace(SHAPE, persistent=300, persistent_weights=7)) == (
        (2 * 300 + 4 * 700) * 4 / 2,
        2 * 7 + 4 * 2,
    )
    cast = replace(SHAPE, persistent=300, persistent_weights=7, casts_layers=True, matmul_bytes=2)
    assert gathered(cast)[0] == pytest.approx((2 * 300 * 2 + 4 * (670 * 2 + 330 * 4 - 300 * 2)) / 2)
    large = replace(SHAPE, parameters=2_000_000_000)
    assert gathered(large) == (4 * (2e9 + 1.5e9) * 4 / 2, 4 * (1 + 3500 / 50))


@pytest.mark.parametrize(
    ("kind", "chunks", "sizes", "calls"),
    [
        ("MULTI_GPU", 1, {"dp_replicate": 2}, {"all-reduce": 2}),  # one bucket; two steps of two micro-batches
        ("FSDP", 1, {"dp_shard": 2}, {"all-gather": 4 * 5, "reduce-scatter": 4 * 3}),
        ("GRAD_OP", 1, {"dp_shard": 2}, {"all-gather": 4 * 3, "reduce-scatter": 4 * 3}),
        ("FSDP", 1, {"cp": 2}, {"all-gather": 4 * (5 + 2), "reduce-scatter": 4 * (3 + 2)}),
        ("FSDP", 1, {"sp": 2}, {"all-gather": 4 * 5, "reduce-scatter": 4 * 3, "all-to-all": 4 * 2 * 8}),
        ("MULTI_GPU", 1, {"tp": 2},
         {"all-reduce": 4 * (2 * 2 + 5), "all-gather": 4 * (4 * 2 + 2), "reduce-scatter": 4 * 4 * 2}),
        ("MULTI_GPU", 2, {"pp": 2}, {"send": (2 * 3 * 4 + 2 * 2) / 2}),
        ("FSDP", 1, {"pp": 2, "dp_shard": 2}, {"all-gather": 2 * 2, "reduce-scatter": 2 * 2, "send": (2 * 4 + 4) / 2}),
    ],
)  # fmt: skip
def test_how_often_each_collective_is_called(
    kind: str, chunks: int, sizes: dict[str, int], calls: dict[str, float]
) -> None:
    terms = predicted(kind, MeshSizes(**sizes), chunks, SHAPE, STEPS, 1)
    assert {term.collective: term.calls for term in terms} == calls


def test_every_strategy_is_there() -> None:
    assert [sized(name).name for name in STRATEGIES] == list(STRATEGIES)
    assert {sized(name).num_processes for name in STRATEGIES} == {2, 4}
    assert sized("tp", 4).sizes == MeshSizes(dp_replicate=2, tp=2)
    with pytest.raises(ConfigError, match="num_processes=3"):
        sized("tp", 3)


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0"), (20, "20 B"), (1234, "1.23 kB"), (999_600, "1000 kB"), (3_543_552, "3.54 MB"), (2e9, "2 GB")],
)
def test_sizes_are_short(size: float, text: str) -> None:
    assert format_bytes(size) == text


def test_tables_have_a_cell_for_each_column() -> None:
    ranks = [
        {"sent": {"all-reduce": sent, "reduce": 4, "control": 40}, "calls": {"all-reduce": 6}, "steps": [[[8, 5]]] * 4,
         "wire": {"all-reduce": sent, "control": 40}}
        for sent in (7000, 9000)
    ]  # fmt: skip
    found = Measured(load_strategy("ddp"), ranks, [0.5, 0.25], 0.125)
    assert first_row(found) == ["ddp", "2", "4 kB", "0", "0", "0", "0", "0", "2 B", "20 B", "0.50 0.25", "0.12"]
    result = compared(found, SHAPE)
    assert row(result) == ["`ddp`", "2", "4 kB", "4 kB", "1.000", "4 kB", "1.00", "2W (n - 1) / n"]
    [part] = result["collectives"]
    assert (part["collective"], part["predicted"], part["counted"], part["counted_calls"]) == (
        "all-reduce",
        4e3,
        4e3,
        3,
    )
    assert result["without_formula"] == {"reduce": 2}
    assert head(["a", "b"]).splitlines() == [line(["a", "b"]), "|---|---|"]


@pytest.mark.parametrize(
    ("name", "sent"),
    [
        ("zero2", 5 * 4000 / 2),
        ("zero3", 12 * 4000 / 2),
        ("fsdp1_grad_op", 8 * 4000 / 2),
        ("hsdp", 12 * 4000 / 2 + 4000 / 2),
        ("tp", 4 * 4 * 2 * 80 * 4),
        ("pp", 2 * 4 * 80 * 4 / 2),
        ("cp", 12 * 4000 / 2 + 4 * 4 * 2 * 40 * 4),
        ("sp", 12 * 4000 / 2 + 4 * 2 * (80 + 40) * 4 * 2),
    ],
)
def test_what_the_papers_say_for_four_micro_batches_of_8_tokens(name: str, sent: float) -> None:
    assert published(sized(name), SHAPE, 8)[0] == pytest.approx(sent)


def test_every_collective_of_this_torch_is_known() -> None:
    names = {name.removeprefix("c10d::") for name in torch._C._dispatch_get_all_op_names() if name.startswith("c10d::")}
    assert "allreduce_" in names
    assert names <= PAYLOAD.keys() | SILENT
    assert {kind for kind, _ in PAYLOAD.values()} >= set(COLLECTIVES)


def test_an_unknown_collective_stops_the_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.delitem(PAYLOAD, "send")
    with pytest.raises(RuntimeError, match="has collectives send; add them to PAYLOAD"):
        Traffic(tmp_path, 2).register()


def test_a_payload_is_what_a_rank_gives() -> None:
    small, large = torch.zeros(3), torch.zeros(6, dtype=torch.bfloat16)
    assert payload([[small, large], small]) == 36
    group, alone = (1, 2), (0, 1)  # rank and size

    def bytes_sent(operator: str, *arguments: Any) -> int:
        return sent_bytes(operator, arguments, lambda one: one)

    assert bytes_sent("_allgather_base_", torch.zeros(12), small, group) == 12
    assert bytes_sent("_reduce_scatter_base_", small, torch.zeros(12), group) == 48
    assert bytes_sent("broadcast_", [small], group, 1, 0) == 12
    assert bytes_sent("broadcast_", [small], group, 0, 0) == 0
    assert bytes_sent("allreduce_", [small], group) == 12
    assert bytes_sent("allreduce_", [small], alone) == 0


@pytest.mark.parametrize("method", mostly_long(["full", "lora"], []))
def test_ddp_sends_its_gradients_and_nothing_else(tmp_path: Path, method: str) -> None:
    """Known bytes: 4 for each trained weight, once a step of two micro-batches. Adapters alone are far fewer."""
    from transformers import AutoModelForCausalLM

    rank = {"lora_r": 4} if method == "lora" else {}
    found = measure(
        tmp_path / "ddp", sized("ddp"), BASE_DIR, steps=5, method=method, lora_target_modules="all-linear", **rank
    )
    model = AutoModelForCausalLM.from_pretrained(BASE_DIR)
    linear = [one for name, one in model.named_modules() if isinstance(one, torch.nn.Linear) and name != "lm_head"]
    adapters = sum(4 * (one.in_features + one.out_features) for one in linear)
    trained = adapters if method == "lora" else model.num_parameters()
    assert found.sent("all-reduce") == pytest.approx(4 * trained, rel=0.01)
    assert {kind for one in found.ranks for kind in one["sent"]} == {"all-reduce", "control"}
    assert 0 < found.sent("control") < 100
    assert all(len(one["steps"]) == 5 and len(one["steps"][0]) == 2 for one in found.ranks)
    if method == "full":
        [term] = found.expected(ModelSizes.of(model))
        assert term.bytes == 4 * trained


@pytest.mark.parametrize("name", mostly_long(NAMES, ["tp"]))
def test_what_is_sent_is_what_the_formulas_say(tmp_path: Path, name: str) -> None:
    """Four micro-batches a step, so that what is sent in each differs from what is sent once."""
    strategy = sized(name)
    model = mixture(tmp_path) if strategy.sizes.ep > 1 else BASE_DIR
    found, sizes = counted(tmp_path / name, strategy, model), sizes_of(model)
    assert all(len(step) == MICRO_BATCHES for rank in found.ranks for step in rank["steps"])
    result = compared(found, sizes)
    for part in result["collectives"]:
        assert part["counted"] == pytest.approx(part["predicted"], rel=0.05), part["collective"]
    assert result["sent"] == pytest.approx(result["predicted"], rel=0.05)
    if name == "hsdp":  # groups sum their shards once a step
        assert found.sent("reduce-scatter") == pytest.approx(4 * 2 * found.sent("all-reduce"), rel=0.01)
