"""Pipeline schedules: layers per stage, stages per rank, micro-batches and idle time. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_TIMES = 3  # phases assumed to take equally long: forward, input gradients, weight gradients


@dataclass(frozen=True)
class Schedule:
    """An order of the forward and backward passes of a step.

    Args:
        name: Class in `torch.distributed.pipelining`.
        chunks: Stages per rank.
        turns: Whether second stages are assigned in reverse order (V shape), so that rank 0 also holds the last stage.
        splits: Whether weight gradients are computed separately from input gradients, to fill idle time.
    """

    name: str
    chunks: int = 1
    turns: bool = False
    splits: bool = False


SCHEDULES = {
    "gpipe": Schedule("ScheduleGPipe"),
    "1f1b": Schedule("Schedule1F1B"),
    "interleaved": Schedule("ScheduleInterleaved1F1B", chunks=2),
    "zero_bubble": Schedule("ScheduleInterleavedZeroBubble", chunks=2, splits=True),
    "zbv": Schedule("ScheduleZBVZeroBubble", chunks=2, turns=True, splits=True),
}


def rank_of(schedule: str, ranks: int, stage: int) -> int:
    """Returns the rank, within its pipeline, that holds a stage."""
    around, index = divmod(stage, ranks)
    return ranks - 1 - index if SCHEDULES[schedule].turns and around % 2 else index


def stages_of(schedule: str, ranks: int, rank: int) -> list[int]:
    """Returns the stages that a rank of a pipeline holds, in order."""
    stages = ranks * SCHEDULES[schedule].chunks
    return [stage for stage in range(stages) if rank_of(schedule, ranks, stage) == rank]


def balance(layers: int, stages: int, layer_cost: float, head_cost: float) -> list[range]:
    """Assigns layers to stages such that the cost of the most expensive stage is minimal.

    The embedding is a look-up and counts as free; the last stage also computes the head. Of the other stages, the later
    ones get the leftover layers, because earlier stages keep more micro-batches in memory.

    Args:
        layers: Number of decoder layers.
        stages: Number of stages; each gets at least one layer.
        layer_cost: Cost of a layer, in any unit.
        head_cost: Cost of the head, in the same unit.

    Returns:
        The range of layers of each stage.

    Raises:
        ValueError: If there are more stages than layers.
    """
    if stages > layers:
        raise ValueError(f"{stages} stages for {layers} layers; use at most {layers} stages")
    if stages == 1:
        return [range(layers)]
    others = stages - 1

    def dearest(last: int) -> tuple[float, int]:
        return max(-(-(layers - last) // others) * layer_cost, last * layer_cost + head_cost), -last

    # Only the last stage differs from the others: try every number of layers for it, and split the rest evenly.
    last = min(range(1, layers - others + 1), key=dearest)
    each, odd = divmod(layers - last, others)
    sizes = [each + (stage >= others - odd) for stage in range(others)] + [last]
    starts = [sum(sizes[:stage]) for stage in range(stages)]
    return [range(start, start + size) for start, size in zip(starts, sizes, strict=True)]


def micro_batch_mistake(schedule: str, ranks: int, micro_batches: int) -> str | None:
    """Returns what is wrong with the number of micro-batches per step, and how to fix it; None if it is valid."""
    if schedule == "gpipe":
        return None
    if micro_batches < ranks:
        return (
            f"pp_schedule={schedule} over {ranks} ranks needs at least {ranks} micro-batches in a step, not "
            f"{micro_batches}; use a larger global_batch_size, a smaller per_device_train_batch_size, or gpipe"
        )
    # torch's interleaved schedules run micro-batches in rounds of equal size, at least one per rank.
    rounds = micro_batches // ranks
    if schedule in ("interleaved", "zero_bubble") and micro_batches % rounds:
        return (
            f"pp_schedule={schedule} over {ranks} ranks cannot cut {micro_batches} micro-batches into {rounds} equal "
            f"rounds; use a global_batch_size of {rounds * ranks} or {(rounds + 1) * ranks} micro-batches, or 1f1b"
        )
    return None


def bubble(schedule: str, ranks: int, micro_batches: int) -> float:
    """Returns the fraction of a step that a rank is idle, assuming equal stages and free communication.

    Args:
        schedule: A key of `SCHEDULES`.
        ranks: Ranks of one pipeline.
        micro_batches: Micro-batches per step of one pipeline.

    Returns:
        A fraction from 0 to 1.
    """
    kind = SCHEDULES[schedule]
    idle = ranks - 1 if kind.splits else _TIMES * (ranks - 1)
    if kind.turns:  # too few micro-batches to fill both legs of the V
        idle += max(0, 2 * ranks - 1 - micro_batches)
    return idle / (_TIMES * kind.chunks * micro_batches + idle)


def in_flight(schedule: str, ranks: int, micro_batches: int, rank: int = 0) -> float:
    """Returns how many micro-batches of activations a rank of a pipeline holds at once; the first holds the most.

    If a rank has several stages, a micro-batch in one of them counts as a fraction.

    Args:
        schedule: A key of `SCHEDULES`.
        ranks: Ranks of one pipeline.
        micro_batches: Micro-batches per step of one pipeline.
        rank: Rank within the pipeline.
    """
    kind = SCHEDULES[schedule]
    if schedule == "gpipe":
        return float(micro_batches)
    if kind.turns or kind.chunks == 1:  # in a V, the early stage of a rank waits as long as the late one is short
        return float(min(ranks if kind.turns else ranks - rank, micro_batches))
    # Forward passes before the first backward pass, as in torch's ScheduleInterleaved1F1B.
    turn = micro_batches // max(1, micro_batches // ranks)
    warm = 2 * (ranks - 1 - rank) + (kind.chunks - 1) * turn + 1
    return min(warm / kind.chunks, float(micro_batches))


def bubble_line(schedule: str, ranks: int, micro_batches: int) -> str:
    """Returns the line that describes the pipeline at the start of a run."""
    share = bubble(schedule, ranks, micro_batches)
    return (
        f"pipeline: {schedule} over {ranks} ranks with {micro_batches} micro-batches in a step; a rank is idle for "
        f"{share:.1%} of it, if all stages take the same time and sending takes none"
    )


def measured_bubble(busy: Sequence[float], step_seconds: float) -> float:
    """Returns the measured idle fraction of a step, from 0 to 1.

    Args:
        busy: Seconds that each rank spent computing in a step.
        step_seconds: Duration of the step, in seconds.
    """
    return max(0.0, 1.0 - sum(busy) / (len(busy) * step_seconds)) if busy and step_seconds > 0 else 0.0
