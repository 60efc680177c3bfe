"""Promises P0, P2, P3, P4 and bit-exact resume for every strategy that cuts weights, gradients or optimizer state.

Each Accelerate file is launched as a user would. `fsdp2_offload` needs an accelerator (tests/gpu has it), `ep` a model
with experts (`test_experts.py`).
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from tests.launching import Finished, launch
from tests.parity.checks import check_export, equal_after_resume, reference, resumed, same_bits, stock_loss
from tests.parity.plain import LOSS_TOLERANCE, NORM_TOLERANCE
from tests.parity.runs import HALF, STEPS, curve, mostly_long, options, run
from tests.parity.test_options import bf16_band, difference
from trainers.checkpoint.export import export_again
from trainers.embedded import BASE_DIR
from trainers.strategy.pipeline_schedules import bubble
from trainers.strategy.strategy import load_strategy, strategy_names

NOT_HERE = {"fsdp2_offload", "ep"}
# Under LoRA a grad_op, a stage 1 and an offload differ from these by what full training shows as well.
WITH_LORA = ["fsdp2", "zero2", "tp", "pp"]
STRATEGIES = [name for name in strategy_names() if name not in {"single", "ddp"} | NOT_HERE]
SHOWN_BY_OTHERS = {"hsdp_tp", "3d", "pp_fsdp2", "pp_dp", "zero2_tp", "fsdp1_grad_op", "zero1", "zero3_offload"}
IN_CHECK = [name for name in STRATEGIES if name not in SHOWN_BY_OTHERS]
ACCUMULATED = {"hsdp": {"per_device_train_batch_size": 1}}
QUICK = ["fsdp2", "zero2", "tp", "cp", "pp"]
"""One of each kind."""
RESUMED = ["fsdp1", "zero2", "zero3", "tp", "pp_interleaved"]
EVERY = mostly_long(STRATEGIES, IN_CHECK, QUICK)


def full(name: str, **more: object) -> Finished:
    """All weights, packed, two micro-batches a step and rank; one on four ranks, HSDP aside, which sums at the last."""
    return run(load_strategy(name).num_processes, "full", True, name, **{**ACCUMULATED.get(name, {}), **more})


def lora(name: str, **more: object) -> Finished:
    """Adapters, one document per row, one micro-batch a step and rank on two ranks."""
    strategy = load_strategy(name)
    micro = 8 // (strategy.data_parallel_size * strategy.pp_size)  # a pipeline takes one for each of its ranks
    return run(load_strategy(name).num_processes, "lora", False, name, per_device_train_batch_size=micro, **more)


def test_every_strategy_is_here() -> None:
    assert len(STRATEGIES) == 19
    assert set(strategy_names()) == {*STRATEGIES, *NOT_HERE, "single", "ddp"}


@pytest.mark.parametrize("name", EVERY)
def test_p2_full(name: str) -> None:
    assert curve(full(name)).agrees(reference("full", True))


@pytest.mark.parametrize("name", mostly_long(STRATEGIES, WITH_LORA))
def test_p2_lora(name: str) -> None:
    assert curve(lora(name)).agrees(reference("lora", False))


@pytest.mark.parametrize("name", EVERY)
def test_what_was_asked_for_is_what_ran(name: str) -> None:
    strategy, said = load_strategy(name), full(name).output
    assert re.search(rf"wrapper +{strategy.wrapped_class}\n", said)
    sizes = strategy.sizes
    what, tp = ("Adam's share", 1) if strategy.zero_stage in (1, 2) else ("weights held", sizes.tp)
    if strategy.sharded or strategy.zero_stage or sizes.tp > 1:
        assert re.search(rf"{what} +1/{sizes.dp_shard * sizes.sequence_shards * tp}\n", said)
    assert re.search(r"memory +rank 0 [\d.]+ -> [\d.]+ GiB; rank 1", said)
    if strategy.zero_stage:
        assert re.search(rf"ZeRO stage +{strategy.zero_stage}\n +offload +{strategy.offload}\n", said)
    if strategy.pp_size > 1:
        expected = bubble(strategy.pp_schedule, strategy.pp_size, 8 // (2 * strategy.data_parallel_size))
        assert f"a rank is idle for {expected:.1%} of it, if all stages take the same time" in said
        assert all(0 <= share < 1 for share in full(name).series("bubble"))
        assert len(full(name).series("bubble")) == STEPS
    if strategy.has_mesh:
        assert re.search(rf"mesh +{strategy.sizes}\n", said)


@pytest.mark.parametrize("name", mostly_long(STRATEGIES, ["fsdp2"]))
def test_p0_rerun_by_hand_is_the_same_bit_for_bit(name: str) -> None:
    assert same_bits(lora(name), lora(name, again=1))


@pytest.mark.parametrize("name", mostly_long(STRATEGIES, RESUMED, ["fsdp2"]))
def test_resume_is_bit_exact(name: str, tmp_path: Path) -> None:
    undisturbed = full(name)
    processes = load_strategy(name).num_processes
    again = resumed(tmp_path / "again", processes, "full", undisturbed.checkpoints[0], name)
    assert equal_after_resume(undisturbed, again)


@pytest.mark.parametrize("name", EVERY)
def test_p4_plain_libraries_load_the_export(name: str) -> None:
    check_export(full(name), "full", True)


@pytest.mark.parametrize("name", mostly_long(STRATEGIES, WITH_LORA))
def test_p4_plain_libraries_load_the_adapter(name: str) -> None:
    check_export(lora(name), "lora", False)


@pytest.mark.parametrize("name", mostly_long(STRATEGIES, WITH_LORA))
def test_p4_merged_adapters_are_the_trained_model(name: str, tmp_path: Path) -> None:
    export_again(lora(name).run, tmp_path / "merged", "merged", None)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", attn_implementation="eager").eval()
    trained = lora(name).series("eval_loss")[-1]
    assert stock_loss(model, "lora") == pytest.approx(trained, abs=1e-5)
    base = AutoModelForCausalLM.from_pretrained(BASE_DIR, attn_implementation="eager").eval()
    assert abs(stock_loss(base, "lora") - trained) > 1e-2, "control: an empty adapter would be the base"


@pytest.mark.parametrize(
    ("before", "after"),
    mostly_long([("fsdp2", "zero3"), ("zero2", "fsdp1"), ("hsdp", "ddp")], [], [("fsdp2", "zero3")]),
)
def test_p3_a_checkpoint_moves_to_another_strategy(before: str, after: str, tmp_path: Path) -> None:
    moved = resumed(tmp_path / "moved", 2, "full", full(before).checkpoints[0], after)
    losses, norms = reference("full", True).losses[HALF:], reference("full", True).norms[HALF:]
    assert max(abs(a - b) for a, b in zip(moved.series("loss"), losses, strict=True)) <= 1e-5
    assert max(abs(a - b) / b for a, b in zip(moved.series("grad_norm"), norms, strict=True)) <= 1e-4


@pytest.mark.parametrize(
    ("name", "method"), mostly_long([("fsdp2", "full"), ("zero3", "full"), ("fsdp1", "lora")], [("fsdp2", "full")])
)
def test_bf16_follows_the_same_compute_rule(name: str, method: str) -> None:
    """One process's bf16 to fp32 accuracy before the first update; its rounding is amplified after that.

    fsdp1 with adapters has two dtypes, which it can only hold in units of their own.
    """
    half, alone = (run(world, method, True, one, mixed_precision="bf16") for world, one in ((2, name), (1, None)))
    assert half.series("loss")[0] == pytest.approx(alone.series("loss")[0], abs=LOSS_TOLERANCE)
    assert half.series("grad_norm")[0] == pytest.approx(alone.series("grad_norm")[0], rel=NORM_TOLERANCE)
    assert 0 < difference(half, run(1, method, True)) < bf16_band(method)
    frozen, norms = ("bfloat16", "bfloat16") if method == "lora" else ("none", "float32")
    assert re.search(rf"trained weights +float32\n +frozen weights +{frozen}\n", half.output)
    assert re.search(rf"matrix products +bfloat16\n(.*\n)*? +norms +{norms}\n", half.output)


@pytest.mark.parametrize("name", mostly_long(["fsdp2", "zero3"], [], ["fsdp2"]))
def test_a_fault_on_purpose_is_seen(name: str) -> None:
    """Control: averaging the means of micro-batches leaves the tolerance under sharding too."""
    assert not curve(full(name, control="mean-of-means")).agrees(reference("full", True))


def test_offload_without_an_accelerator_is_refused(tmp_path: Path) -> None:
    refused = launch(tmp_path / "run", 2, options("full", True), strategy="fsdp2_offload")
    assert refused.status != 0
    assert "fsdp_offload_params" in refused.output
