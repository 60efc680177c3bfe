"""How a pipeline is cut and timed: layers to stages, stages to ranks, micro-batches, idle time. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_TIMES = 3  # forward, gradients of the inputs, gradients of the weights: taken as equally long


@dataclass(frozen=True)
class Schedule:
    """One order of the forward and backward passes of a step.

    Args:
        name: torch's class, in `torch.distributed.pipelining`.
        chunks: stages of each rank.
        turns: the ranks hold their second stages in reverse order, so that the first rank has the last stage too.
        splits: the gradients of inputs and of weights are taken apart, so that the latter fill idle time.
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
    """The rank, within its pipeline, that holds a stage."""
    around, index = divmod(stage, ranks)
    return ranks - 1 - index if SCHEDULES[schedule].turns and around % 2 else index


def stages_of(schedule: str, ranks: int, rank: int) -> list[int]:
    """The stages that a rank of a pipeline holds, in order."""
    stages = ranks * SCHEDULES[schedule].chunks
    return [stage for stage in range(stages) if rank_of(schedule, ranks, stage) == rank]


def balance(layers: int, stages: int, layer_cost: float, head_cost: float) -> list[range]:
    """The layers of each stage, so that the dearest stage is as cheap as can be.

    The embedding is a look-up and costs nothing; the last stage has the head on top of its layers. Among the stages
    before it the later ones get the odd layer: the earlier ones keep more micro-batches in memory.

    Args:
        layers: decoder layers, each of `layer_cost`.
        stages: every one gets a layer at least.

    Raises:
        ValueError: when there are more stages than layers.
    """
    if stages > layers:
        raise ValueError(f"{stages} stages for {layers} layers; use at most {layers} stages")
    if stages == 1:
        return [range(layers)]
    others = stages - 1

    def dearest(last: int) -> tuple[float, int]:
        return max(-(-(layers - last) // others) * layer_cost, last * layer_cost + head_cost), -last

    last = min(range(1, layers - others + 1), key=dearest)
    each, odd = divmod(layers - last, others)
    sizes = [each + (stage >= others - odd) for stage in range(others)] + [last]
    starts = [sum(sizes[:stage]) for stage in range(stages)]
    return [range(start, start + size) for start, size in zip(starts, sizes, strict=True)]


def micro_batch_mistake(schedule: str, ranks: int, micro_batches: int) -> str | None:
    """What is wrong with the number of micro-batches of a step, and the way out; None where it fits."""
    if schedule == "gpipe":
        return None
    if micro_batches < ranks:
        return (
            f"pp_schedule={schedule} over {ranks} ranks needs at least {ranks} micro-batches in a step, not "
            f"{micro_batches}; use a larger global_batch_size, a smaller per_device_train_batch_size, or gpipe"
        )
    rounds = micro_batches // ranks
    if schedule in ("interleaved", "zero_bubble") and micro_batches % rounds:
        return (
            f"pp_schedule={schedule} over {ranks} ranks cannot cut {micro_batches} micro-batches into {rounds} equal "
            f"rounds; use a global_batch_size of {rounds * ranks} or {(rounds + 1) * ranks} micro-batches, or 1f1b"
        )
    return None


def bubble(schedule: str, ranks: int, micro_batches: int) -> float:
    """The share of a step in which a rank waits for others, were all stages alike and sending free.

    Args:
        ranks: of one pipeline.
        micro_batches: of one pipeline in a step.

    Returns:
        0 to 1.
    """
    kind = SCHEDULES[schedule]
    idle = ranks - 1 if kind.splits else _TIMES * (ranks - 1)
    if kind.turns:  # too few micro-batches to fill the way down and up again
        idle += max(0, 2 * ranks - 1 - micro_batches)
    return idle / (_TIMES * kind.chunks * micro_batches + idle)


def in_flight(schedule: str, ranks: int, micro_batches: int) -> float:
    """Micro-batches whose activations the fullest rank of a pipeline holds at once; a stage of several counts in part.

    Args:
        ranks: of one pipeline.
        micro_batches: of one pipeline in a step.
    """
    kind = SCHEDULES[schedule]
    if schedule == "gpipe":
        return float(micro_batches)
    if kind.turns or kind.chunks == 1:
        return float(min(ranks, micro_batches))
    turn = micro_batches // max(1, micro_batches // ranks)
    warm = 2 * (ranks - 1) + (kind.chunks - 1) * turn + 1
    return min(warm / kind.chunks, float(micro_batches))


def bubble_line(schedule: str, ranks: int, micro_batches: int) -> str:
    """What a run says of its pipeline at its start."""
    share = bubble(schedule, ranks, micro_batches)
    return (
        f"pipeline: {schedule} over {ranks} ranks with {micro_batches} micro-batches in a step; a rank is idle for "
        f"{share:.1%} of it, if all stages take the same time and sending takes none"
    )


def measured_bubble(busy: Sequence[float], step_seconds: float) -> float:
    """The idle share that was measured.

    Args:
        busy: seconds that each rank computed in a step.
    """
    return max(0.0, 1.0 - sum(busy) / (len(busy) * step_seconds)) if busy and step_seconds > 0 else 0.0
