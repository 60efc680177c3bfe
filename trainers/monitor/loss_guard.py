"""Detects non-finite losses and gradients, and loss spikes.

Every rank sees the same numbers and makes the same decision; the loop acts on it. Each checkpoint stores the skipped
steps (`Progress`), so that a run resumed from it skips them too.
"""

from __future__ import annotations

import math
import statistics
from typing import NamedTuple

from trainers.data.batches import TrainPlan
from trainers.run.errors import TrainingError
from trainers.run.manifest import Progress

WINDOW = 32
"""Number of previous losses to compare a new one with."""
LEAST = 8
"""Minimum number of previous losses for a comparison."""
MOST_IN_A_ROW = 10
"""Number of consecutive skipped updates after which the run fails."""


class LossSpike(NamedTuple):
    """A loss far above the previous ones.

    Args:
        skipped_steps: the steps (from 1) whose batches the next attempt skips.
        description: the loss and how far above the others it is.
    """

    skipped_steps: list[int]
    description: str


def is_finite(loss: float, grad_norm: float, mixed_precision: str) -> bool:
    """Whether the numbers of a step allow an update. Loss and gradient norm must be finite, in fp16 only the loss."""
    scaled = mixed_precision == "fp16"  # the gradient scaler skips steps with infinite gradients by itself
    return math.isfinite(loss) and (scaled or math.isfinite(grad_norm))


def refuse_unless_skipped(description: str, grad_norm: float, non_finite: str) -> None:
    """Raises TrainingError for a step with non-finite numbers, unless its update may be skipped.

    Only an update with a non-finite gradient norm may be skipped, and only with `non_finite=skip`.

    Args:
        description: step, numbers and rows, for the message.
        grad_norm: gradient norm of the step.
        non_finite: the option of that name.
    """
    if non_finite != "skip" or math.isfinite(grad_norm):
        raise TrainingError(
            f"{description}; no weight was updated; lower learning_rate, look at those rows, use mixed_precision bf16 "
            "or no, or set non_finite=skip"
        )


def origin(plan: TrainPlan, step: int, finite: list[tuple[int, bool]]) -> str:
    """Describes the ranks whose loss is not finite (all ranks if there are none), and file and line of their rows.

    Args:
        plan: the plan of the run's batches.
        step: the step, from 0.
        finite: for each rank, its data-parallel rank and whether its own loss is finite.
    """
    wrong = [rank for rank, (_, good) in enumerate(finite) if not good] or list(range(len(finite)))
    whose = f"rank {wrong[0]}" if len(wrong) == 1 else f"ranks {', '.join(map(str, wrong))}"
    shares = sorted({finite[rank][0] for rank in wrong})  # ranks that split layers or rows share a data rank
    # Sampled answers are packed anew over the ranks: any of the step's prompts may be theirs.
    of_shares = [None] if plan.config.objective_spec.samples else shares
    places = [row for share in of_shares for row in plan.locations(step, share)]
    more = f" and {len(places) - 6} more" if len(places) > 6 else ""
    return f"{whose}, in the batch from {', '.join(places[:6])}{more}"


def record_skipped_step(progress: Progress, step: int) -> None:
    """Records that the update of a step (from 1) was skipped.

    Raises:
        TrainingError: if `MOST_IN_A_ROW` consecutive updates were skipped.
    """
    progress.skipped_steps = sorted({*progress.skipped_steps, step})
    if set(range(step - MOST_IN_A_ROW + 1, step + 1)) <= set(progress.skipped_steps):
        raise TrainingError(
            f"step {step}: the {MOST_IN_A_ROW}th update in a row that was skipped; lower learning_rate, "
            "or resume from an earlier checkpoint with --resume_from_checkpoint"
        )


def detect_loss_spike(progress: Progress, loss: float, factor: float) -> LossSpike | None:
    """Compares the loss of `progress.step` with the median of the previous ones, and records it unless it is a spike.

    A bad batch raises its own loss, and a bad update the loss of the next batch. As either may be the cause, the run
    rolls back to a checkpoint before the previous step and skips both batches.

    Args:
        progress: the run's progress; `recent_losses` is updated.
        loss: the loss of the step.
        factor: `loss_spike_factor`, the multiple of the median that counts as a spike; 0 disables the check.

    Returns:
        The spike; None if there is none.
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
