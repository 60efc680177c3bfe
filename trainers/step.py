"""One optimizer step, and everything that the loop works with."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from trainers.checkpoint.checkpoint import Checkpoints
from trainers.config.lr_schedule import learning_rate
from trainers.config.options import TrainConfig
from trainers.data.batches import TrainPlan
from trainers.data.micro_batch import StepBatch
from trainers.data.rows import Rows
from trainers.monitor import loss_guard
from trainers.monitor.heartbeat import Heartbeat
from trainers.monitor.metrics import MetricsFile
from trainers.monitor.profiler import StepProfiler
from trainers.monitor.startup_timer import StartupTimer
from trainers.monitor.stop_requests import Requests
from trainers.monitor.stragglers import Stragglers
from trainers.objectives.global_terms import global_terms
from trainers.objectives.load_balancing import LoadBalancing
from trainers.parallel.backend import Backend, set_rate
from trainers.parallel.ranks import Ranks
from trainers.run.folder import RunFolder
from trainers.strategy.mesh import Mesh

if TYPE_CHECKING:  # only runs that sample need them
    from trainers.answers import FixedPrompts
    from trainers.rollouts import Sampler


@dataclass
class TrainContext:
    """Everything that the loop works with.

    Args:
        mesh: this rank's position in the mesh.
        backend: the wrapped model and optimizer.
        bare: the transformers or peft model inside the wrapper, for names and buffers.
        buffers: names of the buffers that checkpoints contain.
        balancing: the load-balancing loss of a mixture-of-experts model; None if there is none.
        matmul_parameters: (trained, frozen, teacher) parameters in matrix products of the full models.
        scaler: fp16's gradient scaler; None for other dtypes.
        eval_rows: rows of the evaluation data; None without evaluation.
        metrics: the metrics file; None except on rank 0.
        report: called with changes of the run's state (`step=…`, `state=…`).
        show: called with each metrics row on rank 0, for progress bar and trackers.
        launcher: process id of this rank's parent; the run stops if it dies.
        clock: measures startup, which ends with the first step.
        stragglers: measures this rank's own speed.
        profiler: profiles the chosen steps.
        sampler: samples the answers of each step; None if the data has them.
        answers: answers the same prompts as training goes on; None without `eval_generate_steps`.
    """

    config: TrainConfig
    run: RunFolder
    ranks: Ranks
    mesh: Mesh
    backend: Backend
    bare: nn.Module
    buffers: list[str]
    balancing: LoadBalancing | None
    matmul_parameters: tuple[int, int, int]
    scaler: Any
    plan: TrainPlan
    eval_rows: Rows | None
    checkpoints: Checkpoints
    heartbeat: Heartbeat
    metrics: MetricsFile | None
    report: Callable[..., None]
    show: Callable[[dict[str, Any]], None]
    launcher: int
    clock: StartupTimer
    stragglers: Stragglers
    profiler: StepProfiler
    sampler: Sampler | None = None
    answers: FixedPrompts | None = None


@dataclass(frozen=True)
class StepResult:
    """Results of one step, equal on every rank but for the micro-batches of `batch`, which is what was trained."""

    loss: float
    grad_norm: float
    rate: float
    updated: bool
    stop: bool
    discard: bool
    save: bool
    writing: bool
    extra: dict[str, float]
    batch: StepBatch


def train_step(context: TrainContext, batch: StepBatch, step: int, requests: Requests) -> StepResult:
    """Runs one optimizer step on this rank's share of the global batch. Collective.

    Raises:
        TrainingError: on every rank, before the update, if loss or gradient norm is not finite and may not be skipped.
    """
    config, backend, ranks, mesh = context.config, context.backend, context.ranks, context.mesh
    beat = partial(context.heartbeat.at, step=step)
    rate = learning_rate(config, step, context.plan.total_steps)
    set_rate(backend.optimizer, rate)
    batch = batch if context.sampler is None else context.sampler.step_batch(step, beat)
    beat("forward")
    batch, aux_loss, expert_weights = global_terms(
        context.balancing, backend.model, batch, ranks.device, ranks.sum, mesh.contributes_loss
    )

    # Strategies average gradients over ranks: scale by their number to get the mean over the global batch.
    shares = [mesh.sizes.grad_group_size / max(batch.divisor, 1)] * len(batch.micro_batches)
    if config.control == "mean-of-means":
        shares = [1 / (max(part.labels_or_documents, 1) * len(shares)) for part in batch.micro_batches]
    first_forward = context.stragglers.first_forward()
    own_loss, own_metrics = backend.forward_backward(batch.micro_batches, shares, beat, first_forward, expert_weights)

    # Sum loss and requests over the ranks, so that all of them make the same decision.
    beat("all-reduce")
    if not mesh.contributes_loss:
        own_loss, own_metrics = torch.zeros_like(own_loss), torch.zeros_like(own_metrics)
    flags = (*requests.poll(), not context.checkpoints.written())
    own = torch.stack([own_loss, *(torch.full_like(own_loss, float(flag)) for flag in flags)])
    summed = ranks.sum(torch.cat([own, own_metrics.to(own.dtype)]))
    norm = backend.clip_grad_norm(config.max_grad_norm or math.inf)
    # The only host sync of the step: transfer loss, requests, norm and load-balancing loss together.
    numbers = [scalar.to(ranks.device, torch.float32).reshape(1) for scalar in (norm, aux_loss)]
    loss_sum, stops, discards, saves, writing, *metrics, grad_norm, aux = torch.cat([summed, *numbers]).tolist()
    loss = loss_sum / max(batch.divisor, 1)
    extra = dict(zip(config.objective_spec.metrics, (total / max(batch.divisor, 1) for total in metrics), strict=False))
    if by_source := batch.trained_by_source:
        sums = zip(by_source.items(), metrics, strict=False)
        extra = {f"loss/{name}": total / trained for (name, trained), total in sums if trained}
    if context.sampler is not None and context.sampler.served is not None:
        context.sampler.served.refuse_other_weights(extra["sampler_difference"])

    beat("step")
    # Where the loss is finite and the norm is not, fp16's gradient scaler leaves the weights as they are.
    updated = math.isfinite(loss) and math.isfinite(grad_norm)
    if loss_guard.is_finite(loss, grad_norm, config.mixed_precision):
        backend.step()
        if updated and config.ema_decay is not None:
            backend.update_average(config.ema_decay)
    else:
        _report_non_finite(context, step, loss, grad_norm, own_loss)
        backend.skip_step()
    extra |= {"aux_loss": aux, **batch.metrics} if context.balancing is not None else batch.metrics
    return StepResult(loss, grad_norm, rate, updated, stops > 0, discards > 0, saves > 0, writing > 0, extra, batch)


def _report_non_finite(context: TrainContext, step: int, loss: float, grad_norm: float, own_loss: torch.Tensor) -> None:
    """Warns on rank 0 that an update is skipped, or raises TrainingError on every rank. Collective."""
    finite = context.ranks.gather((context.mesh.data_rank, math.isfinite(own_loss.item())))
    values = f"loss {loss:.4g}, gradient norm {grad_norm:.4g}"
    description = f"step {step + 1}: {values}, on {loss_guard.origin(context.plan, step, finite)}"
    loss_guard.refuse_unless_skipped(description, grad_norm, context.config.non_finite)
    if context.ranks.is_main:
        print(f"warning: {description}; its update is skipped", flush=True)
