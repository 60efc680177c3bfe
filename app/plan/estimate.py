"""Which strategy suits a model and these devices: memory, traffic and speed of each, estimated before anything runs.

Weights, gradients, optimizer state and traffic follow from the model's shape and the mesh. What a micro-batch needs is
counted by `trainers/tools/memory_estimate.py`. The rest is assumed, and told in `ASSUMED`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainers.config.options import ConfigError, TrainConfig
from trainers.strategy.mesh import MeshSizes
from trainers.strategy.micro_batch import fit_micro_batch
from trainers.strategy.pipeline_schedules import SCHEDULES, balance, bubble, in_flight, stages_of
from trainers.strategy.strategy import Strategy, refusal, resolve
from trainers.strategy.traffic import FP32, Shape, predicted, weight_terms

GIB = 2**30
ROOM = {"gpu": 0.92, "cpu": 0.5}
"""Share of the memory that a plan may fill. Allocators leave gaps; that of a CPU most (`benchmarks/plan.py`)."""
CUDA_GIB, NCCL_GIB = 1.0, 0.5
"""What CUDA's context and libraries take of a GPU, and NCCL where there are several."""
LINKS = {"gpu": 25.0, "cpu": 1.0}
"""GB/s that a rank sends: PCIe 4 with 16 lanes, and gloo over loopback."""
NOMINAL = 3e14
"""FLOP/s of GPUs that are not here, for the order of the rows alone."""
ASSUMED = (
    "every row is max_length long; {free:.0%} of the memory stays free for what the allocator wastes; {cuda}a rank "
    "sends {link:g} GB/s (--link), gradients and gathered weights while it computes, but under ZeRO 1, ZeRO 2 and a "
    "pipeline; tokens/s is what matrix products and sending alone would allow: `tunesmith bench` measures"
)
_ADAM, _ADAM_8BIT = 8.0, 2 + 8 / 256
_LIVE, _BUCKET = 1e9, 5e8
"""DeepSpeed's own `stage3_max_live_parameters` and `reduce_bucket_size`: elements."""


@dataclass(frozen=True)
class Hardware:
    """What a plan is made for.

    Args:
        kind: `gpu` or `cpu`.
        processes: one on each GPU.
        memory: bytes that each may have.
        gpu_ids: of this machine; empty for a CPU, and for GPUs elsewhere.
        here: whether it is this machine, whose speed can be measured.
        host: bytes of host memory, None where it is not known.
        link: GB/s that a rank sends; None for those of `LINKS`.
    """

    kind: str
    processes: int
    memory: float
    gpu_ids: tuple[int, ...] = ()
    here: bool = True
    host: float | None = None
    link: float | None = None

    @property
    def speed(self) -> float:
        """GB/s that a rank sends."""
        return self.link or LINKS[self.kind]

    def assumed(self) -> str:
        """What a plan takes for granted."""
        cuda = f"CUDA takes {CUDA_GIB} GiB of a GPU and NCCL {NCCL_GIB} more; " if self.kind == "gpu" else ""
        return ASSUMED.format(free=1 - ROOM[self.kind], cuda=cuda, link=self.speed)


@dataclass
class Row:
    """One strategy: what it would need, or why it cannot be.

    Args:
        micro_batch: rows of a micro-batch on each rank.
        memory: bytes on the fullest rank by use; None when it cannot be told.
        host: bytes that rest in host memory instead.
        fits: None when it cannot be told.
        seconds: of a step.
        sent: bytes that a rank sends in a step.
        bubble: share of a step in which a pipeline's rank waits.
        reason: why it does not fit or cannot be told, or what is not estimated.
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
        """Bytes of all uses."""
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
    """What tensor and pipeline parallelism leave a rank, whole.

    Args:
        layers: how many.
        buffers: stages' inputs and gradients that it receives, in micro-batches of a step.
        trained: weights; `trained_layer` of one layer, `trained_outside` of embedding and head.
        frozen: bytes, likewise.
        scales: bytes of the scales of 4-bit weights.
        parameters: all of them.
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
        """The share of a rank with so many layers of `every`, and that share of embedding and head."""
        layer, frozen = case["trained_inside"] / every, case["frozen_inside"] / every
        outside, frozen_outside = case["trained_outside"] * ends, case["frozen_outside"] * ends
        parameters = (case["parameters"] - case["parameters_outside"]) * layers / every
        return cls(
            layers, buffers, layer * layers + outside, layer, outside, frozen * layers + frozen_outside, frozen,
            frozen_outside, case["scales"] * layers / every, parameters + case["parameters_outside"] * ends,
        )  # fmt: skip


def _shares(strategy: Strategy, counted: Mapping[str, Any], case: Mapping[str, Any]) -> list[_Share]:
    """The share of each rank, as `trainers/parallel/pipeline_split.py` cuts a pipeline; of one rank without any."""
    every, ranks, schedule = counted["layers"], strategy.pp_size, strategy.pp_schedule
    if ranks == 1:
        return [_Share.of(case, every, every, 1.0, 0)]
    total = ranks * SCHEDULES[schedule].chunks
    kept, found = balance(every, total, counted["layer_matmul"], counted["words"] * counted["hidden"]), []
    end = 1.0 if counted["tied"] else 0.5
    for rank in range(ranks):
        stages = stages_of(schedule, ranks, rank)
        ends = min(1.0, end * (0 in stages) + end * (total - 1 in stages))
        buffers = sum((stage > 0) + (stage < total - 1) for stage in stages)
        found.append(_Share.of(case, every, sum(len(kept[stage]) for stage in stages), ends, buffers))
    return found


Candidate = tuple[Strategy, TrainConfig]
"""A strategy resolved for its processes, and what it would train: the user's config, its micro-batch made to divide."""


def candidate(strategy: Strategy, config: TrainConfig, hardware: Hardware) -> Candidate:
    """The strategy on these devices, with the largest micro-batch up to the user's that divides the global batch.

    Raises:
        ConfigError: why it cannot train this there.
    """
    count = 1 if strategy.distributed_type == "NO" else hardware.processes
    resolved = resolve(strategy, count, config.mixed_precision, config.pp_size, config.pp_schedule)
    config = fit_micro_batch(config, resolved)
    if reason := refusal(resolved, config, hardware.kind == "gpu"):
        raise ConfigError(reason)
    return resolved, config


def case_of(strategy: Strategy, config: TrainConfig) -> str:
    """What `trainers/tools/memory_estimate.py` has to count: `tp:cp:sp:stages:rows`."""
    sizes, stages = strategy.sizes, strategy.pp_size * SCHEDULES[strategy.pp_schedule].chunks
    stages = stages if strategy.pp_size > 1 else 1
    return f"{sizes.tp}:{sizes.cp}:{sizes.sp}:{stages}:{config.per_device_train_batch_size}"


def plan_row(strategy: Strategy, config: TrainConfig, counted: Mapping[str, Any], hardware: Hardware) -> Row:
    """What a candidate would need.

    Args:
        strategy: as `candidate` has it, and
        config: likewise.
        counted: by `trainers/tools/memory_estimate.py`.
        hardware: where.
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
        row.reason = f"what a micro-batch needs cannot be counted: {case['why']}; measure it with `tunesmith bench`"
        return row
    each = [_memory(strategy, config, counted, case, one, hardware) for one in _shares(strategy, counted, case)]
    row.memory, row.host = max(each, key=lambda one: sum(one[0].values()))
    _judge(row, strategy, hardware)
    return row


def _tied_mistake(strategy: Strategy, counted: Mapping[str, Any]) -> str | None:
    """What `trainers/parallel/pipeline.py` refuses once it has the model."""
    both = SCHEDULES[strategy.pp_schedule].turns and strategy.pp_size > 1 and strategy.distributed_type == "FSDP"
    if not (both and counted["tied"] and counted["whole"]["trained_outside"]):
        return None
    return f"pp_schedule={strategy.pp_schedule}: one rank has embedding and head, one weight that FSDP cuts; use 1f1b"


def _judge(row: Row, strategy: Strategy, hardware: Hardware) -> None:
    """Says whether it fits, and where not why."""
    memory = row.memory or {}
    # Of a CPU's memory a run of one process has that of all.
    room = (
        hardware.memory * ROOM[hardware.kind] * (hardware.processes / row.sizes.world if hardware.kind == "cpu" else 1)
    )
    needed, place = row.host * row.sizes.world, "on NVMe" if strategy.offload == "nvme" else "in host memory"
    row.fits = row.total <= room
    if not row.fits:
        largest = max(memory, key=lambda name: memory[name])
        row.reason = (
            f"{row.total / GIB:.1f} GiB for {room / GIB:.1f} usable; most of it is {largest}, "
            f"{memory[largest] / GIB:.1f} GiB"
        )
    elif hardware.host is not None and strategy.offload == "cpu" and needed > hardware.host:
        row.fits = False
        row.reason = f"{needed / GIB:.1f} GiB rest in host memory, of which there are {hardware.host / GIB:.1f}"
    elif row.host:
        row.reason = f"{row.host / GIB:.1f} GiB per process rest {place}; what that costs in time is not estimated"


def _memory(
    strategy: Strategy, config: TrainConfig, counted: Mapping[str, Any], case: Mapping[str, Any], share: _Share,
    hardware: Hardware,
) -> tuple[dict[str, float], float]:  # fmt: skip
    """Bytes on a rank by use, and those that rest elsewhere."""
    sizes, on_gpu = strategy.sizes, hardware.kind == "gpu"
    micro_batches = config.accumulation_steps(strategy.data_parallel_size)
    held = in_flight(strategy.pp_schedule, strategy.pp_size, micro_batches) if strategy.pp_size > 1 else 1
    received = share.buffers * micro_batches * _slots(strategy, config) * counted["hidden"] * _carried(config)
    memory = dict.fromkeys(("weights", "gradients", "optimizer"), 0.0)
    resting = _resting(strategy, config, share)
    away = sum(resting.pop(name) for name in _offloaded(strategy)) if on_gpu else 0.0
    around = CUDA_GIB * GIB + (NCCL_GIB * GIB if sizes.world > 1 else 0) if on_gpu else counted["process_bytes"]
    memory |= {**resting, "gathered": _gathered(strategy, config, counted, share, on_gpu),
               "activations": case["fixed"] + case["layer"] * share.layers * held + received,
               "overhead": around}  # fmt: skip
    return memory, away


def _slots(strategy: Strategy, config: TrainConfig) -> int:
    """Tokens of a micro-batch on a rank, its rows full."""
    return -(-config.per_device_train_batch_size * config.max_length // strategy.sizes.parts)


def _numbers(config: TrainConfig) -> tuple[float, float]:
    """Bytes that a trained weight rests in, as its gradient does, and its optimizer state."""
    weight = 4.0 if config.master_weights or config.method != "full" else 2.0
    return weight, _ADAM if config.optim == "adamw" else _ADAM_8BIT


def _carried(config: TrainConfig) -> int:
    """Bytes of a number that goes from layer to layer: the embedding's dtype."""
    half = config.mixed_precision != "no" and (config.method != "full" or not config.master_weights)
    return 2 if half else 4


def _resting(strategy: Strategy, config: TrainConfig, share: _Share) -> dict[str, float]:
    """Bytes of weights, gradients and optimizer state between steps."""
    weight, state = _numbers(config)
    ways = _ways(strategy)
    cut = {"weights": ways, "gradients": ways, "optimizer": ways}
    if strategy.distributed_type == "DEEPSPEED":
        state += FP32  # it updates a flat copy
        cut = {name: ways if strategy.zero_stage >= stage else 1
               for name, stage in (("weights", 3), ("gradients", 2), ("optimizer", 1))}  # fmt: skip
    return {
        "weights": (share.trained * weight + share.frozen) / cut["weights"] + share.scales,
        "gradients": share.trained * weight / cut["gradients"],
        "optimizer": share.trained * state / cut["optimizer"],
    }


def _ways(strategy: Strategy) -> int:
    """Ranks over which weights, gradients or states are cut."""
    whole = strategy.distributed_type == "FSDP" and not strategy.sharded
    cuts = strategy.distributed_type in ("FSDP", "DEEPSPEED") and not whole
    return strategy.sizes.dp_shard * strategy.sizes.parts if cuts else 1


def _keeps(strategy: Strategy) -> bool:
    """Whether FSDP keeps what it has gathered until the backward pass."""
    fsdp = strategy.fsdp
    if strategy.fsdp_version == 1:
        return fsdp.get("fsdp_sharding_strategy") == "SHARD_GRAD_OP"
    return not fsdp.get("fsdp_reshard_after_forward", True)


def _gathered(
    strategy: Strategy, config: TrainConfig, counted: Mapping[str, Any], share: _Share, on_gpu: bool
) -> float:
    """Bytes of weights and gradients that are whole for a while, where they rest cut, and of DeepSpeed's buckets."""
    weight, ways = _numbers(config)[0], _ways(strategy)
    every = share.trained * weight + share.frozen
    fetched = on_gpu and "weights" in _offloaded(strategy)
    if ways == 1 and not fetched and strategy.distributed_type != "DEEPSPEED":
        return 0.0
    largest = max(share.trained_layer, share.trained_outside) * weight
    if strategy.distributed_type == "DEEPSPEED":
        bucket = _size(strategy, "reduce_bucket_size", _BUCKET, counted) * FP32
        bucket = bucket if on_gpu else min(bucket, share.trained * FP32)  # a CPU has what was written to alone
        if strategy.zero_stage < 3:
            bucket *= 2 if strategy.deepspeed_json.get("zero_optimization", {}).get("overlap_comm") is True else 1
            return bucket + (largest if strategy.zero_stage == 2 else 0.0)
        live = _size(strategy, "stage3_max_live_parameters", _LIVE, counted)
        again = every / strategy.second_copies if strategy.second_copies > 1 else 0.0
        return every * min(1.0, live / share.parameters) + largest + bucket + again
    if strategy.pp_size > 1:
        return every + share.trained * weight
    if _keeps(strategy):
        return every + largest
    outside = share.trained_outside * weight + share.frozen_outside
    return outside + 2 * (share.trained_layer * weight + share.frozen_layer) + largest


def _size(strategy: Strategy, key: str, default: float, counted: Mapping[str, Any]) -> float:
    """Elements, from the DeepSpeed JSON; `auto` as `trainers/parallel/zero.py` fills it in."""
    value = strategy.deepspeed_json.get("zero_optimization", {}).get(key, default)
    return float(counted["hidden"] ** 2 if value == "auto" else value)


def _offloaded(strategy: Strategy) -> list[str]:
    """What does not rest on the device."""
    weights = strategy.offload_of("param") != "none" and strategy.sharded
    states = strategy.offload_of("optimizer") != "none"
    return ["weights"] * weights + ["gradients", "optimizer"] * states


def _estimate_time(
    row: Row, strategy: Strategy, config: TrainConfig, counted: Mapping[str, Any], hardware: Hardware
) -> None:
    """Sets what is sent, the time of a step and the rate, from full rows."""
    sizes, kind = strategy.sizes, _traffic_of(strategy)
    micro_batches = config.accumulation_steps(strategy.data_parallel_size)
    chunks, step = SCHEDULES[strategy.pp_schedule].chunks, [(_slots(strategy, config),) * 2] * micro_batches
    shape = _shape(strategy, config, counted)
    row.sent = sum(part.wire for part in predicted(kind, sizes, chunks, shape, [step], 0))
    beside = sum(part.wire for part in weight_terms(kind, sizes, shape, 1, micro_batches))
    trained, frozen = counted["matmul_trained"], counted["matmul_frozen"]
    repeats = config.gradient_checkpointing and not config.selective_checkpointing
    again = 2 * counted["layer_matmul"] * counted["layers"] if repeats else 0
    tokens = config.global_batch_size * config.max_length
    devices = hardware.processes if hardware.kind == "cpu" else sizes.world  # a CPU's cores are shared out
    rate = (counted["flops_per_second"] or NOMINAL) * devices
    busy = tokens * (6 * trained + 4 * frozen + again) / rate / (1 - (row.bubble or 0.0))
    link = hardware.speed * 1e9
    if sizes.pp > 1 or kind.startswith("ZERO"):  # they send gradients when all is computed
        row.seconds = busy + row.sent / link
    else:
        row.seconds = max(busy, beside / link) + (row.sent - beside) / link
    known = counted["flops_per_second"] and counted["all_linear"] and strategy.offload == "none"
    row.tokens_per_second = tokens / row.seconds if known else None


def _traffic_of(strategy: Strategy) -> str:
    """What `predicted` calls it; ZeRO 3 gathers as FSDP does, but for what it keeps."""
    if strategy.zero_stage:
        return "FSDP" if strategy.zero_stage == 3 else f"ZERO{strategy.zero_stage}"
    if strategy.distributed_type == "FSDP":
        return "MULTI_GPU" if not strategy.sharded else "GRAD_OP" if _keeps(strategy) else "FSDP"
    return strategy.distributed_type


def _shape(strategy: Strategy, config: TrainConfig, counted: Mapping[str, Any]) -> Shape:
    """The shape of which `predicted` estimates traffic; tied: two ranks of a pipeline tell each other a gradient."""
    case = counted["whole"]
    trained, parameters = case["trained_inside"] + case["trained_outside"], case["parameters"]
    weight = _numbers(config)[0]
    whole = trained * weight + case["frozen_inside"] + case["frozen_outside"]
    tied = counted["tied"] and case["trained_outside"] > 0 and not SCHEDULES[strategy.pp_schedule].turns
    return Shape(
        parameters, int(case["vectors"]), case["parameters_outside"], counted["layers"], counted["hidden"],
        counted["heads"], counted["key_heads"], counted["head_size"], counted["words"], tied,
        trained=trained / parameters, gradient=weight, gathered=whole / parameters,
        number=4 if config.mixed_precision == "no" else 2, carried=_carried(config),
    )  # fmt: skip


def best_first(rows: Sequence[Row]) -> list[Row]:
    """What fits, the fastest first and without the host's help; then what cannot be told, does not fit, cannot run."""

    def place(row: Row) -> tuple[float, float]:
        if row.fits:
            return (0.5 if row.host else 0), row.seconds or 0.0
        if row.seconds is None:
            return 3, 0.0
        return (1, row.seconds) if row.fits is None else (2, row.total)

    return sorted(rows, key=place)


def told_size(text: str, option: str, unit: str, example: int) -> float:
    """A size from the command line.

    Raises:
        ConfigError: when it is none.
    """
    try:
        size = float(text)
    except ValueError:
        size = 0.0
    if not 0 < size <= 10_000:
        raise ConfigError(f"{option}={text[:40]!r} is no size in {unit}; write e.g. --{option} {example}")
    return size
