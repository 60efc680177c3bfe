"""Estimates memory, traffic and speed of a model under each strategy before anything runs, and ranks the strategies.

Whatever is neither computed nor counted is assumed, as listed in `app.plan.hardware.ASSUMED`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from types import MappingProxyType
from typing import Any

from app.plan.cases import case_of, counted_case
from app.plan.hardware import GIB, ROOM, Hardware
from app.plan.host_memory import disk_bytes, host_phases, host_problem
from app.plan.memory import rank_memory, shares_of
from app.plan.speed import step_time
from trainers.config.byte_text import byte_text
from trainers.config.mistakes import ConfigError
from trainers.config.options import TrainConfig
from trainers.strategy.mesh import MeshSizes
from trainers.strategy.mesh_options import refuse_other_sizes, with_sizes
from trainers.strategy.micro_batch import fit_micro_batch
from trainers.strategy.pipeline_schedules import SCHEDULES, bubble
from trainers.strategy.strategy import Strategy, refusal, resolve

__all__ = ["Candidate", "Row", "best_first", "candidate", "case_of", "plan_row"]
CLOSE = 0.05
"""Rows whose times, or memory, differ by at most this share count as equal: no estimate is better."""


@dataclass
class Row:
    """The estimate for one strategy, or why it cannot be used.

    Args:
        strategy: its name.
        sizes: its mesh.
        micro_batch: rows per micro-batch on each rank.
        memory: bytes on the fullest rank by use; None if unknown.
        host: bytes offloaded to host memory or disk, per rank.
        host_phases: bytes of host memory that a machine needs, by phase of the run.
        disk: bytes of checkpoints and export.
        fits: whether it fits; None if unknown.
        seconds: time of a step.
        tokens_per_second: upper bound of the rate; None if unknown.
        sent: bytes that a rank sends in a step.
        bubble: fraction of a step in which a rank of a pipeline is idle.
        reason: why it does not fit or is unknown, or what is not estimated.
        largest: rows of the largest micro-batch that fits; None if none does, or unknown.
        rank: the order of strategies that do equally well: 0 for a plain process, 2 for what has a newer version.
        hours: time for the tokens of the plan.
        cost: price of that.
        command: the line that starts it.
    """

    strategy: str
    sizes: MeshSizes
    micro_batch: int | None = None
    memory: dict[str, float] | None = None
    host: float = 0.0
    host_phases: dict[str, float] = field(default_factory=dict)
    disk: float | None = None
    fits: bool | None = None
    seconds: float | None = None
    tokens_per_second: float | None = None
    sent: float | None = None
    bubble: float | None = None
    reason: str | None = None
    largest: int | None = None
    rank: int = 1
    hours: float | None = None
    cost: float | None = None
    command: str | None = None

    @property
    def total(self) -> float:
        """Bytes over all uses."""
        return sum(self.memory.values()) if self.memory else 0.0

    def as_json(self) -> dict[str, Any]:
        """Plain values, memory in GiB."""
        memory = {name: size / GIB for name, size in (self.memory or {}).items()} | {"total": self.total / GIB}
        host = max(self.host_phases.values(), default=None)
        return {
            "strategy": self.strategy, "world_size": self.sizes.world,
            "sizes": self.sizes.by_axis | ({"ep": self.sizes.ep} if self.sizes.ep > 1 else {}),
            "per_device_train_batch_size": self.micro_batch,
            "memory_gib": memory if self.memory else None, "fits": self.fits,
            "host_gib": None if host is None else host / GIB,
            "disk_gib": None if self.disk is None else self.disk / GIB,
            "tokens_per_second": self.tokens_per_second, "sent_gib": None if self.sent is None else self.sent / GIB,
            "bubble": self.bubble, "reason": self.reason, "largest_micro_batch": self.largest, "hours": self.hours,
            "cost": self.cost, "command": self.command,
        }  # fmt: skip


Candidate = tuple[Strategy, TrainConfig]
"""A strategy resolved for its processes, and the user's config with a micro-batch that divides the global batch."""


def candidate(
    strategy: Strategy, config: TrainConfig, hardware: Hardware, sizes: Mapping[str, int] = MappingProxyType({})
) -> Candidate:
    """A strategy on this hardware, with the largest micro-batch up to the user's that divides the global batch.

    Args:
        strategy: the strategy, as loaded.
        config: the user's config.
        hardware: the hardware to plan for.
        sizes: sizes of the mesh by axis, in place of those of the strategy's file.

    Raises:
        ConfigError: if the strategy cannot train the config on this hardware.
    """
    count = 1 if strategy.distributed_type == "NO" else hardware.processes
    pp_size = sizes.get("pp", config.pp_size)
    own = {axis: size for axis, size in sizes.items() if axis != "pp"}
    sized = with_sizes(strategy, own, pp_size)
    resolved = resolve(sized, count, config.mixed_precision, pp_size, config.pp_schedule)
    refuse_other_sizes(resolved, own)
    config = fit_micro_batch(config, resolved)
    if reason := refusal(resolved, config, hardware.kind == "gpu"):
        raise ConfigError(reason)
    return resolved, config


def plan_row(strategy: Strategy, config: TrainConfig, counted: Mapping[str, Any], hardware: Hardware) -> Row:
    """Estimates a candidate.

    Args:
        strategy: the strategy, from `candidate`.
        config: the config, from `candidate`.
        counted: the counts of `trainers/tools/memory_estimate.py`.
        hardware: the hardware to plan for.
    """
    case = counted_case(strategy, config, counted)
    row = Row(strategy.name, strategy.sizes, config.per_device_train_batch_size, rank=_rank(strategy))
    if reason := case.get("refused") or _tied_mistake(strategy, counted):
        row.reason = reason
        return row
    if strategy.pp_size > 1:
        micro_batches = config.accumulation_steps(strategy.data_parallel_size)
        row.bubble = bubble(strategy.pp_schedule, strategy.pp_size, micro_batches)
    cost = step_time(strategy, config, counted, row.bubble or 0.0, hardware)
    row.seconds, row.sent, row.tokens_per_second = cost.seconds, cost.sent, cost.tokens_per_second
    if case["layer"] is None:
        row.reason = f"the memory of a micro-batch cannot be counted: {case['why']}; measure it with `tunesmith bench`"
        return row
    shares = shares_of(strategy, config, counted, case)
    on_gpu = hardware.kind == "gpu"
    by_rank = [rank_memory(strategy, config, counted, case, share, on_gpu) for share in shares]
    row.memory, row.host = max(by_rank, key=lambda rank: sum(rank[0].values()))
    ranks = min(row.sizes.world, hardware.per_machine)
    in_host = 0.0 if strategy.offload == "nvme" else row.host
    resident = in_host if on_gpu else row.total - row.memory["overhead"]
    row.host_phases = host_phases(config, counted, resident, ranks, row.sizes.world)
    row.disk = disk_bytes(config, counted)
    _set_fits(row, strategy, hardware)
    return row


def _rank(strategy: Strategy) -> int:
    return 0 if strategy.distributed_type == "NO" else 2 if strategy.fsdp_version == 1 else 1


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
    # On a CPU, fewer processes of a machine may use the memory of all of its.
    shares = hardware.per_machine / min(row.sizes.world, hardware.per_machine) if hardware.kind == "cpu" else 1
    room = hardware.memory * ROOM[hardware.kind] * shares
    row.fits, notes = row.total <= room, []
    if not row.fits:
        largest = max(memory, key=lambda name: memory[name])
        notes.append(
            f"{byte_text(row.total)} for {byte_text(room)} usable; most of it is {largest}, "
            f"{byte_text(memory[largest])}"
        )
    elif problem := host_problem(row.host_phases, hardware.host):
        row.fits = False
        notes.append(problem)
    elif row.host:
        location = "to NVMe" if strategy.offload == "nvme" else "to host memory"
        notes.append(
            f"{byte_text(row.host)} per process are offloaded {location}; the time this costs is not estimated"
        )
        if hardware.host is None:
            most = max(row.host_phases.values())
            notes.append(
                f"whether a machine has the {byte_text(most)} of host memory is unknown: say --host_memory GiB"
            )
    if row.disk and hardware.disk is not None and row.disk > hardware.disk:
        free = f"{byte_text(hardware.disk)} are free"
        notes.append(f"checkpoints and export take {byte_text(row.disk)} of disk, of which {free}")
    row.reason = "; ".join(notes) or None


def best_first(rows: Sequence[Row]) -> list[Row]:
    """Sorts rows: those that fit in the devices' memory, those that offload, unknown, too large, impossible.

    Of rows that fit, the fastest come first. Among equally fast ones, the one that needs the least memory comes first,
    and among those that need equally much, the one with the fewest axes, the lowest rank, and that sends the least.
    """
    classes: list[list[Row]] = [[] for _ in range(5)]
    for row in rows:
        if row.seconds is None:
            classes[4].append(row)
        elif row.fits:
            classes[1 if row.host else 0].append(row)
        else:
            classes[2 if row.fits is None else 3].append(row)
    too_large = sorted(classes[3], key=lambda row: row.total)
    return [*chain.from_iterable(map(_by_speed, classes[:3])), *too_large, *classes[4]]


def _by_speed(rows: Sequence[Row]) -> list[Row]:
    """Sorts rows by time, equally fast ones by memory, and those that need equally much by simplicity."""
    by_memory = [_groups(equal, lambda row: row.total) for equal in _groups(rows, lambda row: row.seconds or 0.0)]
    return [row for groups in by_memory for group in groups for row in sorted(group, key=_simplicity)]


def _simplicity(row: Row) -> tuple[int, int, float, str]:
    axes = sum(size > 1 for size in (*row.sizes.by_axis.values(), row.sizes.ep))
    return axes, row.rank, row.sent or 0.0, row.strategy


def _groups(rows: Sequence[Row], key: Callable[[Row], float]) -> list[list[Row]]:
    """Rows in ascending order, in groups of those that exceed the first of their group by at most `CLOSE`."""
    groups: list[list[Row]] = []
    for row in sorted(rows, key=key):
        if groups and key(row) <= key(groups[-1][0]) * (1 + CLOSE):
            groups[-1].append(row)
        else:
            groups.append([row])
    return groups
