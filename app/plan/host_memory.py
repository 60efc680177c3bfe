"""Estimates the host memory of a machine, by phase of a run, and the disk space of the run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from app.plan.memory import TeacherBytes, weight_bytes
from trainers.config.byte_text import byte_text
from trainers.config.options import TrainConfig
from trainers.run.disk import Tensor, bytes_needed

_MANY_STEPS = 2**31
"""Steps of a run that ends by its epochs: enough for all checkpoints that are kept."""


def host_phases(
    config: TrainConfig, counted: Mapping[str, Any], resident: float, ranks: int, world: int
) -> dict[str, float]:
    """Bytes of host memory that a machine needs in each phase of a run.

    Args:
        config: the run's config.
        counted: the counts of `trainers/tools/memory_estimate.py`.
        resident: bytes that a rank keeps in host memory while it trains: what it offloads, or everything on a CPU.
        ranks: ranks on the machine.
        world: ranks on all machines.
    """
    full, process = counted["whole"], counted["process_bytes"]
    weight = weight_bytes(config)
    trained = full["trained_inside"] + full["trained_outside"]
    model = trained * weight + full["frozen_inside"] + full["frozen_outside"] + full["scales"]
    # A rank reads only what it keeps, straight to where it keeps it, but has all adapters for a moment. Random weights
    # are drawn by every rank before they are cut. A teacher is read, not exported, and in no checkpoint.
    adapters = 0.0 if config.method == "full" else trained * weight
    teacher = TeacherBytes.of(counted).weights
    loaded = model + min(resident, teacher) if config.random_init else adapters + min(resident, model + teacher)
    # The ranks own the full tensors of a checkpoint in turn: each copies its own, and writes while training goes on.
    state = config.saved_state_bytes(full["trained_inside"], full["trained_outside"])
    checkpoint = (trained * weight + state) * ranks / world
    # Rank 0 rebuilds the full model after training, in fp32 if adapters are merged into it.
    exported = full["parameters"] * 4.0 if config.merge_adapter else model
    return {
        "loading": ranks * (process + loaded),
        "training": ranks * (process + resident),
        "saving": ranks * (process + resident) + checkpoint,
        "exporting": ranks * process + exported,
    }


def disk_bytes(config: TrainConfig, counted: Mapping[str, Any]) -> float:
    """Bytes of the checkpoints that are on disk at once, and of the export."""
    full = counted["whole"]
    model = [Tensor("model", (int(full["parameters"]),), counted["stored_dtype"])]
    trained = int(full["trained_inside"] + full["trained_outside"])
    return float(bytes_needed(config, model, config.max_steps or _MANY_STEPS, trained))


def host_problem(phases: Mapping[str, float], memory: float | None) -> str | None:
    """Why the host memory of a machine does not suffice; None if it does or is unknown.

    Args:
        phases: the result of `host_phases`.
        memory: bytes of host memory; None if unknown.
    """
    phase = max(phases, key=lambda name: phases[name])
    if memory is None or phases[phase] <= memory:
        return None
    needed, present = byte_text(phases[phase]), byte_text(memory)
    return f"{needed} of host memory for {present} on a machine, most of it while {phase}"
