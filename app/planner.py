"""Which strategy suits a model and these devices: the memory, traffic and speed of each, reckoned before anything runs.

Weights, gradients, optimizer state and traffic follow from the model's shape and the mesh. What a micro-batch needs is
counted by `trainers/weigh.py`. The rest is assumed, and told in `ASSUMED`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainers.config import ConfigError, TrainConfig
from trainers.parallel.mesh import MeshSizes
from trainers.parallel.stages import SCHEDULES, bubble, in_flight
from trainers.parallel.traffic import FP32, Shape, predicted, weight_terms
from trainers.strategies import Strategy, refusal, resolve

GIB = 2**30
ROOM = {"gpu": 0.92, "cpu": 0.55}
"""Share of the memory that a plan may fill. Allocators leave gaps; that of a CPU most (`benchmarks/plan.py`)."""
CUDA_GIB, NCCL_GIB = 1.0, 0.5
"""What CUDA's context and libraries take of a GPU, and NCCL where there are several."""
LINKS = {"gpu": 25e9, "cpu": 1e9}
"""Bytes per second that a rank sends: PCIe 4 with 16 lanes, and gloo over loopback."""
NOMINAL = 3e14
"""FLOP/s of GPUs that are not here, for the order of the rows alone."""
ASSUMED = (
    f"every row is max_length long; {1 - ROOM['gpu']:.0%} of a GPU's memory stays free and {1 - ROOM['cpu']:.0%} of a "
    f"CPU's, whose allocator keeps gaps; CUDA takes {CUDA_GIB} GiB of a GPU and NCCL {NCCL_GIB} more; a rank sends "
    f"{LINKS['gpu'] / 1e9:.0f} GB/s ({LINKS['cpu'] / 1e9:.0f} GB/s on a CPU), gradients and gathered weights while it "
    "computes; tokens/s is what matrix products and sending alone would allow: `tunesmith bench` measures"
)
_ADAM, _ADAM_8BIT = 8.0, 2 + 8 / 256
_LIVE = 10**9
"""DeepSpeed's own `stage3_max_live_parameters`."""


@dataclass(frozen=True)
class Hardware:
    """What a plan is made for.

    Args:
        kind: `gpu` or `cpu`.
        processes: one on each GPU.
        memory: bytes that each may have.
        here: whether it is this machine, whose speed can be measured.
    """

    kind: str
    processes: int
    memory: float
    here: bool = True


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
        reason: why it does not fit or cannot be told, or what is not reckoned.
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
    """What tensor and pipeline parallelism leave the fullest rank, whole.

    Args:
        layers: how many.
        trained: weights; `trained_layer` of one layer, `trained_outside` of embedding and head.
        frozen: bytes, likewise.
    """

    layers: int
    trained: float
    trained_layer: float
    trained_outside: float
    frozen: float
    frozen_layer: float
    frozen_outside: float

    @classmethod
    def of(cls, strategy: Strategy, counted: Mapping[str, Any], case: Mapping[str, Any]) -> _Share:
        stages = strategy.pp_size * SCHEDULES[strategy.pp_schedule].chunks
        layers = -(-counted["layers"] // stages) * SCHEDULES[strategy.pp_schedule].chunks
        ends = 1.0 if counted["tied"] or strategy.pp_size == 1 else 0.5  # first and last stage have one of two
        every = counted["layers"]
        sizes = []
        for kind in ("trained", "frozen"):
            layer, outside = case[f"{kind}_inside"] / every, case[f"{kind}_outside"] * ends
            sizes += [layer * layers + outside, layer, outside]
        return cls(layers, *sizes)


Candidate = tuple[Strategy, TrainConfig]
"""A strategy resolved for its processes, and what it would train: the user's config, its micro-batch made to divide."""


def candidate(strategy: Strategy, config: TrainConfig, hardware: Hardware) -> Candidate:
    """The strategy on these devices, with the largest micro-batch up to the user's that divides the global batch.

    Raises:
        ConfigError: why it cannot train this there.
    """
    alone = strategy.distributed_type == "NO"
    pipeline = (None, None) if alone else (config.pp_size, config.pp_schedule)
    count = 1 if alone else hardware.processes
    resolved = resolve(strategy, count, config.mixed_precision, *pipeline)
    each, over = divmod(config.global_batch_size, resolved.data_parallel_size)
    if not over:
        asked = min(config.per_device_train_batch_size, each // resolved.pp_size or 1)
        micro = next(size for size in range(asked, 0, -1) if each % size == 0)
        config = config.model_copy(update={"per_device_train_batch_size": micro})
    if reason := refusal(resolved, config, hardware.kind == "gpu"):
        raise ConfigError(reason)
    return resolved, config


def case_of(strategy: Strategy, config: TrainConfig) -> tuple[int, int, int]:
    """What `trainers/weigh.py` has to count: `tp`, parts of rows, rows of a micro-batch."""
    return strategy.sizes.tp, strategy.sizes.parts, config.per_device_train_batch_size


def plan_row(strategy: Strategy, config: TrainConfig, counted: Mapping[str, Any], hardware: Hardware) -> Row:
    """What a candidate would need.

    Args:
        strategy: as `candidate` has it, and
        config: likewise.
        counted: by `trainers/weigh.py`.
        hardware: where.
    """
    sizes = strategy.sizes
    row = Row(strategy.name, sizes, micro_batch=config.per_device_train_batch_size)
    micro_batches = config.accumulation_steps(strategy.data_parallel_size)
    if strategy.pp_size > 1:
        row.bubble = bubble(strategy.pp_schedule, strategy.pp_size, micro_batches)
    case = counted["cases"][":".join(map(str, case_of(strategy, config)))]
    _reckon_time(row, strategy, config, counted, hardware)
    if case["layer"] is None:
        row.reason = f"what a micro-batch needs cannot be counted: {case['why']}; measure it with `tunesmith bench`"
        return row
    share = _Share.of(strategy, counted, case)
    held = in_flight(strategy.pp_schedule, strategy.pp_size, micro_batches) if strategy.pp_size > 1 else 1
    resting, gathered = _resting(strategy, config, share), _gathered(strategy, config, share)
    row.host = sum(resting.pop(name) for name in _offloaded(strategy)) if hardware.kind == "gpu" else 0.0
    around = CUDA_GIB * GIB + (NCCL_GIB * GIB if sizes.world > 1 else 0) if hardware.kind == "gpu" else 0
    activations = case["fixed"] + case["layer"] * share.layers * held
    row.memory = {"weights": 0.0, "gradients": 0.0, "optimizer": 0.0, **resting, "gathered": gathered,
                  "activations": activations, "overhead": around or counted["process_bytes"]}  # fmt: skip
    room = hardware.memory * ROOM[hardware.kind]
    row.fits = row.total <= room
    if row.fits and row.host:
        row.reason = (
            f"{row.host / GIB:.1f} GiB per process rest in host memory; what that costs in time is not reckoned"
        )
    if not row.fits:
        largest = max(row.memory, key=lambda name: (row.memory or {})[name])
        row.reason = (
            f"{row.total / GIB:.1f} GiB for {room / GIB:.1f} usable; most of it is {largest}, "
            f"{row.memory[largest] / GIB:.1f} GiB"
        )
    return row


def _numbers(config: TrainConfig) -> tuple[float, float]:
    """Bytes that a trained weight rests in, and its optimizer state."""
    weight = 4.0 if config.master_weights or config.method != "full" else 2.0
    return weight, _ADAM if config.optim == "adamw" else _ADAM_8BIT


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
        "weights": (share.trained * weight + share.frozen) / cut["weights"],
        "gradients": share.trained * weight / cut["gradients"],
        "optimizer": share.trained * state / cut["optimizer"],
    }


def _ways(strategy: Strategy) -> int:
    """Ranks over which weights, gradients or states are cut."""
    whole = strategy.distributed_type == "FSDP" and not strategy.sharded
    cuts = strategy.distributed_type in ("FSDP", "DEEPSPEED") and not whole
    return strategy.sizes.dp_shard * strategy.sizes.parts if cuts else 1


def _gathered(strategy: Strategy, config: TrainConfig, share: _Share) -> float:
    """Bytes of weights and gradients that are whole for a while, where they rest cut."""
    weight, ways = _numbers(config)[0], _ways(strategy)
    every = share.trained * weight + share.frozen
    if not strategy.sharded or ways == 1:
        return 0.0
    if strategy.distributed_type == "DEEPSPEED":
        return min(every, _LIVE * weight) + share.trained_layer * FP32
    if strategy.pp_size > 1:
        return every + share.trained * weight
    outside = share.trained_outside * weight + share.frozen_outside
    gradients = max(share.trained_layer, share.trained_outside) * weight
    if strategy.fsdp.get("fsdp_sharding_strategy") == "SHARD_GRAD_OP" or not strategy.fsdp.get(
        "fsdp_reshard_after_forward", True
    ):
        return every + gradients
    return outside + 2 * (share.trained_layer * weight + share.frozen_layer) + gradients


def _offloaded(strategy: Strategy) -> tuple[str, ...]:
    """What rests in host memory."""
    if strategy.offload == "none":
        return ()
    return ("weights", "gradients", "optimizer") if strategy.sharded else ("gradients", "optimizer")


def _reckon_time(
    row: Row, strategy: Strategy, config: TrainConfig, counted: Mapping[str, Any], hardware: Hardware
) -> None:
    """Sets what is sent, the time of a step and the rate, from full rows."""
    sizes, length = strategy.sizes, config.max_length
    micro_batches = config.accumulation_steps(strategy.data_parallel_size)
    slots = -(-config.per_device_train_batch_size * length // sizes.parts)
    kind = f"ZERO{strategy.zero_stage}" if strategy.zero_stage in (1, 2) else strategy.distributed_type
    kind = "FSDP" if strategy.zero_stage == 3 else kind  # it gathers alike, but for what it keeps
    chunks, step = SCHEDULES[strategy.pp_schedule].chunks, [(slots, slots)] * micro_batches
    shape = _shape(config, counted)
    row.sent = sum(part.wire for part in predicted(kind, sizes, chunks, shape, [step], 0))
    beside = sum(part.wire for part in weight_terms(kind, sizes, shape, 1, micro_batches))
    trained, frozen = counted["matmul_trained"], counted["matmul_frozen"]
    again = 2 * (trained + frozen) if config.gradient_checkpointing else 0
    tokens = config.global_batch_size * length
    devices = hardware.processes if hardware.kind == "cpu" else sizes.world  # a CPU's cores are shared out
    rate = (counted["flops_per_second"] if hardware.here else NOMINAL) * devices
    busy = tokens * (6 * trained + 4 * frozen + again) / rate / (1 - (row.bubble or 0.0))
    link = LINKS[hardware.kind]
    row.seconds = max(busy, beside / link) + (row.sent - beside) / link
    row.tokens_per_second = tokens / row.seconds if hardware.here and strategy.offload == "none" else None


def _shape(config: TrainConfig, counted: Mapping[str, Any]) -> Shape:
    """The shape of which `predicted` reckons traffic."""
    case = counted["whole"]
    trained, parameters = case["trained_inside"] + case["trained_outside"], case["parameters"]
    weight = _numbers(config)[0]
    whole = trained * weight + case["frozen_inside"] + case["frozen_outside"]
    return Shape(
        parameters, int(case["vectors"]), case["parameters_outside"], counted["layers"], counted["hidden"],
        counted["heads"], counted["key_heads"], counted["head_size"], counted["words"], counted["tied"],
        trained=trained / parameters, gathered=whole / parameters, number=4 if config.mixed_precision == "no" else 2,
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


def told_memory(text: str) -> float:
    """Bytes of `--gpu_memory`, which is in GiB.

    Raises:
        ConfigError: when it is no size.
    """
    try:
        size = float(text)
    except ValueError:
        size = 0.0
    if not 0 < size <= 10_000:
        raise ConfigError(f"gpu_memory={text[:40]!r} is no size in GiB; write e.g. --gpu_memory 80")
    return size * GIB
