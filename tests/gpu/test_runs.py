"""Whole runs on one GPU: precisions, kernels, compiling, offload, QLoRA, a kill, and a rerun bit for bit."""

from __future__ import annotations

import json

import pytest
import torch

from tests.gpu.launches import STEPS, Launches, curve, difference, weights

also_on_cpu = pytest.mark.also_on_cpu
runs = pytest.mark.runs


@pytest.fixture
def band(launched: Launches) -> float:
    """How far rounding may move the loss: half of what a learning rate does that is a tenth too high."""
    return difference(launched("wrong rate"), launched("fp32")) / 2


@also_on_cpu
@runs("exact", "exact again")
def test_a_deterministic_rerun_is_the_same_bit_for_bit(launched: Launches) -> None:
    first, again = launched("exact"), launched("exact again")
    assert len(curve(first)) == STEPS
    assert curve(first) == curve(again)
    assert weights(first) == weights(again)


@also_on_cpu
@runs("exact", "killed and resumed", "wrong rate")
def test_a_killed_run_resumes_bit_for_bit(launched: Launches) -> None:
    uncut, resumed = launched("exact"), launched("killed and resumed")
    assert resumed.state["attempt"] == 1
    assert "resumed from" in resumed.output
    assert curve(resumed) == curve(uncut)
    assert weights(resumed) == weights(uncut)
    assert weights(launched("wrong rate")) != weights(uncut), "control"


@also_on_cpu
@runs("bf16", "fp32", "wrong rate")
def test_bf16_stays_in_its_band(launched: Launches, band: float) -> None:
    assert 0 < difference(launched("bf16"), launched("fp32")) < band
    assert "trained weights float32" in " ".join(launched("bf16").output.split())


@runs("fp16", "fp32", "wrong rate")
def test_fp16_trains_with_its_scaler(launched: Launches, band: float) -> None:
    """Steps whose scaled gradients overflow are skipped, and counted as such; before them the losses are fp32's."""
    half, full = launched("fp16"), launched("fp32")
    scaler = json.loads((half.checkpoints[-1] / "manifest.json").read_text())["progress"]["loss_scale"]
    skipped = [row["step"] for row in half.rows() if row.get("skipped")]
    assert scaler["scale"] == 2.0 ** (16 - len(skipped))
    assert len(skipped) < 3
    equal_steps = min(skipped, default=STEPS)
    losses = list(zip(half.series("loss"), full.series("loss"), strict=True))
    assert 0 < max(abs(ours - theirs) for ours, theirs in losses[:equal_steps]) < band
    assert losses[-1][0] < losses[0][0]


@pytest.mark.needs("torchao")
@runs("fp8", "bf16")
def test_fp8_is_near_bf16(launched: Launches) -> None:
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs a GPU of compute capability 8.9")
    assert 0 < difference(launched("fp8"), launched("bf16")) < 5e-2 * launched("bf16").series("loss")[0]


@runs("compiled", "sdpa", "fp32", "wrong rate")
def test_compiled_layers_train_alike(launched: Launches, band: float) -> None:
    assert difference(launched("compiled"), launched("sdpa")) < band
    assert launched("compiled").series("loss")[0] == pytest.approx(launched("sdpa").series("loss")[0], rel=2e-3)


@pytest.mark.parametrize(
    "kernel",
    [pytest.param("varlen", marks=runs("varlen")), pytest.param("flex", marks=runs("flex")),
     pytest.param("documents", marks=[also_on_cpu, runs("documents")])],
)  # fmt: skip
@runs("sdpa", "fp32", "wrong rate")
def test_a_kernel_trains_as_masked_attention_does(kernel: str, launched: Launches, band: float) -> None:
    assert f"attention tunesmith_{kernel} " in " ".join(launched(kernel).output.split())
    assert difference(launched(kernel), launched("sdpa")) < band
    norms = [one.series("grad_norm")[0] for one in (launched(kernel), launched("sdpa"))]
    assert norms[0] == pytest.approx(norms[1], rel=1e-2)


@runs("bf16")
def test_packed_rows_in_bf16_get_varlen(launched: Launches) -> None:
    assert "attention tunesmith_varlen " in " ".join(launched("bf16").output.split())


@pytest.mark.needs("pynvml")
@runs("bf16")
def test_use_and_power_are_in_the_metrics(launched: Launches) -> None:
    for row in launched("bf16").rows():
        assert 0 <= row["gpu_percent_by_rank"][0] <= 100
        assert row["gpu_power_w_by_rank"][0] > 0


@runs("checkpointed", "offloaded")
def test_activations_in_host_memory_free_the_gpu(launched: Launches) -> None:
    there, away = launched("checkpointed"), launched("offloaded")
    assert curve(away) == curve(there), "only their place changes"
    assert max(away.series("memory_gib")) < 0.8 * max(there.series("memory_gib"))


@also_on_cpu
@runs("fsdp2", "fp32")
def test_fsdp2_on_one_device_is_one_process(launched: Launches) -> None:
    assert difference(launched("fsdp2"), launched("fp32")) < 1e-5


@runs("fsdp2_offload", "fsdp2", "fp32")
def test_fsdp2_offload_is_one_process_with_less_memory(launched: Launches) -> None:
    offloaded = launched("fsdp2_offload")
    assert difference(offloaded, launched("fp32")) < 1e-4
    assert min(offloaded.series("memory_gib")) < min(launched("fsdp2").series("memory_gib"))


@pytest.mark.gpus(2)
@runs("two by nccl", "fp32", "wrong rate")
def test_two_gpus_by_nccl_are_one_process(launched: Launches) -> None:
    """Each rank on a device of its own, as NCCL refuses two ranks on one."""
    two = launched("two by nccl")
    assert difference(two, launched("fp32")) < 1e-5 < difference(launched("wrong rate"), launched("fp32"))
    assert all(len(row["memory_gib_by_rank"]) == 2 for row in two.rows())


@pytest.mark.gpus(2)
@pytest.mark.parametrize(("name", "backend"), [
    pytest.param("two by gloo", "gloo", marks=runs("two by gloo")),
    pytest.param("two by both", "nccl", marks=runs("two by both")),
])  # fmt: skip
@runs("fp32", "wrong rate")
def test_two_gpus_by_a_chosen_backend_are_one_process(name: str, backend: str, launched: Launches) -> None:
    two = launched(name)
    assert difference(two, launched("fp32")) < 1e-5 < difference(launched("wrong rate"), launched("fp32"))
    assert f"communication {backend} " in " ".join(two.output.split())


@pytest.mark.gpus(2)
@runs("bf16 hook", "power_sgd hook", "two for longer", "fp32", "wrong rate")
def test_compressed_gradients_train_alike(launched: Launches, band: float) -> None:
    """bf16 from the first step on, PowerSGD once it begins."""
    plain, bf16, low_rank = (launched(name) for name in ("two for longer", "bf16 hook", "power_sgd hook"))
    assert 0 < difference(bf16, plain) < band
    losses = list(zip(low_rank.series("loss"), plain.series("loss"), strict=True))
    assert max(abs(ours - theirs) for ours, theirs in losses[:9]) < 1e-5
    assert losses[-1][0] != losses[-1][1]
    assert losses[-1][0] < losses[0][0]
    assert "ddp_comm_hook=power_sgd" in low_rank.output


@pytest.mark.gpus(2)
@runs("fsdp1 offload", "fp32", "two by nccl")
def test_fsdp1_offload_is_one_process_with_less_memory(launched: Launches) -> None:
    """Weights rest in host memory; they are sent by rank 0 at the start (`fsdp_sync_module_states`)."""
    offloaded = launched("fsdp1 offload")
    assert difference(offloaded, launched("fp32")) < 1e-4
    assert min(offloaded.series("memory_gib")) < min(launched("two by nccl").series("memory_gib"))


@pytest.mark.gpus(2)
@pytest.mark.needs("deepspeed")
@runs("quantized messages", "fp32")
def test_quantized_messages_train_and_are_named(launched: Launches) -> None:
    """Weights in 8 bits and gradients in 4 move the loss, by little, and it falls."""
    quantized, full = launched("quantized messages").series("loss"), launched("fp32").series("loss")
    assert 0 < abs(quantized[0] - full[0]) < 0.2 * full[0]
    assert quantized[-1] < quantized[0]
    assert "zero_quantized_gradients=true" in launched("quantized messages").output


@also_on_cpu
@pytest.mark.needs("bitsandbytes")
@runs("qlora", "lora")
def test_qlora_trains_near_lora(launched: Launches) -> None:
    """Four bits move the loss before the first update, by little."""
    losses, reference = launched("qlora").series("loss"), launched("lora").series("loss")
    assert 1e-5 < abs(losses[0] - reference[0]) < 0.2 * reference[0]
    assert losses[-1] < losses[0]
