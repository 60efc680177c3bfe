"""Numbers gone wrong: a loss or gradient that is not finite, and a loss far above those before it.

Every rank sees the same numbers and decides alike; the loop acts on what is found here. Each checkpoint holds the steps
that were skipped (`Progress`), so that a run that resumes from it skips them too.
"""

from __future__ import annotations

import math
import statistics
from typing import NamedTuple

from trainers.data.batches import TrainPlan
from trainers.run.errors import TrainingError
from trainers.run.manifest import Progress

WINDOW = 32
"""Losses that a new one is held against."""
LEAST = 8
"""Losses without which nothing can be said."""
MOST_IN_A_ROW = 10
"""Updates skipped one after the other, after which the run is beyond help."""


class LossSpike(NamedTuple):
    """A loss far above those before it.

    Args:
        skipped_steps: the steps (from 1) whose batches the next attempt skips.
        description: which loss, and how far above.
    """

    skipped_steps: list[int]
    description: str


def is_finite(loss: float, grad_norm: float, mixed_precision: str) -> bool:
    """Whether the numbers of a step allow its update."""
    scaled = mixed_precision == "fp16"  # its loss scaling meets infinite gradients and skips the step
    return math.isfinite(loss) and (scaled or math.isfinite(grad_norm))


def refuse_unless_skipped(description: str, grad_norm: float, non_finite: str) -> None:
    """Raises TrainingError for a step whose numbers are not finite, unless its update may be skipped.

    Args:
        description: step, numbers and rows.
        non_finite: the option of that name.
    """
    if non_finite != "skip" or math.isfinite(grad_norm):
        raise TrainingError(
            f"{description}; no weight was updated; lower learning_rate, look at those rows, use mixed_precision bf16 "
            "or no, or set non_finite=skip"
        )


def origin(plan: TrainPlan, step: int, finite: list[tuple[int, bool]]) -> str:
    """The ranks whose loss is not finite, all where each one's is, and file and line of their rows.

    Args:
        step: counted from 0.
        finite: of each rank, its data-parallel rank, and whether its own loss is finite.
    """
    wrong = [rank for rank, (_, good) in enumerate(finite) if not good] or list(range(len(finite)))
    whose = f"rank {wrong[0]}" if len(wrong) == 1 else f"ranks {', '.join(map(str, wrong))}"
    shares = sorted({finite[rank][0] for rank in wrong})  # ranks that cut layers or rows have the same ones
    places = [
        location for share in shares for rows in plan.shares(step, share) for location in plan.rows.locations(rows)
    ]
    more = f" and {len(places) - 6} more" if len(places) > 6 else ""
    return f"{whose}, in the batch from {', '.join(places[:6])}{more}"


def record_skipped_step(progress: Progress, step: int) -> None:
    """Records that the update of a step (from 1) was skipped.

    Raises:
        TrainingError: when too many were, one after the other.
    """
    progress.skipped_steps = sorted({*progress.skipped_steps, step})
    if set(range(step - MOST_IN_A_ROW + 1, step + 1)) <= set(progress.skipped_steps):
        raise TrainingError(
            f"step {step}: the {MOST_IN_A_ROW}th update in a row that was skipped; lower learning_rate, "
            "or resume from an earlier checkpoint with --resume_from_checkpoint"
        )


def detect_loss_spike(progress: Progress, loss: float, factor: float) -> LossSpike | None:
    """Compares the loss of `progress.step` with those before it, and remembers it where it is not a spike.

    A bad batch shows in its own loss, and the update that it caused shows in the next one: so the run rolls back to a
    checkpoint before both, and skips both.

    Args:
        factor: `loss_spike_factor`; 0 for no check.
    """
    recent, step = progress.recent_losses, progress.step
    if not factor or not math.isfinite(loss):
        return None
    if len(recent) < LEAST or loss <= factor * statistics.median(recent):
        progress.recent_losses = [*recent, loss][-WINDOW:]
        return None
    return LossSpike(
        sorted({*progress.skipped_steps, *range(max(step - 1, 1), step + 1)}),
        f"loss {loss:.4g} is {loss / statistics.median(recent):.1f} times the median of the last "
        f"{len(recent)} (loss_spike_factor={factor:g})",
    )
