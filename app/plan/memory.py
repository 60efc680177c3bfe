"""Estimates the memory of a rank by use.

Weights, gradients and optimizer state follow from the model's shape and the mesh. The memory of a micro-batch is
counted by `trainers/tools/memory_estimate.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from app.plan.hardware import CUDA_GIB, GIB, NCCL_GIB
from trainers.config.options import TrainConfig
from trainers.run.host_memory import MAPPED
from trainers.strategy.pipeline_schedules import SCHEDULES, balance, in_flight, stages_of
from trainers.strategy.strategy import Strategy
from trainers.strategy.traffic import FP32, casts_before_gathers

_LIVE, _BUCKET = 1e9, 5e8
"""DeepSpeed's defaults of `stage3_max_live_parameters` and `reduce_bucket_size`, in elements."""
_HEAP_GAPS, _GAPS_UNDER_FSDP2 = 0.75, 0.5
"""On a CPU: gaps that glibc's heap keeps, per byte of activations in blocks that come from it (less than `MAPPED`); the
second under FSDP 2, beside one for each layer. Fitted to all strategies at 24M, where all blocks do, with glibc 2.36
(`benchmarks/plan.py`).

FSDP 2 gathers a layer, allocates its activations behind it and frees it. The hole does not take the next layer of the
same size, as an aligned allocation asks for 96 bytes more than its size, so the holes add up to about all layers. A
layer of `MAPPED` and more is taken to leave none: 360M was planned 27 % too high with them, and is 2 to 10 % low. Gaps
go away if each tensor is mapped by itself (`MALLOC_MMAP_THRESHOLD_`), which took about 40 % more CPU time: the kernel
clears every page again.
"""


@dataclass(frozen=True)
class Share:
    """A rank's share of the model under tensor and pipeline parallelism, before data-parallel sharding.

    Args:
        layers: number of layers.
        held: number of micro-batches whose activations the rank holds at once; in one of several stages, a fraction.
        has_head: whether it computes logits and loss; `has_embedding`, whether it takes tokens.
        buffers: number of receive buffers for stage inputs and gradients, per micro-batch of a step.
        trained: number of trained parameters; `trained_layer` in one layer, `trained_outside` in embedding and head.
        frozen: bytes of frozen weights; `frozen_layer` and `frozen_outside` likewise.
        scales: bytes of the scales of 4-bit weights.
        parameters: number of all parameters.
        experts: number of trained parameters in divided experts, whose gradients DDP does not copy.
    """

    layers: int
    held: float
    has_head: bool
    has_embedding: bool
    buffers: int
    trained: float
    trained_layer: float
    trained_outside: float
    frozen: float
    frozen_layer: float
    frozen_outside: float
    scales: float
    parameters: float
    experts: float = 0.0

    @classmethod
    def of(
        cls, case: Mapping[str, Any], every: int, layers: int, ends: float, held: float = 1.0, has_head: bool = True,
        has_embedding: bool = True, buffers: int = 0,
    ) -> Share:  # fmt: skip
        """The share of a rank with `layers` of `every` layers, and the fraction `ends` of embedding and head."""
        layer, frozen = case["trained_inside"] / every, case["frozen_inside"] / every
        outside, frozen_outside = case["trained_outside"] * ends, case["frozen_outside"] * ends
        parameters = (case["parameters"] - case["parameters_outside"]) * layers / every
        return cls(
            layers, held, has_head, has_embedding, buffers, layer * layers + outside, layer, outside,
            frozen * layers + frozen_outside, frozen, frozen_outside, case["scales"] * layers / every,
            parameters + case["parameters_outside"] * ends,
        )  # fmt: skip


@dataclass(frozen=True)
class TeacherBytes:
    """A rank's share of the frozen weights of a teacher, before data-parallel sharding; 0 without one.

    Args:
        parameters: number of its parameters.
        weights: bytes of all; `layer` of those in one layer, `outside` of those outside the layers.
    """

    parameters: float = 0.0
    weights: float = 0.0
    layer: float = 0.0
    outside: float = 0.0

    @classmethod
    def of(cls, counted: Mapping[str, Any], tp: int = 1) -> TeacherBytes:
        """The teacher in the counts of `trainers/tools/memory_estimate.py`, of which tensor parallelism splits all.

        Its norms, which every rank holds, are too small to count.
        """
        if not (sizes := counted.get("teacher")):
            return cls()
        parameters, inside, outside = (sizes[name] / tp for name in ("parameters", "inside", "outside"))
        return cls(parameters, inside + outside, inside / sizes["layers"], outside)


def shares_of(
    strategy: Strategy, config: TrainConfig, counted: Mapping[str, Any], case: Mapping[str, Any]
) -> list[Share]:
    """The share of each rank of a pipeline, split as in `trainers/parallel/pipeline_split.py`; else a single share."""
    layers, ranks, schedule = counted["layers"], strategy.pp_size, strategy.pp_schedule
    if ranks == 1:
        divided = strategy.sizes.ep > 1
        share = Share.of(_divided(case, strategy.sizes.ep), layers, layers, 1.0)
        return [replace(share, experts=case["experts_trained"] / strategy.sizes.ep)] if divided else [share]
    # The first stage has the embedding, the last the head: half of what is outside the layers each, or all if tied.
    total = ranks * SCHEDULES[schedule].chunks
    layers_of_stage, shares = balance(layers, total, counted["layer_matmul"], counted["words"] * counted["hidden"]), []
    end, micro_batches = 1.0 if counted["tied"] else 0.5, config.accumulation_steps(strategy.data_parallel_size)
    for rank in range(ranks):
        stages = stages_of(schedule, ranks, rank)
        ends = min(1.0, end * (0 in stages) + end * (total - 1 in stages))
        buffers = sum((stage > 0) + (stage < total - 1) for stage in stages)
        inside, held = (
            sum(len(layers_of_stage[stage]) for stage in stages),
            in_flight(schedule, ranks, micro_batches, rank),
        )
        shares.append(Share.of(case, layers, inside, ends, held, total - 1 in stages, 0 in stages, buffers))
    return shares


def _divided(case: Mapping[str, Any], ep_size: int) -> Mapping[str, Any]:
    """The counts of a rank whose experts are divided over `ep_size` ranks."""
    if ep_size == 1:
        return case
    parts = {"trained_inside": "experts_trained", "frozen_inside": "experts_frozen", "parameters": "experts"}
    return {**case, **{name: case[name] - case[part] * (1 - 1 / ep_size) for name, part in parts.items()}}


def rank_memory(
    strategy: Strategy, config: TrainConfig, counted: Mapping[str, Any], case: Mapping[str, Any], share: Share,
    on_gpu: bool,
) -> tuple[dict[str, float], float]:  # fmt: skip
    """Bytes on a rank by use, and bytes offloaded from it."""
    sizes = strategy.sizes
    micro_batches = config.accumulation_steps(strategy.data_parallel_size)
    received = (
        share.buffers * micro_batches * token_slots(strategy, config) * counted["hidden"] * activation_bytes(config)
    )
    memory = dict.fromkeys(("weights", "gradients", "optimizer"), 0.0)
    teacher = TeacherBytes.of(counted, sizes.tp)
    resting = _persistent(strategy, config, share, teacher)
    away = sum(resting.pop(name) for name in _offloaded(strategy)) if on_gpu else 0.0
    held = case["layer"] * share.layers * share.held
    full, later = case["fixed"] * share.has_head + held, case["later"]
    if strategy.pp_size > 1:
        # The embedding's gradient, before it is added to earlier ones, when the activations of a stage are gone.
        embedding = share.trained_outside * weight_bytes(config) * share.has_embedding
        later = embedding + max(0.0, held - case["layer"] * share.layers / SCHEDULES[strategy.pp_schedule].chunks)
    activations = max(full, later) + received
    in_heap = case["heap_fixed"] * share.has_head + case["heap_layer"] * share.layers * share.held + received
    cuda = CUDA_GIB * GIB + (NCCL_GIB * GIB if sizes.world > 1 else 0)
    around = (
        cuda if on_gpu else counted["process_bytes"] + _heap_beyond_tensors(strategy, config, share, in_heap, teacher)
    )
    if not on_gpu and strategy.distributed_type == "FSDP" and strategy.pp_size == 1 and micro_batches == 1:
        # Activations are freed as gradients are allocated; with accumulation, earlier gradients are there already.
        # Measured on a CPU alone: on a GPU, both are counted.
        activations -= min(activations, resting.get("gradients", 0.0))
    gathered = max(_gathered(strategy, config, counted, share, on_gpu), _orthogonalized(config, counted))
    memory |= {**resting, "gathered": gathered,
               "activations": activations, "overhead": around}  # fmt: skip
    return memory, away


def _heap_beyond_tensors(
    strategy: Strategy, config: TrainConfig, share: Share, activations: float, teacher: TeacherBytes
) -> float:
    """On a CPU: bytes of glibc's heap that are resident at the peak and hold no tensor of then.

    Args:
        activations: bytes of activations in blocks that glibc takes from its heap; it maps larger ones by themselves.
    """
    weight = weight_bytes(config)
    if strategy.distributed_type == "FSDP" and strategy.fsdp_version == 2 and _shards(strategy) > 1:
        layer = share.trained_layer * weight + share.frozen_layer
        of_teacher = teacher.weights - teacher.outside if teacher.layer < MAPPED else 0.0
        return _GAPS_UNDER_FSDP2 * activations + (layer * share.layers if layer < MAPPED else 0.0) + of_teacher
    # DeepSpeed's step copies the shard of gradients, beside the activations' pages, which the heap keeps.
    step = share.trained * FP32 / _shards(strategy) if strategy.distributed_type == "DEEPSPEED" else 0.0
    return _HEAP_GAPS * activations + step


def token_slots(strategy: Strategy, config: TrainConfig) -> int:
    """Token slots of a micro-batch on a rank."""
    return -(-config.per_device_train_batch_size * config.example_tokens // strategy.sizes.sequence_shards)


def weight_bytes(config: TrainConfig) -> float:
    """Bytes of a trained weight (and of its gradient)."""
    return 4.0 if config.master_weights or config.method != "full" else 2.0


def activation_bytes(config: TrainConfig) -> int:
    """Bytes of an activation passed between layers: those of the embedding's dtype."""
    half = config.mixed_precision != "no" and (config.method != "full" or not config.master_weights)
    return 2 if half else 4


def _persistent(strategy: Strategy, config: TrainConfig, share: Share, teacher: TeacherBytes) -> dict[str, float]:
    """Bytes of weights, gradients and optimizer state between steps."""
    weight, divisor = weight_bytes(config), shard_counts(strategy)
    state = config.state_bytes(share.trained - share.trained_outside, share.trained_outside)
    if strategy.distributed_type == "DEEPSPEED":
        state += share.trained * FP32  # DeepSpeed updates a flat fp32 copy
    return {
        "weights": (share.trained * weight + share.frozen + teacher.weights) / divisor["weights"] + share.scales,
        "gradients": share.trained * weight / divisor["gradients"],
        "optimizer": state / divisor["optimizer"],
    }


def shard_counts(strategy: Strategy) -> dict[str, int]:
    """Number of ranks over which the data-parallel axes shard `weights`, `gradients` and `optimizer` state."""
    first_stage = {"weights": 3, "gradients": 2, "optimizer": 1}
    shards, zero = _shards(strategy), strategy.distributed_type == "DEEPSPEED"
    return {name: shards if not zero or strategy.zero_stage >= stage else 1 for name, stage in first_stage.items()}


def _shards(strategy: Strategy) -> int:
    """Number of ranks over which weights, gradients or optimizer states are sharded."""
    unsharded = strategy.distributed_type == "FSDP" and not strategy.sharded
    cuts = strategy.distributed_type in ("FSDP", "DEEPSPEED") and not unsharded
    return strategy.sizes.dp_shard * strategy.sizes.sequence_shards if cuts else 1


def keeps_gathered(strategy: Strategy) -> bool:
    """Whether FSDP keeps gathered weights until the backward pass."""
    fsdp = strategy.fsdp
    if strategy.fsdp_version == 1:
        return fsdp.get("fsdp_sharding_strategy") == "SHARD_GRAD_OP"
    return not fsdp.get("fsdp_reshard_after_forward", True)


def _gathered(strategy: Strategy, config: TrainConfig, counted: Mapping[str, Any], share: Share, on_gpu: bool) -> float:
    """Peak bytes of temporarily gathered weights and gradients, and of DeepSpeed's buckets."""
    weight, shards = weight_bytes(config), _shards(strategy)
    teacher = TeacherBytes.of(counted, strategy.sizes.tp)
    every = share.trained * weight + share.frozen
    fetched = on_gpu and "weights" in _offloaded(strategy)
    if shards == 1 and not fetched and strategy.distributed_type != "DEEPSPEED":
        # DDP keeps its buckets. Until the last micro-batch, which it reduces, gradients are tensors beside them.
        beside = strategy.distributed_type == "MULTI_GPU" and strategy.pp_size == 1
        accumulates = config.accumulation_steps(strategy.data_parallel_size) > 1
        return (share.trained - share.experts) * weight if beside and accumulates else 0.0
    casts = casts_before_gathers(strategy, config) and not counted["whole"].get("experts")
    in_layers = FP32 / 2 if casts else weight
    largest = max(share.trained_layer * in_layers, share.trained_outside * weight)
    # DeepSpeed: gradient buckets, and under ZeRO 3 the parameters that it keeps gathered.
    if strategy.distributed_type == "DEEPSPEED":
        bucket = _size(strategy, "reduce_bucket_size", _BUCKET, counted) * FP32
        bucket = bucket if on_gpu else min(bucket, share.trained * FP32)  # on a CPU, only pages that were written count
        if strategy.zero_stage < 3:
            bucket *= 2 if strategy.deepspeed_json.get("zero_optimization", {}).get("overlap_comm") is True else 1
            return bucket + (largest if strategy.zero_stage == 2 else 0.0)
        live = _size(strategy, "stage3_max_live_parameters", _LIVE, counted)
        every += teacher.weights - (share.trained - share.trained_outside) * (weight - in_layers)
        again = every / strategy.second_copies if strategy.second_copies > 1 else 0.0
        # It reduces a copy of the bucket, of which gloo makes another; measured on a CPU alone.
        bucket *= 1 if on_gpu else 3
        return every * min(1.0, live / (share.parameters + teacher.parameters)) + largest + bucket + again
    # FSDP: a pipeline stage stays gathered for the step; otherwise the root, two layers, and the largest gradient.
    if strategy.pp_size > 1:
        return every + share.trained * weight
    if keeps_gathered(strategy):
        casted = (share.trained - share.trained_outside) * (weight - in_layers)
        return every + teacher.weights - casted + largest  # the teacher too, to the end of the backward pass
    outside, gradient = share.trained_outside * weight + share.frozen_outside, share.trained_layer * weight
    # gloo reduces and scatters a copy of a unit's gradient; FSDP 2 has copied it into one tensor before.
    copies = 0 if on_gpu else strategy.fsdp_version
    backward = 2 * (share.trained_layer * in_layers + share.frozen_layer) + largest + copies * gradient
    return outside + max(backward, teacher.outside + 2 * teacher.layer)  # the teacher's are freed before


def _orthogonalized(config: TrainConfig, counted: Mapping[str, Any]) -> float:
    """Bytes that Muon takes for a full matrix in its step, when nothing else is gathered."""
    return counted["whole"].get("orthogonalized", 0) * FP32 if config.optim == "muon" else 0.0


def _size(strategy: Strategy, key: str, default: float, counted: Mapping[str, Any]) -> float:
    """A size in elements from the DeepSpeed JSON; `auto` as `trainers/parallel/zero.py` resolves it."""
    value = strategy.deepspeed_json.get("zero_optimization", {}).get(key, default)
    return float(counted["hidden"] ** 2 if value == "auto" else value)


def _offloaded(strategy: Strategy) -> list[str]:
    """What is offloaded from the device."""
    weights = strategy.offload_of("param") != "none" and strategy.sharded
    states = strategy.offload_of("optimizer") != "none"
    return ["weights"] * weights + ["gradients", "optimizer"] * states
