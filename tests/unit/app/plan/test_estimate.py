"""The arithmetic of `tunesmith plan`, and the order of its rows."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from app.plan.estimate import Row, best_first, candidate, plan_row
from app.plan.hardware import CUDA_GIB, GIB, NCCL_GIB, ROOM, Hardware, parse_size
from tests.presets import left_to_the_user
from tests.unit.app.plan.test_count import LENGTH, config
from trainers.config.mistakes import ConfigError
from trainers.config.presets import find_preset, preset_names, published_config
from trainers.config.validation import build
from trainers.model.load import load_model_config
from trainers.run.host_memory import MAPPED
from trainers.strategy.mesh import MeshSizes
from trainers.strategy.pipeline_schedules import in_flight
from trainers.strategy.strategy import load_strategy
from trainers.tools.memory_estimate import case, count_peaks, empty_model, weights

pytestmark = pytest.mark.usefixtures("elsewhere")

ROOT = Path(__file__).resolve().parents[4]

WEIGHTS = {"trained_inside": 800.0, "trained_outside": 200.0, "frozen_inside": 0.0, "frozen_outside": 0.0,
           "parameters": 1000.0, "parameters_outside": 200.0, "vectors": 90.0, "scales": 0.0}  # fmt: skip
CASE = {**WEIGHTS, "fixed": 50.0, "layer": 10.0, "later": 60.0, "heap_fixed": 30.0, "heap_layer": 9.0}
COUNTED = {
    "layers": 8, "hidden": 10, "heads": 4, "key_heads": 2, "head_size": 3, "words": 20, "tied": False,
    "matmul_trained": 900, "matmul_frozen": 0, "all_linear": True, "layer_matmul": 100, "flops_per_second": 1e9,
    "load_balancing": False, "process_bytes": 7.0, "whole": WEIGHTS, "stored_dtype": "bfloat16",
    "cases": {f"{tp}:{cp}:{sp}:{stages}:{rows}": CASE for tp in (1, 2) for cp in (1, 2) for sp in (1, 2)
              for stages in (1, 2, 4) for rows in (1, 2, 4)},
}  # fmt: skip
"""Eight layers, and a head that costs as much as two of them."""


def row(
    name: str, processes: int = 2, kind: str = "cpu", memory: float = 1e9, counted: Any = COUNTED, **options: Any
) -> Row:  # fmt: skip
    hardware = Hardware(kind, processes, memory)
    given = {"global_batch_size": 16, "per_device_train_batch_size": 4, **options}
    return plan_row(*candidate(load_strategy(name), config(**given), hardware), counted, hardware)


def resting(name: str, processes: int = 2, counted: Any = COUNTED, **options: Any) -> list[float]:
    memory = row(name, processes, counted=counted, **options).memory
    assert memory
    return [memory[use] for use in ("weights", "gradients", "optimizer")]


def test_what_rests_where() -> None:
    assert resting("single") == resting("ddp") == [4000, 4000, 8000]
    assert resting("fsdp2") == resting("fsdp1") == [2000, 2000, 4000]
    assert resting("hsdp", 4) == [2000, 2000, 4000]
    # DeepSpeed updates a flat fp32 copy of the weights beside Adam's two states.
    assert resting("zero1") == [4000, 4000, 6000]
    assert resting("zero2") == [4000, 2000, 6000]
    assert resting("zero3", 4) == [1000, 1000, 3000]
    # Five layers and the embedding; the other rank has three and the head.
    assert resting("pp") == [4 * 600, 4 * 600, 8 * 600]
    # Stages of 2, 2, 3 and 1 layers. Where they turn, the first rank has three layers, embedding and head.
    assert resting("pp", pp_schedule="interleaved") == [4 * 600, 4 * 600, 8 * 600]
    assert resting("pp", pp_schedule="zbv") == [4 * 500, 4 * 500, 8 * 500]
    # A momentum alone; with Muon, embedding and head keep Adam's two states.
    assert resting("fsdp2", optim="lion") == [2000, 2000, 2000]
    assert resting("fsdp2", optim="muon") == [2000, 2000, 4 * 400 + 8 * 100]
    assert resting("fsdp2", ema_decay=0.99) == [2000, 2000, 6000]
    assert resting("zero1", optim="lion") == [4000, 4000, 4000]
    assert resting("fsdp2", optim="adamw_8bit", master_weights=False, mixed_precision="bf16") == [1000, 1000, 1015.625]


def test_what_is_whole_for_a_while() -> None:
    def gathered(name: str, processes: int = 2, **more: Any) -> float:
        memory = row(name, processes, **more).memory
        assert memory
        return memory["gathered"]

    # Under DDP the gradients of all micro-batches but the last, beside the buckets.
    assert gathered("ddp") == 4 * 1000
    assert gathered("ddp", global_batch_size=8) == gathered("single", 1) == gathered("pp_dp", 4) == 0
    # DeepSpeed's bucket, of which a CPU has what is used; under ZeRO 2 and 3 the largest gradient too.
    assert gathered("zero1") == 4 * 1000
    assert gathered("zero2") == 4 * (1000 + 200)
    # Outside, two layers, and the largest gradient; gloo copies that of a layer, and so does FSDP 2 before.
    assert gathered("fsdp2", kind="gpu") == gathered("fsdp1", kind="gpu") == 4 * (200 + 2 * 100 + 200)
    assert gathered("fsdp1") == gathered("fsdp1", kind="gpu") + 4 * 100
    assert gathered("fsdp2") == gathered("fsdp2", kind="gpu") + 2 * 4 * 100
    assert gathered("fsdp1_grad_op") == 4 * (1000 + 200)
    assert gathered("pp_fsdp2", 4) == 4 * (600 + 600)  # a stage and its gradients to the step's end
    # Its bucket is copied to be reduced, and by gloo again.
    assert gathered("zero3") == 4 * (1000 + 200 + 3 * 1000)


MATRICES = {**COUNTED, "whole": {**WEIGHTS, "hidden_matrices": 8, "hidden_matrix_weights": 720, "orthogonalized": 5000}}


def test_muon_takes_a_full_matrix_and_sends_all_of_them(no_latency: None) -> None:
    for name in ("single", "ddp", "fsdp2", "zero3"):
        plain, muon = (row(name, counted=MATRICES, kind="gpu", optim=optim) for optim in ("adamw", "muon"))
        assert plain.memory
        assert muon.memory
        assert muon.memory["gathered"] == max(plain.memory["gathered"], 4 * 5000)
        assert plain.memory["gathered"] < 4 * 5000 or name == "zero3"
        # Each rank sends half of what goes to all, and half of what it sums, where it has a part of each matrix.
        added = {"single": 0, "ddp": 4 * 720 / 2}.get(name, 2 * 4 * 720 / 2)
        assert (muon.sent or 0) - (plain.sent or 0) == added
    assert row("ddp", counted=MATRICES, optim="lion").sent == row("ddp", counted=MATRICES).sent  # control


TEACHER = {"parameters": 500.0, "layers": 4, "matmul": 450.0, "inside": 1600.0, "outside": 400.0}
"""A frozen model of 2,000 bytes, in four layers and outside them."""


def test_a_teacher_is_sharded_as_the_student_is() -> None:
    """Its weights alone: no gradients, no optimizer state, and nothing in a checkpoint or an export."""
    distilled = {**COUNTED, "teacher": TEACHER}
    for name, count, ways in (("single", 1, 1), ("ddp", 2, 1), ("fsdp1", 2, 2), ("fsdp2", 2, 2), ("fsdp2", 4, 4),
                              ("hsdp", 4, 2), ("zero1", 2, 1), ("zero2", 2, 1), ("zero3", 4, 4)):  # fmt: skip
        more, less = resting(name, count, counted=distilled), resting(name, count)
        assert [first - second for first, second in zip(more, less, strict=True)] == [2000 / ways, 0, 0], name


def test_tensor_parallelism_leaves_a_rank_its_part_of_a_teacher() -> None:
    """Of its weights, which FSDP then shards, and of what is gathered and sent."""
    distilled = {**COUNTED, "teacher": TEACHER}
    for name, count, ways in (("tp", 2, 2), ("fsdp2_tp", 4, 4)):
        more, less = resting(name, count, counted=distilled), resting(name, count)
        assert [first - second for first, second in zip(more, less, strict=True)] == [2000 / ways, 0, 0], name
    more, less = row("fsdp2_tp", 4, counted=distilled), row("fsdp2_tp", 4)
    assert more.sent - less.sent == pytest.approx(2 * 1000 / 2)  # type: ignore[operator]  # two micro-batches


def test_a_teacher_that_cannot_be_split_is_named() -> None:
    settings = config(objective="distill", teacher="embedded")
    shape = load_model_config(settings)
    three = copy.deepcopy(shape)
    three.num_attention_heads, three.num_key_value_heads, three.head_dim = 3, 3, shape.hidden_size // 4
    problem = case(settings, shape, "2:1:1:1:1", teacher=three)["refused"]
    assert problem.startswith("teacher: tp_size=2: llama has 3 attention heads")
    assert "refused" not in case(settings, shape, "2:1:1:1:1", teacher=shape)
    assert "refused" not in case(settings, shape, "1:1:1:1:1", teacher=three)


def test_a_rank_needs_less_for_its_part_of_a_teacher() -> None:
    settings = config(objective="distill", teacher="embedded")
    shape = load_model_config(settings)
    wide = copy.deepcopy(shape)
    wide.hidden_size, wide.intermediate_size = 4 * shape.hidden_size, 4 * shape.intermediate_size
    student = empty_model(settings, shape, 2)
    part, full = (count_peaks(settings, student, 8, LENGTH, wide, tp).highest for tp in (2, 1))
    assert part < full


def test_a_teacher_is_gathered_before_the_backward_pass() -> None:
    def gathered(name: str, teacher: Any, kind: str = "gpu") -> float:
        memory = row(name, counted={**COUNTED, "teacher": teacher}, kind=kind).memory
        assert memory
        return memory["gathered"]

    large = {**TEACHER, "inside": 160_000.0, "outside": 40_000.0}
    alone = gathered("fsdp2", None)
    assert gathered("fsdp2", TEACHER) == alone, "the student's backward pass needs more"
    assert gathered("fsdp2", large) == 4 * 200 + 40_000 + 2 * 40_000 > alone
    assert gathered("fsdp1_grad_op", TEACHER) == gathered("fsdp1_grad_op", None) + 2000, "it stays gathered"
    assert gathered("zero3", TEACHER, "cpu") == gathered("zero3", None, "cpu") + 2000
    assert gathered("ddp", large) == gathered("ddp", None)


def test_the_heap_keeps_a_hole_for_each_layer_of_a_teacher_too() -> None:
    def overhead(name: str, teacher: Any) -> float:
        memory = row(name, counted={**COUNTED, "teacher": teacher}).memory
        assert memory
        return memory["overhead"]

    assert overhead("fsdp2", TEACHER) == overhead("fsdp2", None) + 1600
    assert overhead("fsdp2", {**TEACHER, "inside": 4.0 * MAPPED}) == overhead("fsdp2", None)
    assert overhead("ddp", TEACHER) == overhead("ddp", None)


def test_the_host_reads_a_teacher_and_exports_nothing_of_it() -> None:
    distilled = {**COUNTED, "teacher": TEACHER}
    assert host_phases("ddp", counted=distilled) == host_phases("ddp"), "it is read straight to the GPU"
    more, less = (host_phases("zero3_offload", counted=counted) for counted in (distilled, COUNTED))
    added = {name: more[name] - less[name] for name in more}
    assert added == {"loading": 2 * 2000, "training": 2 * 1000, "saving": 2 * 1000, "exporting": 0}
    on_cpu = row("single", 1, counted=distilled).host_phases
    assert on_cpu["loading"] == 7 + 4000 + 2000


def test_a_teacher_computes_and_is_sent(no_latency: None) -> None:
    distilled = {**COUNTED, "teacher": TEACHER}
    tokens = 16 * LENGTH
    more, less = row("single", 1, counted=distilled).seconds, row("single", 1).seconds
    assert more
    assert less
    assert more - less == pytest.approx(2 * 450 * tokens / 1e9)
    for name, sent in (("fsdp2", 2 * 2000 / 2), ("zero3", 2 * 2000 / 2), ("ddp", 0)):  # two micro-batches
        assert row(name, counted=distilled).sent - row(name).sent == pytest.approx(sent), name  # type: ignore[operator]


def test_the_heap_of_a_cpu_keeps_gaps() -> None:
    """Beside the 7 bytes of the process; smaller activations are 30 bytes and 9 in each of eight layers."""
    cpu, gpu = (row("ddp", kind=kind).memory for kind in ("cpu", "gpu"))
    assert cpu
    assert gpu
    assert cpu["overhead"] == 7 + 0.75 * (30 + 8 * 9)
    assert gpu["overhead"] == (CUDA_GIB + NCCL_GIB) * GIB


def test_the_heap_keeps_a_hole_for_each_gathered_layer_and_the_copy_of_a_step() -> None:
    def overhead(name: str, processes: int = 2) -> float:
        memory = row(name, processes).memory
        assert memory
        return memory["overhead"]

    assert overhead("fsdp2") == overhead("cp") == 7 + 0.5 * (30 + 8 * 9) + 8 * 100 * 4
    assert overhead("fsdp1") == overhead("ddp")  # control: it gathers into one tensor per layer
    assert overhead("zero1") == overhead("zero3") == overhead("ddp") + 4 * 1000 / 2


def test_no_hole_is_kept_for_a_layer_that_is_mapped_by_itself() -> None:
    def overhead(layer: int) -> float:
        large = {**CASE, "trained_inside": 8.0 * layer, "parameters": 8.0 * layer + 200}
        memory = row("fsdp2", counted={**COUNTED, "cases": dict.fromkeys(COUNTED["cases"], large)}).memory
        assert memory
        return memory["overhead"] - (7 + 0.5 * (30 + 8 * 9))

    assert overhead(MAPPED // 4) == 0
    assert overhead(MAPPED // 4 - 1) == 8 * (MAPPED - 4)


def test_activations_give_way_to_gradients_where_no_earlier_ones_wait() -> None:
    def activations(kind: str, **more: Any) -> float:
        memory = row("fsdp2", kind=kind, **more).memory
        assert memory
        return memory["activations"]

    assert activations("cpu", global_batch_size=8) == 0  # less than the gradients
    assert activations("cpu") == activations("gpu") == activations("gpu", global_batch_size=8) == 50 + 8 * 10


def test_a_pipeline_keeps_several_micro_batches() -> None:
    one, several = row("single").memory, row("pp").memory
    assert one
    assert several
    assert one["activations"] == 50 + 8 * 10
    # The first rank has no logits, and two in flight, one when it has the embedding's gradient; and for each of the
    # four a buffer of 4 rows of 64 tokens of 10 numbers from the other rank.
    buffers = 4 * 4 * LENGTH * 10 * 4
    assert several["activations"] == 4 * 100 + 5 * 10 * 1 + buffers
    assert several["overhead"] == 7 + 0.75 * (5 * 9 * 2 + buffers)
    longer = copy.deepcopy(COUNTED)
    longer["cases"]["1:1:1:2:4"] |= {"layer": 100.0}  # type: ignore[index]
    assert row("pp", counted=longer).memory["activations"] == 5 * 100 * 2 + buffers  # type: ignore[index]
    assert [in_flight("1f1b", 4, 16, rank) for rank in range(4)] == [4, 3, 2, 1]
    assert in_flight("interleaved", 4, 16, 3) == (4 + 1) / 2
    assert [in_flight(name, 4, 16) for name in ("gpipe", "1f1b", "zbv")] == [16, 4, 4]
    assert in_flight("interleaved", 4, 16) == (2 * 3 + 4 + 1) / 2
    assert in_flight("1f1b", 4, 2) == 2
    assert in_flight("interleaved", 4, 7) == 7


@pytest.fixture
def no_latency(monkeypatch: pytest.MonkeyPatch) -> None:
    """Collectives cost their bytes alone: these models are so small that the number of calls would decide."""
    monkeypatch.setattr("app.plan.speed.LATENCIES", {"gpu": 0.0, "cpu": 0.0})


def test_the_bubble_is_that_of_the_schedule(no_latency: None) -> None:
    assert row("ddp").bubble is None
    assert row("pp").bubble == pytest.approx(1 / 5)  # two ranks and four micro-batches
    assert row("pp_interleaved").bubble == pytest.approx(1 / 9)
    slow, fast = row("pp").seconds, row("pp_interleaved").seconds
    assert slow
    assert fast
    assert slow > fast


def test_memory_of_the_host_is_told_apart() -> None:
    found = row("zero3_offload", kind="gpu", memory=40 * GIB)
    assert found.host == 2000 + 2000 + 6000  # of each of two processes
    assert found.memory
    assert found.memory["weights"] == found.memory["optimizer"] == 0
    assert found.fits
    assert found.tokens_per_second is None
    assert "host memory" in str(found.reason)
    assert best_first([found, row("zero3", kind="gpu", memory=40 * GIB)])[0].strategy == "zero3"


def test_a_gpu_has_more_to_hold_than_the_model() -> None:
    around = (CUDA_GIB + NCCL_GIB) * GIB
    found = row("ddp", kind="gpu", memory=around)
    assert found.memory
    assert found.memory["overhead"] == around
    assert found.fits is False
    assert "1.5 GiB for 1.4 GiB usable; most of it is overhead" in str(found.reason)
    assert row("ddp", kind="gpu", memory=2 * around).fits


def test_the_micro_batch_is_made_to_divide() -> None:
    hardware = Hardware("gpu", 8, GIB)
    _, fitted = candidate(load_strategy("ddp"), config(global_batch_size=16, per_device_train_batch_size=8), hardware)
    assert fitted.per_device_train_batch_size == 2
    # A pipeline of two ranks needs two micro-batches of what each of its four copies gets.
    _, fitted = candidate(load_strategy("pp"), config(global_batch_size=16, per_device_train_batch_size=8), hardware)
    assert fitted.per_device_train_batch_size == 2
    with pytest.raises(ConfigError, match=r"global_batch_size=12 is not divisible"):
        candidate(load_strategy("ddp"), config(global_batch_size=12), hardware)
    with pytest.raises(ConfigError, match="num_processes=3"):
        candidate(load_strategy("tp"), config(), Hardware("gpu", 3, GIB))


def test_what_cannot_be_counted_is_no_fit() -> None:
    counted = copy.deepcopy(COUNTED)
    counted["cases"]["1:1:1:1:4"] |= {"layer": None, "fixed": None, "why": "shapes follow from numbers"}  # type: ignore[index]
    hardware = Hardware("cpu", 2, 1e9)
    found = plan_row(
        *candidate(load_strategy("ddp"), config(per_device_train_batch_size=4), hardware), counted, hardware
    )
    assert (found.fits, found.memory) == (None, None)
    assert "shapes follow from numbers" in str(found.reason)
    assert found.as_json()["memory_gib"] is None


def host_phases(name: str, processes: int = 2, **options: Any) -> dict[str, float]:
    return row(name, processes, kind="gpu", memory=40 * GIB, **options).host_phases


def test_what_the_host_holds_in_each_phase() -> None:
    """7 bytes of each process; a checkpoint of 12,000 bytes in all ranks, and the model of 4,000 in the first."""
    assert host_phases("ddp") == {"loading": 14, "training": 14, "saving": 14 + 12_000, "exporting": 14 + 4000}
    assert host_phases("ddp", 4)["saving"] == 28 + 12_000
    assert host_phases("ddp", random_init=True)["loading"] == 2 * 4007, "random weights are drawn by every rank"
    offloaded = host_phases("zero3_offload")
    assert offloaded["training"] == 2 * (7 + 10_000)
    assert offloaded["loading"] == 2 * (7 + 4000), "no more than the model, on each rank"
    assert offloaded["saving"] == offloaded["training"] + 12_000
    assert host_phases("ddp", method="lora", merge_adapter=True)["exporting"] == 14 + 4000


@pytest.mark.parametrize(("name", "needed", "phase"), [("ddp", 12_014, "saving"), ("zero3_offload", 32_014, "saving")])
def test_memory_of_the_host_has_an_end(name: str, needed: int, phase: str) -> None:
    for host, fits in ((needed - 1, False), (needed, True), (None, True)):
        hardware = Hardware("gpu", 2, 40 * GIB, host=host)
        options = {"global_batch_size": 16, "per_device_train_batch_size": 4}
        found = plan_row(*candidate(load_strategy(name), config(**options), hardware), COUNTED, hardware)
        assert found.fits is fits
        assert (phase in str(found.reason)) is not fits
        assert ("--host_memory" in str(found.reason)) is (host is None and name == "zero3_offload")
        assert found.as_json()["host_gib"] == needed / GIB


def test_the_disk_has_an_end() -> None:
    # Two kept checkpoints and the one being written, 12 bytes per weight, and an export in bf16; 2 MB of logs.
    needed = 2_000_000 + 3 * 12_000 + 2000
    for free, enough in ((needed - 1, False), (needed, True), (None, True)):
        hardware = Hardware("gpu", 2, 40 * GIB, host=GIB, disk=free)
        options = {"global_batch_size": 16, "per_device_train_batch_size": 4}
        found = plan_row(*candidate(load_strategy("ddp"), config(**options), hardware), COUNTED, hardware)
        assert found.fits
        assert ("of disk" in str(found.reason)) is not enough
        assert found.as_json()["disk_gib"] == needed / GIB


def test_what_rests_elsewhere_is_fetched_by_one_rank_too() -> None:
    for name in ("fsdp2_offload", "zero3_offload"):
        alone, two = (row(name, count, kind="gpu", memory=40 * GIB).memory for count in (1, 2))
        assert alone
        assert two
        assert alone["weights"] == 0
        assert alone["gathered"] == two["gathered"] > 0


def test_optimizer_states_alone_can_rest_elsewhere(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    text = (ROOT / "accelerate_configs/zero3_offload.yaml").read_text()
    file.write_text(text.replace("offload_param_device: cpu", "offload_param_device: none"))
    found = row(str(file), kind="gpu", memory=40 * GIB)
    assert found.memory
    assert [found.memory[use] for use in ("weights", "gradients", "optimizer")] == [2000, 0, 0]
    assert found.host == 2000 + 6000


def test_weights_that_stay_gathered_are_sent_once() -> None:
    # 1,000 weights of which 200 outside; two micro-batches. Half is the other rank's, and gradients go half a way.
    again, once = row("fsdp1").sent, row("fsdp1_grad_op").sent
    assert again == 2 * 4 * (1000 + 1000 - 190 - 10 + 1000) / 2
    assert once == 2 * 4 * (1000 + 1000) / 2


def test_a_tied_weight_is_told_of_in_parts_where_it_is_cut() -> None:
    counted = {**COUNTED, "tied": True, "whole": {**WEIGHTS, "trained_outside": 200.0}}
    frozen = {**counted, "whole": {**WEIGHTS, "trained_outside": 0.0}}

    def sent(name: str, count: int, known: Any, **options: Any) -> float:
        hardware = Hardware("cpu", count, 1e9)
        settings = config(global_batch_size=16, per_device_train_batch_size=4, **options)
        return plan_row(*candidate(load_strategy(name), settings, hardware), known, hardware).sent or 0.0

    whole, parts = 2 * 20 * 10 * 4 / 2, 2 * 20 * 10 * 4 / 2 / 2  # of two ranks the mean
    assert sent("pp", 2, counted) - sent("pp", 2, frozen) == whole
    untied = sent("pp_fsdp2", 4, {**counted, "tied": False})
    held = 20 * 10 * 4 / 2  # the second copy of the weight is gathered and reduced too
    assert sent("pp_fsdp2", 4, counted) - untied == pytest.approx(parts + 2 * held / 2)
    assert sent("pp", 2, counted, pp_schedule="zbv") == sent("pp", 2, frozen, pp_schedule="zbv")


def test_a_schedule_that_turns_cannot_cut_a_tied_weight() -> None:
    hardware, counted = Hardware("cpu", 4, 1e9), {**COUNTED, "tied": True}
    settings = config(global_batch_size=16, per_device_train_batch_size=4, pp_schedule="zbv")
    found = plan_row(*candidate(load_strategy("pp_fsdp2"), settings, hardware), counted, hardware)
    assert found.fits is None
    assert "a shared weight that FSDP shards" in str(found.reason)
    assert plan_row(*candidate(load_strategy("pp_fsdp2"), settings, hardware), COUNTED, hardware).fits


def test_what_is_computed_twice_takes_time() -> None:
    plain, again, chosen = (
        row("single", gradient_checkpointing=full, selective_checkpointing=some).tokens_per_second or 0.0
        for full, some in ((False, False), (True, False), (True, True))
    )
    assert plain == chosen
    assert plain / again == pytest.approx((6 * 900 + 2 * 800) / (6 * 900))


def test_gradients_of_bf16_weights_are_half() -> None:
    small = {"master_weights": False, "mixed_precision": "bf16"}
    one, half = row("ddp").sent, row("ddp", **small).sent
    assert one == 2 * half == 4000  # type: ignore[operator]


def test_the_link_decides_the_order(no_latency: None) -> None:
    slow, fast = (Hardware("gpu", 2, 80 * GIB, link=link) for link in (1e-6, 1e6))
    options = {"global_batch_size": 16, "per_device_train_batch_size": 4}
    found = [
        [plan_row(*candidate(load_strategy(name), config(**options), one), COUNTED, one) for name in ("tp", "pp")]
        for one in (slow, fast)
    ]
    assert [best_first(rows)[0].strategy for rows in found] == ["pp", "tp"]


def test_a_model_that_cannot_be_cut_is_no_candidate() -> None:
    settings = config()
    shape = load_model_config(settings)
    assert "does not divide" in case(settings, shape, "1:1:3:1:1")["refused"]
    assert "use" in case(settings, shape, "3:1:1:1:1")["refused"]
    assert case(settings, shape, "1:1:1:64:1")["refused"].startswith("64 stages for")
    assert "refused" not in case(settings, shape, "2:1:1:2:1")
    counted = copy.deepcopy(COUNTED)
    counted["cases"]["2:1:1:1:4"] = {"refused": "3 heads"}  # type: ignore[index]
    hardware = Hardware("cpu", 2, 1e9)
    found = plan_row(
        *candidate(load_strategy("tp"), config(per_device_train_batch_size=4), hardware), counted, hardware
    )
    assert (found.fits, found.seconds, found.reason) == (None, None, "3 heads")


def test_the_best_comes_first() -> None:
    size = MeshSizes()
    slow, fast = Row("slow", size, fits=True, seconds=2.0), Row("fast", size, fits=True, seconds=1.0)
    large = Row("large", size, memory={"weights": 9.0}, fits=False, seconds=0.1)
    larger = Row("larger", size, memory={"weights": 10.0}, fits=False, seconds=0.1)
    rest, unknown = Row("refused", size, reason="no"), Row("unknown", size, seconds=0.1)
    names = [one.strategy for one in best_first([rest, larger, large, unknown, slow, fast])]
    assert names == ["fast", "slow", "unknown", "large", "larger", "refused"]


@pytest.mark.parametrize("text", ["0", "-1", "x", "nan", "inf", "1e99"])
def test_no_size(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a size in GiB"):
        parse_size(text, "gpu_memory", "GiB", 80)
    assert parse_size("80", "gpu_memory", "GiB", 80) == 80


def test_ddp_accumulates_beside_its_buckets(tmp_path: Path) -> None:
    """What `gathered` of ddp counts: a gradient is its own tensor until the micro-batch that reduces it."""
    store = distributed.FileStore(str(tmp_path / "store"), 1)
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        model = DistributedDataParallel(nn.Linear(64, 64), gradient_as_bucket_view=True)
        weight: Any = model.module.weight
        for _ in range(2):  # the buckets exist from the start, and are rebuilt once
            model.zero_grad(set_to_none=True)
            with model.no_sync():
                model(torch.ones(1, 64)).sum().backward()
            beside = weight.grad.untyped_storage()
            assert beside.nbytes() == weight.nbytes
            model(torch.ones(1, 64)).sum().backward()
            bucket = weight.grad.untyped_storage()
            assert bucket.nbytes() == weight.nbytes + model.module.bias.nbytes  # type: ignore[union-attr,operator]
            assert bucket.data_ptr() != beside.data_ptr()
    finally:
        distributed.destroy_process_group()


@pytest.mark.parametrize(("processes", "machines"), [(4, 2), (2, 1)])
def test_on_a_cpu_a_process_has_the_memory_and_cores_of_its_machine_only(processes: int, machines: int) -> None:
    """Alone on a machine of two processes it may take what both may; the other machines do not help it."""
    settings = config(global_batch_size=16, per_device_train_batch_size=4)
    one = row("single", processes=1)
    total, speed = one.total, one.tokens_per_second or 0.0
    for share, fits in ((0.51, True), (0.49, False)):
        hardware = Hardware("cpu", processes, share * total / ROOM["cpu"], machines=machines)
        found = plan_row(*candidate(load_strategy("single"), settings, hardware), COUNTED, hardware)
        assert found.fits is fits
        assert found.tokens_per_second == pytest.approx(2 * speed)


def test_fewer_processes_on_a_cpu_share_all_of_its_memory_and_cores() -> None:
    three = Hardware("cpu", 3, 2e9)
    assert three.resized(2).memory == 3e9
    assert three.resized(1).memory == 6e9
    assert Hardware("cpu", 6, 2e9, machines=2).resized(3) == three
    assert Hardware("gpu", 3, 2e9).resized(2).memory == 2e9
    two, counted = three.resized(2), {**COUNTED, "timed_processes": 3}
    settings = config(global_batch_size=16, per_device_train_batch_size=4)
    chosen = candidate(load_strategy("single"), settings, two)
    alone = row("single", processes=1).tokens_per_second or 0.0
    assert plan_row(*chosen, counted, two).tokens_per_second == pytest.approx(3 * alone)


# -- presets ---------------------------------------------------------------------------------------------------------


def test_every_preset_ships_the_config_that_a_plan_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A layer of each model, built from the config that ships, without Hub and cache."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    seen = set()
    for name in preset_names():
        options = find_preset(name).options
        short, path = {"max_length": 16, "max_completion_length": 8}, options["model_name_or_path"]
        settings = build({**options, **short, **left_to_the_user(name)})
        published = published_config(path)
        assert path == "embedded" or published, f"{name}: no config ships"
        if path not in seen:
            model_config = load_model_config(settings, published)
            assert weights(settings, empty_model(settings, model_config, layers=1))["parameters"] > 0
        seen.add(path)
    with pytest.raises(ConfigError, match="nobody/knows cannot be loaded"):  # control
        load_model_config(config(model_name_or_path="nobody/knows"))
    assert not list(tmp_path.iterdir()), "something was fetched"
