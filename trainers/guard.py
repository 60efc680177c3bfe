"""Numbers gone wrong: a loss or gradient that is not finite, and a loss far above those before it.

Every rank sees the same numbers and decides alike. What was passed over is kept in each checkpoint (`Progress`), so
that a run that goes on from one passes over the same steps.
"""

from __future__ import annotations

import math
import statistics
from typing import TYPE_CHECKING

import torch

from trainers.errors import GoBack, TrainingError
from trainers.manifest import Progress

if TYPE_CHECKING:
    from trainers.loop import Job

WINDOW = 32
"""Losses that a new one is held against."""
LEAST = 8
"""Losses without which nothing can be said."""
MOST_IN_A_ROW = 10
"""Updates skipped one after the other, after which the run is beyond help."""


def may_update(job: Job, step: int, loss: float, grad_norm: float, own_loss: torch.Tensor) -> bool:
    """Whether the numbers of a step are finite; a skipped one is told by rank 0.

    Raises:
        TrainingError: on every rank alike, naming step, ranks and rows, unless `non_finite` is skip.
    """
    scaled = job.config.mixed_precision == "fp16"  # its loss scaling meets infinite gradients and skips the step
    if math.isfinite(loss) and (scaled or math.isfinite(grad_norm)):
        return True
    told = f"step {step + 1}: loss {loss}, gradient norm {grad_norm}, on {_where(job, step, own_loss)}"
    skips = job.config.non_finite == "skip" and not math.isfinite(grad_norm)
    if not skips:
        raise TrainingError(
            f"{told}; no weight was updated; lower learning_rate, look at those rows, use mixed_precision bf16 or no, "
            "or set non_finite=skip"
        )
    if job.ranks.is_main:
        print(f"warning: {told}; its update is skipped", flush=True)
    return False


def _where(job: Job, step: int, own_loss: torch.Tensor) -> str:
    """The ranks whose loss is not finite, all where each one's is, and file and line of their rows. Collective."""
    told = job.ranks.gather((job.mesh.data_rank, math.isfinite(own_loss.item())))
    wrong = [rank for rank, (_, good) in enumerate(told) if not good] or list(range(job.ranks.world))
    whose = f"rank {wrong[0]}" if len(wrong) == 1 else f"ranks {', '.join(map(str, wrong))}"
    shares = sorted({told[rank][0] for rank in wrong})  # ranks that cut layers or rows have the same ones
    places = [
        place for share in shares for rows in job.plan.shares(step, share) for place in job.plan.rows.places(rows)
    ]
    more = f" and {len(places) - 6} more" if len(places) > 6 else ""
    return f"{whose}, in the batch from {', '.join(places[:6])}{more}"


def pass_over(progress: Progress, step: int) -> None:
    """Notes that the update of a step (from 1) was skipped.

    Raises:
        TrainingError: when too many were, one after the other.
    """
    progress.passed_over = sorted({*progress.passed_over, step})
    if set(range(step - MOST_IN_A_ROW + 1, step + 1)) <= set(progress.passed_over):
        raise TrainingError(
            f"step {step}: the {MOST_IN_A_ROW}th update in a row that was skipped; lower learning_rate, "
            "or go on from an earlier checkpoint with --resume_from_checkpoint"
        )


def watch(job: Job, progress: Progress, loss: float) -> None:
    """Holds the loss of `progress.step` against those before it. Collective where it spikes.

    A bad batch shows in its own loss, and the update that it brought in the next one's: so the run goes back to a
    checkpoint before both, and passes over both.

    Raises:
        GoBack: on every rank alike.
    """
    factor, recent = job.config.loss_spike_factor, progress.recent_losses
    if not factor or not math.isfinite(loss):
        return
    if len(recent) < LEAST or loss <= factor * statistics.median(recent):
        progress.recent_losses = [*recent, loss][-WINDOW:]
        return
    step = progress.step
    job.heartbeat.at("save", step)
    job.checkpoints.finish()
    passed = sorted({*progress.passed_over, *range(max(step - 1, 1), step + 1)})
    if job.ranks.is_main:
        job.run.write_passed_over(passed)
    job.checkpoints.forget_after(step - 2)
    kept = job.ranks.broadcast([path.name for path in job.checkpoints.published()])
    raise GoBack(
        f"step {step}: loss {loss:.4g} is {loss / statistics.median(recent):.1f} times the median of the last "
        f"{len(recent)} (loss_spike_factor={factor:g}); it goes back to {kept[-1] if kept else 'the beginning'} and "
        f"passes over the batches of steps {max(step - 1, 1)} and {step}"
    )
