"""Estimates the traffic and the time of a step, from matrix products and communication only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, prod
from typing import Any

from app.plan.hardware import LATENCIES, NOMINAL, Hardware
from app.plan.memory import TeacherBytes, activation_bytes, keeps_gathered, token_slots, weight_bytes
from trainers.config.options import TrainConfig
from trainers.strategy.mesh import AXES, MeshSizes
from trainers.strategy.pipeline_schedules import SCHEDULES
from trainers.strategy.strategy import Strategy
from trainers.strategy.traffic import (
    ModelSizes,
    Term,
    activation_terms,
    casts_before_gathers,
    muon_terms,
    teacher_terms,
    weight_terms,
)


@dataclass(frozen=True)
class StepTime:
    """The cost of a step.

    Args:
        seconds: its duration.
        sent: bytes that a rank sends.
        tokens_per_second: upper bound of the rate; None if unknown.
    """

    seconds: float
    sent: float
    tokens_per_second: float | None


def step_time(
    strategy: Strategy, config: TrainConfig, counted: Mapping[str, Any], bubble: float, hardware: Hardware
) -> StepTime:
    """Estimates the cost of a step, assuming full rows.

    Args:
        strategy: the strategy, from `app.plan.estimate.candidate`.
        config: the config, likewise.
        counted: the counts of `trainers/tools/memory_estimate.py`.
        bubble: fraction of a step in which a rank of a pipeline is idle.
        hardware: the hardware to plan for.
    """
    sizes, kind = strategy.sizes, traffic_kind(strategy)
    micro_batches = config.accumulation_steps(strategy.data_parallel_size)
    chunks, step = SCHEDULES[strategy.pp_schedule].chunks, [(token_slots(strategy, config),) * 2] * micro_batches
    model = _model_sizes(strategy, config, counted)
    teacher, beside = counted.get("teacher"), weight_terms(kind, sizes, model, 1, micro_batches)
    if teacher:
        beside += teacher_terms(
            kind, sizes, TeacherBytes.of(counted, sizes.tp).weights, teacher["layers"], micro_batches
        )
    in_update = muon_terms(kind, sizes, counted["whole"]) if config.optim == "muon" else []
    between = activation_terms(kind, sizes, chunks, model, [step], 0)
    sent = sum(part.wire for part in [*beside, *in_update, *between])
    # Ranks of a pipeline wait for what others compute and for what they send.
    overlapped, exposed = _seconds(beside, sizes, hardware), _seconds(between, sizes, hardware) / (1 - bubble)
    exposed += _seconds(in_update, sizes, hardware)  # after the backward pass
    # Compute time: FLOPs per token and parameter, 6 if trained, 4 if frozen, 2 of a teacher, plus recomputed layers.
    trained, frozen = counted["matmul_trained"], counted["matmul_frozen"]
    repeats = config.gradient_checkpointing and not config.selective_checkpointing
    again = 2 * counted["layer_matmul"] * counted["layers"] if repeats else 0
    tokens = config.global_batch_size * config.example_tokens
    devices = sizes.world
    if hardware.kind == "cpu":  # however few processes share the cores of a machine, they use all
        devices = counted.get("timed_processes", hardware.per_machine) * ceil(sizes.world / hardware.per_machine)
    rate = (hardware.flops or counted["flops_per_second"] or NOMINAL) * devices
    once = 2 * teacher["matmul"] if teacher else 0
    busy = tokens * (6 * trained + 4 * frozen + once + again) / rate / (1 - bubble)
    # Communication time, overlapping computation where the strategy allows it.
    if sizes.pp > 1 or kind.startswith("ZERO"):  # these send gradients only after the backward pass
        seconds = busy + overlapped + exposed
    else:
        seconds = max(busy, overlapped) + exposed
    # On this machine, a rate that could not be measured (fp8) is unknown; that of GPUs elsewhere is stated as assumed.
    measured = counted["flops_per_second"] or hardware.flops or not hardware.is_local
    known = measured and counted["all_linear"] and strategy.offload == "none"
    return StepTime(seconds, sent, tokens / seconds if known else None)


def _seconds(terms: Sequence[Term], sizes: MeshSizes, hardware: Hardware) -> float:
    """The time that collectives take one after the other."""
    latency = LATENCIES[hardware.kind]
    return sum(part.wire / (link_speed(part, sizes, hardware) * 1e9) + part.calls * latency for part in terms)


def link_speed(part: Term, sizes: MeshSizes, hardware: Hardware) -> float:
    """GB/s at which each rank sends what a collective needs.

    The mesh's inner axes stay inside a machine. A collective that spans machines runs in as many rings as it has ranks
    in each machine, every ring over another rank's link to the network; an all-to-all or a send uses its own rank's.
    """
    if part.axes == ("ep",):
        local = hardware.machines == 1 or hardware.per_machine % sizes.ep == 0
        return hardware.speed if local else min(hardware.speed, hardware.machine_speed)
    order = [axis for axis in AXES if axis in part.axes]
    inner = prod(getattr(sizes, axis) for axis in AXES[AXES.index(order[-1]) + 1 :])
    span = prod(getattr(sizes, axis) for axis in AXES[AXES.index(order[0]) :])
    if hardware.machines == 1 or span <= hardware.per_machine:
        return hardware.speed
    rings = 1 if part.collective in ("all-to-all", "send") else max(1, hardware.per_machine // inner)
    return min(hardware.speed, hardware.machine_speed * rings)


def traffic_kind(strategy: Strategy) -> str:
    """The strategy's name for `predicted`."""
    if strategy.zero_stage:
        return f"ZERO{strategy.zero_stage}"
    if strategy.distributed_type == "FSDP":
        return "MULTI_GPU" if not strategy.sharded else "GRAD_OP" if keeps_gathered(strategy) else "FSDP"
    return strategy.distributed_type


def _model_sizes(strategy: Strategy, config: TrainConfig, counted: Mapping[str, Any]) -> ModelSizes:
    """The model's sizes for `predicted`; `tied` if two ranks of a pipeline exchange a gradient."""
    case = counted["whole"]
    trained, parameters = case["trained_inside"] + case["trained_outside"], case["parameters"]
    weight = weight_bytes(config)
    full_weights = trained * weight + case["frozen_inside"] + case["frozen_outside"]
    tied = counted["tied"] and case["trained_outside"] > 0 and not SCHEDULES[strategy.pp_schedule].turns
    return ModelSizes(
        parameters, int(case["vectors"]), case["parameters_outside"], counted["layers"], counted["hidden"],
        counted["heads"], counted["key_heads"], counted["head_size"], counted["words"], tied,
        trained_share=trained / parameters, gradient_bytes=weight, gathered_bytes=full_weights / parameters,
        casts_layers=casts_before_gathers(strategy, config) and not case.get("experts"),
        divides_tokens=counted.get("divides_tokens", True),
        matmul_bytes=4 if config.mixed_precision == "no" else 2, hidden_bytes=activation_bytes(config),
        experts=case.get("experts_trained", 0), expert_layers=counted.get("expert_layers", 0),
        chosen=counted.get("chosen", 0), persistent=case.get("persistent", 0),
        persistent_weights=case.get("persistent_weights", 0),
    )  # fmt: skip
