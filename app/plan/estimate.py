"""Estimates memory, traffic and speed of a model under each strategy before anything runs.

Weights, gradients, optimizer state and traffic follow from the model's shape and the mesh. The memory of a micro-batch
is counted by `trainers/tools/memory_estimate.py`. All else is assumed, as listed in `ASSUMED`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainers.config.mistakes import ConfigError
from trainers.config.options import TrainConfig
from trainers.strategy.mesh import MeshSizes
from trainers.strategy.micro_batch import fit_micro_batch
from trainers.strategy.pipeline_schedules import SCHEDULES, balance, bubble, in_flight, stages_of
from trainers.strategy.strategy import Strategy, refusal, resolve
from trainers.strategy.traffic import FP32, ModelSizes, predicted, weight_terms

GIB = 2**30
ROOM = {"gpu": 0.92, "cpu": 0.5}
"""Fraction of memory that a plan may fill; the rest is lost to allocators, most on a CPU (`benchmarks/plan.py`)."""
CUDA_GIB, NCCL_GIB = 1.0, 0.5
"""GiB that CUDA's context and libraries take on a GPU, and that NCCL takes if there are several GPUs."""
LINKS = {"gpu": 25.0, "cpu": 1.0}
"""GB/s that a rank sends: PCIe 4 with 16 lanes, and gloo over loopback."""
NOMINAL = 3e14
"""FLOP/s assumed for GPUs that are not on this machine; only used to order the rows."""
ASSUMED = (
    "every row is max_length long; {free:.0%} of the memory is reserved for allocator overhead; {cuda}a rank sends "
    "{link:g} GB/s (--link), overlapping computation except under ZeRO 1, ZeRO 2 and pipelines; tokens/s is an upper "
    "bound from matrix products and communication only: `tunesmith bench` measures it"
)
_ADAM, _ADAM_8BIT = 8.0, 2 + 8 / 256
_LIVE, _BUCKET = 1e9, 5e8
"""DeepSpeed's defaults of `stage3_max_live_parameters` and `reduce_bucket_size`, in elements."""


@dataclass(frozen=True)
class Hardware:
    """The hardware that a plan is made for.

    Args:
        kind: `gpu` or `cpu`.
        processes: number of processes; one per GPU.
        memory: bytes of memory per process.
        gpu_ids: GPU ids of this machine; empty for a CPU, and for GPUs elsewhere.
        is_local: whether it is this machine, whose speed can be measured.
        host: bytes of host memory; None if unknown.
        link: GB/s that a rank sends; None for the defaults in `LINKS`.
    """

    kind: str
    processes: int
    memory: float
    gpu_ids: tuple[int, ...] = ()
    is_local: bool = True
    host: float | None = None
    link: float | None = None

    @property
    def speed(self) -> float:
        """GB/s that a rank sends."""
        return self.link or LINKS[self.kind]

    def assumed(self) -> str:
        """The assumptions of a plan."""
        cuda = f"CUDA takes {CUDA_GIB} GiB per GPU and NCCL {NCCL_GIB} GiB more; " if self.kind == "gpu" else ""
        return ASSUMED.format(free=1 - ROOM[self.kind], cuda=cuda, link=self.speed)


@dataclass
class Row:
    """The estimate for one strategy, or why it cannot be used.

    Args:
        strategy: its name.
        sizes: its mesh.
        micro_batch: rows per micro-batch on each rank.
        memory: bytes on the fullest rank by use; None if unknown.
        host: bytes offloaded to host memory or disk, per rank.
        fits: whether it fits; None if unknown.
        seconds: time of a step.
        tokens_per_second: upper bound of the rate; None if unknown.
        sent: bytes that a rank sends in a step.
        bubble: fraction of a step in which a rank of a pipeline is idle.
        reason: why it does not fit or is unknown, or what is not estimated.
    """

    strategy: str
    sizes: MeshSizes
    micro_batch: int | None = None
    memory: dict[str, float] | None = None
    host: float = 0.0
    fits: bool | None = None
    seconds: float | None = None
    tokens_per_second: float | None = None
    sent: float | None = None
    bubble: float | None = None
    reason: str | None = None

    @property
    def total(self) -> float:
        """Bytes over all uses."""
        return sum(self.memory.values()) if self.memory else 0.0

    def as_json(self) -> dict[str, Any]:
        """Plain values, memory in GiB."""
        memory = {name: size / GIB for name, size in (self.memory or {}).items()} | {"total": self.total / GIB}
        return {
            "strategy": self.strategy, "world_size": self.sizes.world, "sizes": self.sizes.by_axis,
            "per_device_train_batch_size": self.micro_batch,
            "memory_gib": memory if self.memory else None, "host_gib": self.host / GIB, "fits": self.fits,
            "tokens_per_second": self.tokens_per_second, "sent_gib": None if self.sent is None else self.sent / GIB,
            "bubble": self.bubble, "reason": self.reason,
        }  # fmt: skip


@dataclass(frozen=True)
class _Share:
    """A rank's share of the model under tensor and pipeline parallelism, before data-parallel sharding.

    Args:
        layers: number of layers.
        buffers: number of receive buffers for stage inputs and gradients, per micro-batch of a step.
        trained: number of trained parameters; `trained_layer` in one layer, `trained_outside` in embedding and head.
        frozen: bytes of frozen weights; `frozen_layer` and `frozen_outside` likewise.
        scales: bytes of the scales of 4-bit weights.
        parameters: number of all parameters.
    """

    layers: int
    buffers: int
    trained: float
    trained_layer: float
    trained_outside: float
    frozen: float
    frozen_layer: float
    frozen_outside: float
    scales: float
    parameters: float

    @classmethod
    def of(cls, case: Mapping[str, Any], every: int, layers: int, ends: float, buffers: int) -> _Share:
        """The share of a rank with `layers` of `every` layers, and the fraction `ends` of embedding and head."""
        layer, frozen = case["trained_inside"] / every, case["frozen_inside"] / every
        outside, frozen_outside = case["trained_outside"] * ends, case["frozen_outside"] * ends
        parameters = (case["parameters"] - case["parameters_outside"]) * layers / every
        return cls(
            layers, buffers, layer * layers + outside, layer, outside, frozen * layers + frozen_outside, frozen,
            frozen_outside, case["scales"] * layers / every, parameters + case["parameters_outside"] * ends,
        )  # fmt: skip


def _shares(strategy: Strategy, counted: Mapping[str, Any], case: Mapping[str, Any]) -> list[_Share]:
    """The share of each rank of a pipeline, split as in `trainers/parallel/pipeline_split.py`; else a single share."""
    layers, ranks, schedule = counted["layers"], strategy.pp_size, strategy.pp_schedule
    if ranks == 1:
        return [_Share.of(case, layers, layers, 1.0, 0)]
    # The first stage has the embedding, the last the head: half of what is outside the layers each, or all if tied.
    total = ranks * SCHEDULES[schedule].chunks
    layers_of_stage, shares = balance(layers, total, counted["layer_matmul"], counted["words"] * counted["hidden"]), []
    end = 1.0 if counted["tied"] else 0.5
    for rank in range(ranks):
        stages = stages_of(schedule, ranks, rank)
        ends = min(1.0, end * (0 in stages) + end * (total - 1 in stages))
        buffers = sum((stage > 0) + (stage < total - 1) for stage in stages)
        shares.append(_Share.of(case, layers, sum(len(layers_of_stage[stage]) for stage in stages), ends, buffers))
    return shares


Candidate = tuple[Strategy, TrainConfig]
"""A strategy resolved for its processes, and the user's config with a micro-batch that divides the global batch."""


def candidate(strategy: Strategy, config: TrainConfig, hardware: Hardware) -> Candidate:
    """A strategy on this hardware, with the largest micro-batch up to the user's that divides the global batch.

    Raises:
        ConfigError: if the strategy cannot train the config on this hardware.
    """
    count = 1 if strategy.distributed_type == "NO" else hardware.processes
    resolved = resolve(strategy, count, config.mixed_precision, config.pp_size, config.pp_schedule)
    config = fit_micro_batch(config, resolved)
    if reason := refusal(resolved, config, hardware.kind == "gpu"):
        raise ConfigError(reason)
    return resolved, config


def case_of(strategy: Strategy, config: TrainConfig) -> str:
    """The case that `trainers/tools/memory_estimate.py` counts, as `tp:cp:sp:stages:rows`."""
    sizes, stages = strategy.sizes, strategy.pp_size * SCHEDULES[strategy.pp_schedule].chunks
    stages = stages if strategy.pp_size > 1 else 1
    return f"{sizes.tp}:{sizes.cp}:{sizes.sp}:{stages}:{config.per_device_train_batch_size}"


def plan_row(strategy: Strategy, config: TrainConfig, counted: Mapping[str, Any], hardware: Hardware) -> Row:
    """Estimates a candidate.

    Args:
        strategy: the strategy, from `candidate`.
        config: the config, from `candidate`.
        counted: the counts of `trainers/tools/memory_estimate.py`.
        hardware: the hardware to plan for.
    """
    case = counted["cases"][case_of(strategy, config)]
    row = Row(strategy.name, strategy.sizes, micro_batch=config.per_device_train_batch_size)
    if reason := case.get("refused") or _tied_mistake(strategy, counted):
        row.reason = reason
        return row
    if strategy.pp_size > 1:
        micro_batches = config.accumulation_steps(strategy.data_parallel_size)
        row.bubble = bubble(strategy.pp_schedule, strategy.pp_size, micro_batches)
    _estimate_time(row, strategy, config, counted, hardware)
    if case["layer"] is None:
        row.reason = f"the memory of a micro-batch cannot be counted: {case['why']}; measure it with `tunesmith bench`"
        return row
    shares = _shares(strategy, counted, case)
    by_rank = [_memory(strategy, config, counted, case, share, hardware) for share in shares]
    row.memory, row.host = max(by_rank, key=lambda rank: sum(rank[0].values()))
    _set_fits(row, strategy, hardware)
    return row


def _tied_mistake(strategy: Strategy, counted: Mapping[str, Any]) -> str | None:
    """The refusal that `trainers/parallel/pipeline.py` raises once it has the model, if any."""
    both = SCHEDULES[strategy.pp_schedule].turns and strategy.pp_size > 1 and strategy.distributed_type == "FSDP"
    if not (both and counted["tied"] and counted["whole"]["trained_outside"]):
        return None
    return (
        f"pp_schedule={strategy.pp_schedule}: one rank has both embedding and head, a shared weight that FSDP shards; "
        "use 1f1b"
    )


def _set_fits(row: Row, strategy: Strategy, hardware: Hardware) -> None:
    """Sets whether the row fits, and if not, why."""
    memory = row.memory or {}
    # On a CPU, a run of one process may use the memory of all.
    room = (
        hardware.memory * ROOM[hardware.kind] * (hardware.processes / row.sizes.world if hardware.kind == "cpu" else 1)
    )
    needed, location = row.host * row.sizes.world, "to NVMe" if strategy.offload == "nvme" else "to host memory"
    row.fits = row.total <= room
    if not row.fits:
        largest = max(memory, key=lambda name: memory[name])
        row.reason = (
            f"{row.total / GIB:.1f} GiB for {room / GIB:.1f} usable; most of it is {largest}, "
            f"{memory[largest] / GIB:.1f} GiB"
        )
    elif hardware.host is not None and strategy.offload == "cpu" and needed > hardware.host:
        row.fits = False
        row.reason = f"{needed / GIB:.1f} GiB are offloaded to host memory, which has {hardware.host / GIB:.1f} GiB"
    elif row.host:
        row.reason = (
            f"{row.host / GIB:.1f} GiB per process are offloaded {location}; the time this costs is not estimated"
        )


def _memory(
    strategy: Strategy, config: TrainConfig, counted: Mapping[str, Any], case: Mapping[str, Any], share: _Share,
    hardware: Hardware,
) -> tuple[dict[str, float], float]:  # fmt: skip
    """Bytes on a rank by use, and bytes offloaded from it."""
    sizes, on_gpu = strategy.sizes, hardware.kind == "gpu"
    micro_batches = config.accumulation_steps(strategy.data_parallel_size)
    # A pipeline stage keeps the activations of all micro-batches in flight, and a buffer for each received tensor.
    held = in_flight(strategy.pp_schedule, strategy.pp_size, micro_batches) if strategy.pp_size > 1 else 1
    received = share.buffers * micro_batches * _slots(strategy, config) * counted["hidden"] * _activation_bytes(config)
    memory = dict.fromkeys(("weights", "gradients", "optimizer"), 0.0)
    resting = _persistent(strategy, config, share)
    away = sum(resting.pop(name) for name in _offloaded(strategy)) if on_gpu else 0.0
    around = CUDA_GIB * GIB + (NCCL_GIB * GIB if sizes.world > 1 else 0) if on_gpu else counted["process_bytes"]
    memory |= {**resting, "gathered": _gathered(strategy, config, counted, share, on_gpu),
               "activations": case["fixed"] + case["layer"] * share.layers * held + received,
               "overhead": around}  # fmt: skip
    return memory, away


def _slots(strategy: Strategy, config: TrainConfig) -> int:
    """Token slots of a micro-batch on a rank."""
    return -(-config.per_device_train_batch_size * config.max_length // strategy.sizes.sequence_shards)


def _weight_and_state_bytes(config: TrainConfig) -> tuple[float, float]:
    """Bytes of a trained weight (and of its gradient), and of its optimizer state."""
    weight = 4.0 if config.master_weights or config.method != "full" else 2.0
    return weight, _ADAM if config.optim == "adamw" else _ADAM_8BIT


def _activation_bytes(config: TrainConfig) -> int:
    """Bytes of an activation passed between layers: those of the embedding's dtype."""
    half = config.mixed_precision != "no" and (config.method != "full" or not config.master_weights)
    return 2 if half else 4


def _persistent(strategy: Strategy, config: TrainConfig, share: _Share) -> dict[str, float]:
    """Bytes of weights, gradients and optimizer state between steps."""
    weight, state = _weight_and_state_bytes(config)
    shards = _shards(strategy)
    divisor = {"weights": shards, "gradients": shards, "optimizer": shards}
    if strategy.distributed_type == "DEEPSPEED":
        state += FP32  # DeepSpeed updates a flat fp32 copy
        divisor = {name: shards if strategy.zero_stage >= stage else 1
               for name, stage in (("weights", 3), ("gradients", 2), ("optimizer", 1))}  # fmt: skip
    return {
        "weights": (share.trained * weight + share.frozen) / divisor["weights"] + share.scales,
        "gradients": share.trained * weight / divisor["gradients"],
        "optimizer": share.trained * state / divisor["optimizer"],
    }


def _shards(strategy: Strategy) -> int:
    """Number of ranks over which weights, gradients or optimizer states are sharded."""
    unsharded = strategy.distributed_type == "FSDP" and not strategy.sharded
    cuts = strategy.distributed_type in ("FSDP", "DEEPSPEED") and not unsharded
    return strategy.sizes.dp_shard * strategy.sizes.sequence_shards if cuts else 1


def _keeps_gathered(strategy: Strategy) -> bool:
    """Whether FSDP keeps gathered weights until the backward pass."""
    fsdp = strategy.fsdp
    if strategy.fsdp_version == 1:
        return fsdp.get("fsdp_sharding_strategy") == "SHARD_GRAD_OP"
    return not fsdp.get("fsdp_reshard_after_forward", True)


def _gathered(
    strategy: Strategy, config: TrainConfig, counted: Mapping[str, Any], share: _Share, on_gpu: bool
) -> float:
    """Peak bytes of temporarily gathered weights and gradients, and of DeepSpeed's buckets."""
    weight, shards = _weight_and_state_bytes(config)[0], _shards(strategy)
    every = share.trained * weight + share.frozen
    fetched = on_gpu and "weights" in _offloaded(strategy)
    if shards == 1 and not fetched and strategy.distributed_type != "DEEPSPEED":
        return 0.0
    largest = max(share.trained_layer, share.trained_outside) * weight
    # DeepSpeed: gradient buckets, and under ZeRO 3 the parameters that it keeps gathered.
    if strategy.distributed_type == "DEEPSPEED":
        bucket = _size(strategy, "reduce_bucket_size", _BUCKET, counted) * FP32
        bucket = bucket if on_gpu else min(bucket, share.trained * FP32)  # on a CPU, only pages that were written count
        if strategy.zero_stage < 3:
            bucket *= 2 if strategy.deepspeed_json.get("zero_optimization", {}).get("overlap_comm") is True else 1
            return bucket + (largest if strategy.zero_stage == 2 else 0.0)
        live = _size(strategy, "stage3_max_live_parameters", _LIVE, counted)
        again = every / strategy.second_copies if strategy.second_copies > 1 else 0.0
        return every * min(1.0, live / share.parameters) + largest + bucket + again
    # FSDP: a pipeline stage stays gathered for the step; otherwise the root, two layers, and the largest gradient.
    if strategy.pp_size > 1:
        return every + share.trained * weight
    if _keeps_gathered(strategy):
        return every + largest
    outside = share.trained_outside * weight + share.frozen_outside
    return outside + 2 * (share.trained_layer * weight + share.frozen_layer) + largest


def _size(strategy: Strategy, key: str, default: float, counted: Mapping[str, Any]) -> float:
    """A size in elements from the DeepSpeed JSON; `auto` as `trainers/parallel/zero.py` resolves it."""
    value = strategy.deepspeed_json.get("zero_optimization", {}).get(key, default)
    return float(counted["hidden"] ** 2 if value == "auto" else value)


def _offloaded(strategy: Strategy) -> list[str]:
    """What is offloaded from the device."""
    weights = strategy.offload_of("param") != "none" and strategy.sharded
    states = strategy.offload_of("optimizer") != "none"
    return ["weights"] * weights + ["gradients", "optimizer"] * states


def _estimate_time(
    row: Row, strategy: Strategy, config: TrainConfig, counted: Mapping[str, Any], hardware: Hardware
) -> None:
    """Sets traffic, step time and rate, assuming full rows."""
    sizes, kind = strategy.sizes, _traffic_of(strategy)
    micro_batches = config.accumulation_steps(strategy.data_parallel_size)
    chunks, step = SCHEDULES[strategy.pp_schedule].chunks, [(_slots(strategy, config),) * 2] * micro_batches
    model = _model_sizes(strategy, config, counted)
    row.sent = sum(part.wire for part in predicted(kind, sizes, chunks, model, [step], 0))
    beside = sum(part.wire for part in weight_terms(kind, sizes, model, 1, micro_batches))
    # Compute time: 6 FLOPs per trained and 4 per frozen parameter and token, plus recomputed layers.
    trained, frozen = counted["matmul_trained"], counted["matmul_frozen"]
    repeats = config.gradient_checkpointing and not config.selective_checkpointing
    again = 2 * counted["layer_matmul"] * counted["layers"] if repeats else 0
    tokens = config.global_batch_size * config.max_length
    devices = hardware.processes if hardware.kind == "cpu" else sizes.world  # processes share the cores of a CPU
    rate = (counted["flops_per_second"] or NOMINAL) * devices
    busy = tokens * (6 * trained + 4 * frozen + again) / rate / (1 - (row.bubble or 0.0))
    # Communication time, overlapping computation where the strategy allows it.
    link = hardware.speed * 1e9
    if sizes.pp > 1 or kind.startswith("ZERO"):  # these send gradients only after the backward pass
        row.seconds = busy + row.sent / link
    else:
        row.seconds = max(busy, beside / link) + (row.sent - beside) / link
    known = counted["flops_per_second"] and counted["all_linear"] and strategy.offload == "none"
    row.tokens_per_second = tokens / row.seconds if known else None


def _traffic_of(strategy: Strategy) -> str:
    """The strategy's name for `predicted`; ZeRO 3 gathers as FSDP does, except for what it keeps."""
    if strategy.zero_stage:
        return "FSDP" if strategy.zero_stage == 3 else f"ZERO{strategy.zero_stage}"
    if strategy.distributed_type == "FSDP":
        return "MULTI_GPU" if not strategy.sharded else "GRAD_OP" if _keeps_gathered(strategy) else "FSDP"
    return strategy.distributed_type


def _model_sizes(strategy: Strategy, config: TrainConfig, counted: Mapping[str, Any]) -> ModelSizes:
    """The model's sizes for `predicted`; `tied` if two ranks of a pipeline exchange a gradient."""
    case = counted["whole"]
    trained, parameters = case["trained_inside"] + case["trained_outside"], case["parameters"]
    weight = _weight_and_state_bytes(config)[0]
    full_weights = trained * weight + case["frozen_inside"] + case["frozen_outside"]
    tied = counted["tied"] and case["trained_outside"] > 0 and not SCHEDULES[strategy.pp_schedule].turns
    return ModelSizes(
        parameters, int(case["vectors"]), case["parameters_outside"], counted["layers"], counted["hidden"],
        counted["heads"], counted["key_heads"], counted["head_size"], counted["words"], tied,
        trained_share=trained / parameters, gradient_bytes=weight, gathered_bytes=full_weights / parameters,
        matmul_bytes=4 if config.mixed_precision == "no" else 2, hidden_bytes=_activation_bytes(config),
    )  # fmt: skip


def best_first(rows: Sequence[Row]) -> list[Row]:
    """Sorts rows: those that fit (without offload first, then by speed), unknown, too large, impossible."""

    def sort_key(row: Row) -> tuple[float, float]:
        if row.fits:
            return (0.5 if row.host else 0), row.seconds or 0.0
        if row.seconds is None:
            return 3, 0.0
        return (1, row.seconds) if row.fits is None else (2, row.total)

    return sorted(rows, key=sort_key)


def parse_size(text: str, option: str, unit: str, example: int) -> float:
    """Parses a size from the command line.

    Raises:
        ConfigError: if it is not a positive number.
    """
    try:
        size = float(text)
    except ValueError:
        size = 0.0
    if not 0 < size <= 10_000:
        raise ConfigError(f"{option}={text[:40]!r} is not a size in {unit}; use e.g. --{option} {example}")
    return size
