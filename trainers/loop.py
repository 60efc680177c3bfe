"""The loop.

load a checkpoint, if resuming                                  -> START
evaluate, if eval_on_start
for step in steps:
    take the batch that was prepared meanwhile                  -> data
    count the routing of experts, if the model balances their load   -> forward, all-reduce
    for each micro-batch:                                          (only the last one sums gradients over ranks)
        loss = sum over trained tokens                          -> forward
        gradients of loss / trained tokens of the global batch  -> backward
    sum loss and requests over the ranks                        -> all-reduce  (every rank now decides alike)
    stop here, before the update, if a number is not finite     -> FAILED  (or skip the update)
    clip, set the rate of this step, update                     -> step
    log a row, every logging_steps                              -> LOG
    go back to an earlier checkpoint, if the loss is a spike    -> FAILED  (the next attempt passes over its batch)
    evaluate, every eval_steps; save if it is the best          -> evaluation, SAVE
    save, every save_steps, or if any rank was asked to         -> SAVE  (a copy; a thread of each rank writes it)
    publish the checkpoint, once every rank has written its part
    save (unless it was asked not to), wait for it, and leave, if any rank was asked to stop  -> SAVE, STOPPED
    leave, if evaluations stopped improving
evaluate and save, unless the last step did, and wait for it
the best checkpoint is exported, if load_best_model_at_end      -> DONE
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn

from trainers.checkpoint.checkpoint import Checkpoints
from trainers.config.options import TrainConfig
from trainers.data.batches import MicroBatch, Rows, StepBatch, TrainPlan, evaluation_batches
from trainers.model.load import compute_dtype, matmul_parameters
from trainers.model.lr_schedule import learning_rate
from trainers.monitor.heartbeat import Heartbeat
from trainers.monitor.loss_guard import Spike, detect_spike, is_finite, origin, pass_over, refuse_unless_skipped
from trainers.monitor.metrics import (
    MetricsFile,
    RecentPace,
    Window,
    attention_width,
    memory_gib,
    peak_flops,
    step_flops,
)
from trainers.monitor.startup_timer import StartClock
from trainers.monitor.stop_requests import Requests
from trainers.monitor.stragglers import Pace, slow_warning
from trainers.objectives.load_balancing import LoadBalancing, count_routing
from trainers.parallel.backend import MicroBatched, set_rate
from trainers.parallel.pipeline import Pipelined
from trainers.parallel.ranks import Ranks
from trainers.run.errors import GoBack, TrainingError
from trainers.run.folder import RunFolder
from trainers.run.manifest import Progress
from trainers.strategy.mesh import Mesh

SAVE_PATIENCE = 0.5
"""Seconds that the loop waits for a save before it goes on meanwhile: a small one costs no repeated step in a crash."""
WAIT = 5.0
"""Seconds between two heartbeats while a save or a copy is waited for."""


@dataclass
class Job:
    """All that the loop works with.

    Args:
        mesh: this rank's place among all.
        backend: the strategy's hold on model and optimizer.
        bare: the transformers or peft model inside it, for names and buffers.
        buffers: names of the buffers that checkpoints keep.
        balancing: the load-balancing loss of a mixture of experts, None without.
        scaler: fp16's gradient scaler, None without.
        metrics: the metrics file, on rank 0 only.
        report: called on rank 0 with changes of the run's state (`step=…`, `state=…`).
        show: called on rank 0 with each metrics row, for progress bar and trackers.
        launcher: process id of this rank's parent, without which it must not go on.
        clock: of the start, which ends with the first step.
        pace: this rank's own speed.
    """

    config: TrainConfig
    run: RunFolder
    ranks: Ranks
    mesh: Mesh
    backend: MicroBatched | Pipelined
    bare: nn.Module
    buffers: list[str]
    balancing: LoadBalancing | None
    scaler: Any
    plan: TrainPlan
    eval_rows: Rows | None
    checkpoints: Checkpoints
    heartbeat: Heartbeat
    metrics: MetricsFile | None
    report: Callable[..., None]
    show: Callable[[dict[str, Any]], None]
    launcher: int
    clock: StartClock
    pace: Pace


@dataclass
class Outcome:
    """How the loop ended: `done` or `stopped`, why, and the last numbers."""

    state: str
    cause: str | None
    progress: Progress
    results: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class StepResult:
    """Numbers of one step, alike on every rank."""

    loss: float
    grad_norm: float
    rate: float
    updated: bool
    stop: bool
    discard: bool
    save: bool
    writing: bool
    extra: dict[str, float]


def train_step(job: Job, batch: StepBatch, step: int, requests: Requests) -> StepResult:
    """One optimizer step on this rank's share of the global batch.

    Raises:
        TrainingError: on every rank, before the update, when loss or gradient norm is not finite and none is skipped.
    """
    device, backend, ranks, mesh = job.ranks.device, job.backend, job.ranks, job.mesh
    rate = learning_rate(job.config, step, job.plan.total_steps)
    set_rate(backend.optimizer, rate)
    aux_loss, expert_weights = torch.zeros((), device=device), None
    if job.balancing is not None:
        job.heartbeat.at("forward", step)
        aux_loss, expert_weights = count_routing(job.balancing, backend.model, batch, device, ranks.sum, mesh.counts)
    total = _gradients(job, batch, step, expert_weights)
    job.heartbeat.at("all-reduce", step)
    total = total if mesh.counts else torch.zeros_like(total)
    told = (*requests.asked(), not job.checkpoints.written())
    summed = ranks.sum(torch.stack([total, *(torch.full_like(total, float(one)) for one in told)]))
    norm = backend.clip(job.config.max_grad_norm or math.inf)
    # The one host sync of the step: loss, requests, norm and load-balancing loss come over together.
    numbers = [torch.as_tensor(one, device=device).float().reshape(1) for one in (norm, aux_loss)]
    loss_sum, stops, discards, saves, writing, grad_norm, aux = torch.cat([summed, *numbers]).tolist()
    loss_mean = loss_sum / max(batch.trained_tokens, 1)
    job.heartbeat.at("step", step)
    updated = is_finite(loss_mean, grad_norm, job.config.mixed_precision)
    if updated:
        backend.step()
    else:
        _report_non_finite(job, step, loss_mean, grad_norm, total)
        backend.drop()
    extra = {"aux_loss": aux} if job.balancing is not None else {}
    return StepResult(loss_mean, grad_norm, rate, updated, stops > 0, discards > 0, saves > 0, writing > 0, extra)


def _report_non_finite(job: Job, step: int, loss: float, grad_norm: float, own_loss: torch.Tensor) -> None:
    """Warns on rank 0 of an update that is skipped, or raises TrainingError on every rank. Collective."""
    finite = job.ranks.gather((job.mesh.data_rank, math.isfinite(own_loss.item())))
    description = f"step {step + 1}: loss {loss}, gradient norm {grad_norm}, on {origin(job.plan, step, finite)}"
    refuse_unless_skipped(description, grad_norm, job.config.non_finite)
    if job.ranks.is_main:
        print(f"warning: {description}; its update is skipped", flush=True)


def _gradients(job: Job, batch: StepBatch, step: int, expert_weights: torch.Tensor | None) -> torch.Tensor:
    """Forward and backward of this rank's micro-batches; their summed loss, an fp32 scalar."""
    backend, shares = job.backend, [_share(job, batch, micro) for micro in batch.micro]
    if isinstance(backend, Pipelined):  # its schedule decides what comes when
        return backend.run(batch.micro, shares, lambda section: job.heartbeat.at(section, step))
    total = torch.zeros((), dtype=torch.float32, device=job.ranks.device)
    for number, (micro, share) in enumerate(zip(batch.micro, shares, strict=True)):
        with backend.accumulate(last=number == len(batch.micro) - 1):
            job.heartbeat.at("forward", step)
            with job.pace.alone(number == 0 and job.pace.alone_in_forward):
                loss, _ = backend.model(**micro.inputs(job.ranks.device, expert_weights))
            total += loss.detach()
            job.heartbeat.at("backward", step)
            backend.backward(loss * share)
    return total


def _share(job: Job, batch: StepBatch, micro: MicroBatch) -> float:
    """What a micro-batch's summed loss is multiplied with, so that the gradients' average is that of the true mean.

    The strategies average gradients over ranks; times the ranks, over the global count, makes it the true mean.
    """
    if job.config.control == "mean-of-means":
        return 1 / (max(len(micro.labels), 1) * len(batch.micro))
    return job.mesh.sizes.averaged / max(batch.trained_tokens, 1)


@torch.no_grad()
def evaluate(job: Job, step: int) -> dict[str, float]:
    """Loss, perplexity and token accuracy over all trained tokens of the evaluation data, exact over all ranks."""
    assert job.eval_rows is not None
    rows = job.eval_rows
    job.backend.model.eval()
    size, place = job.config.per_device_eval_batch_size, job.mesh.data_rank
    micros = evaluation_batches(rows, size, place, job.mesh.sizes.data)
    if isinstance(job.backend, Pipelined):
        sums = torch.stack(job.backend.evaluate(micros, lambda section: job.heartbeat.at(section, step)))
    else:
        sums = torch.zeros(2, dtype=torch.float64)
        for micro in micros:
            job.heartbeat.at("evaluation", step)
            loss, correct = job.backend.model(**micro.inputs(job.ranks.device))
            sums += torch.stack([loss.double().cpu(), correct.double().cpu()])
    job.backend.model.train()
    told = job.ranks.gather(sums.tolist() if job.mesh.counts else [0.0, 0.0])
    loss_sum, correct_sum = (sum(values) for values in zip(*told, strict=True))
    count = max(int(rows.trained.sum()), 1)
    mean = loss_sum / count
    return {
        "eval_loss": mean,
        "eval_perplexity": math.exp(mean) if mean < 700 else math.inf,
        "eval_token_accuracy": correct_sum / count,
    }


class Fit:
    """The state of one run of the loop. `run()` is the loop."""

    def __init__(self, job: Job, progress: Progress, resumed_from: Path | None):
        self.job, self.window, self.results = job, Window(), dict[str, Any]()
        self.recent = RecentPace()
        self.progress, self.evaluated_at, self.saved_at = progress, -1, -1
        self.stalled, self.told_slow = 0.0, set[int]()
        whole: Any = job.backend.part if isinstance(job.backend, Pipelined) else None  # it has cut the bare model
        self.flops_parameters = whole.matmul if whole else matmul_parameters(job.bare)
        self.attention_width = attention_width(getattr(job.bare, "config", None))
        peak = peak_flops(job.ranks.device, compute_dtype(job.config))
        self.peak = peak * job.ranks.world if peak else None
        if resumed_from is not None:
            self._take_up(resumed_from)
            job.clock.ended("resume")

    def _take_up(self, folder: Path) -> None:
        """What a loaded checkpoint means besides its weights."""
        job, progress, total = self.job, self.progress, self.job.plan.total_steps
        job.checkpoints.restore(folder, job.backend, job.config.seed)
        if progress.step > total:
            raise TrainingError(f"{folder} is at step {progress.step}, past the {total} of this run; raise max_steps")
        self.saved_at = progress.step if folder.parent == job.checkpoints.folder else -1
        if progress.loss_scale and job.scaler is not None:
            job.scaler.load_state_dict(progress.loss_scale)
        best = progress.best_step
        if job.config.load_best_model_at_end and best is not None and not job.checkpoints.intact(best):
            progress.best_step = progress.best_score = None
            if job.ranks.is_main:
                print(f"the best checkpoint, of step {best}, is not in this run; the search begins anew", flush=True)
        if job.ranks.is_main:
            changed = [f"warning: {line}" for line in job.checkpoints.differences(folder)]
            print("\n".join([f"resumed from {folder} at step {progress.step}", *changed]), flush=True)

    def run(self) -> Outcome:
        """Trains from the progress in hand to the end, or until asked to stop."""
        try:
            return self._steps()
        except TrainingError:  # on every rank alike
            with contextlib.suppress(TrainingError):
                self._until(self.job.checkpoints.written)
                self._publish()
            raise

    def _steps(self) -> Outcome:
        job, plan = self.job, self.job.plan
        requests = Requests(job.run, job.ranks.is_main, job.launcher)
        job.backend.model.train()
        job.report(state="running", step=self.progress.step, total_steps=plan.total_steps)
        if job.config.eval_on_start and job.eval_rows is not None and self.progress.step == 0:
            self._evaluate()
            job.clock.ended("evaluation")
        batches = plan.batches(job.mesh.data_rank, self.progress.step)
        self.window.reset()
        for step in range(self.progress.step, plan.total_steps):
            if self._worn_out():
                batches.close()
                return self._finish(f"no better {job.config.metric_for_best_model} in {self.progress.stale_evaluations}"
                                    f" evaluations; stopped early at step {self.progress.step}")  # fmt: skip
            job.heartbeat.at("data", step)
            with self.window.waiting(), job.pace.alone():
                batch = next(batches)
            if step + 1 in self.progress.passed_over:
                self._pass_by(step)
                continue
            result = train_step(job, batch, step, requests)
            job.clock.first_step_ended(tells=job.ranks.is_main)
            self._after_step(batch, result)
            if result.stop:
                batches.close()
                return self._leave_unsaved() if result.discard else self._stop(requests)
        return self._finish(None)

    def _after_step(self, batch: StepBatch, result: StepResult) -> None:
        config, progress = self.job.config, self.progress
        progress.step += 1
        if not result.updated:
            pass_over(progress, progress.step)
        progress.tokens += batch.tokens
        flops = step_flops(batch.tokens, self.flops_parameters, self.attention_width, batch.squared_lengths)
        self.window.count(batch.tokens, batch.trained_tokens, flops)
        ends = result.stop or not result.updated
        if ends or progress.step % config.logging_steps == 0 or progress.step in (1, self.job.plan.total_steps):
            self._log(result)
        if spike := detect_spike(progress, result.loss, config.loss_spike_factor):
            self._go_back(spike)
        if self.job.checkpoints.pending and not result.writing:
            self.job.heartbeat.at("save", progress.step)
            with self.window.pause():
                self._publish()
        self._when_due(result.save)

    def _go_back(self, spike: Spike) -> NoReturn:
        """Leaves no checkpoint that knows the spike, and raises GoBack on every rank."""
        job, step = self.job, self.progress.step
        job.heartbeat.at("save", step)
        job.checkpoints.finish()
        if job.ranks.is_main:
            job.run.write_passed_over(spike.passed_over)
        job.checkpoints.forget_after(step - 2)
        target = job.ranks.broadcast(["the beginning", *(path.name for path in job.checkpoints.published())])[-1]
        batches = f"the batches of steps {max(step - 1, 1)} and {step}"
        raise GoBack(f"step {step}: {spike.description}; it goes back to {target} and passes over {batches}")

    def _when_due(self, save_asked: bool = False) -> None:
        """Evaluates and saves where the step, or somebody, asks for it."""
        config, step = self.job.config, self.progress.step
        if config.eval_steps and step % config.eval_steps == 0 and self.job.eval_rows is not None:
            self._evaluate()
        if save_asked or (config.save_steps and step % config.save_steps == 0):
            self._save()

    def _pass_by(self, step: int) -> None:
        """A step whose batch is not trained on: its number passes, and it is in the metrics."""
        self.progress.step += 1
        rate = learning_rate(self.job.config, step, self.job.plan.total_steps)
        self._emit({"step": step + 1, "passed_over": True, "loss": None, "grad_norm": None, "learning_rate": rate})
        self._when_due()

    def _log(self, result: StepResult) -> None:
        job, window, progress = self.job, self.window, self.progress
        seconds = window.seconds()
        self.recent.add(window)
        progress.elapsed_s += seconds
        told = job.ranks.gather((round(memory_gib(job.ranks.device), 4), job.pace.look(seconds)))
        memory, slow = [one[0] for one in told], job.pace.verdict([one[1] for one in told])
        row = {
            "step": progress.step,
            "epoch": progress.step / job.plan.steps_per_epoch,
            "loss": result.loss,
            "grad_norm": result.grad_norm,
            **result.extra,
            "learning_rate": result.rate,
            **window.rates(self.peak),
            "memory_gib": max(memory),
            "memory_gib_by_rank": memory,
            "tokens": progress.tokens,
            "elapsed_s": progress.elapsed_s,
            "recent_tokens_per_second": self.recent.tokens_per_second,
            "eta_s": (job.plan.total_steps - progress.step) * self.recent.step_seconds,
            **({"slow_ranks": sorted(slow)} if slow else {}),
            **({"bubble": job.backend.idle(seconds)} if isinstance(job.backend, Pipelined) else {}),
            **({} if result.updated else {"passed_over": True}),
        }
        self._tell_slow(slow)
        self._emit(row)
        self.results |= {"train_loss": result.loss, "tokens_per_second": row["recent_tokens_per_second"]}
        job.report(state="stopping" if result.stop else "running", step=progress.step)
        window.reset()

    def _tell_slow(self, slow: dict[int, float]) -> None:
        """Names a slow rank, once in an attempt; it goes on."""
        for rank in slow.keys() - self.told_slow if self.job.ranks.is_main else ():
            self.told_slow.add(rank)
            print(slow_warning(rank, slow[rank]), flush=True)

    def _emit(self, row: dict[str, Any]) -> None:
        if self.job.metrics is not None:
            self.job.metrics.write(row)
            self.job.show(row)

    def _evaluate(self) -> None:
        job, progress = self.job, self.progress
        with self.window.pause():
            found = evaluate(job, progress.step)
        self.evaluated_at = progress.step
        self.results |= found
        self._emit({"step": progress.step, **found})
        name = job.config.metric_for_best_model
        better = found[name] if name == "eval_token_accuracy" else -found[name]
        before = progress.best_score
        enough = before is None or better > before + job.config.early_stopping_threshold
        progress.stale_evaluations = 0 if enough else progress.stale_evaluations + 1
        if before is None or better > before:
            progress.best_score, progress.best_step, progress.best_results = better, progress.step, found
            self.saved_at = -1  # a checkpoint of this very step does not know it yet
            if job.config.load_best_model_at_end:
                self._save()

    def _worn_out(self) -> bool:
        patience = self.job.config.early_stopping_patience
        return patience is not None and self.progress.stale_evaluations >= patience

    def _save(self, wait: bool = False) -> None:
        """Begins a checkpoint of this step, if there is none.

        Args:
            wait: until it is published; else only a moment, and training goes on.
        """
        job, step = self.job, self.progress.step
        job.heartbeat.at("save", step)
        began, elapsed = time.perf_counter(), self.progress.elapsed_s + self.window.seconds()
        with self.window.pause():
            if self.saved_at != step:
                self._until(job.checkpoints.written)
                self._publish()
                self._begin_saving(elapsed)
            if wait:
                self._until(job.checkpoints.written)
            done = all(job.ranks.gather(job.checkpoints.written(SAVE_PATIENCE)))
            self.stalled += time.perf_counter() - began
            if done:
                self._publish()

    def _begin_saving(self, elapsed: float) -> None:
        job, self.stalled = self.job, 0.0
        if job.scaler is not None:
            self.progress.loss_scale = job.scaler.state_dict()
        so_far = replace(self.progress, elapsed_s=elapsed)
        buffers = {name: job.bare.get_buffer(name) for name in job.buffers}
        job.checkpoints.begin(job.backend, buffers, so_far)
        self.saved_at = self.progress.step

    def _until(self, done: Callable[[float], bool]) -> None:
        """Waits until that is so on every rank; each look is a heartbeat, so that nobody takes it for a hang."""
        while not all(self.job.ranks.gather(done(WAIT))):
            self.job.heartbeat.at("save", self.progress.step)

    def _publish(self) -> None:
        """Publishes the checkpoint that was begun, if any, waiting for what is still to be written. Collective."""
        began = time.perf_counter()
        saved = self.job.checkpoints.finish()
        if saved is None or self.job.metrics is None:
            return
        stalled = self.stalled + time.perf_counter() - began
        print(saved.line(stalled), flush=True)
        self.job.metrics.write(saved.row(stalled))

    def _stop(self, requests: Requests) -> Outcome:
        self._save(wait=True)
        self._until(self.job.checkpoints.copied)
        step, total = self.progress.step, self.job.plan.total_steps
        asked = self.job.ranks.gather(requests.signal)
        who = next((f"{name} on rank {rank}" for rank, name in enumerate(asked) if name), "a stop request")
        # A launcher that was asked to stop may be gone first; then it is a stop all the same.
        if any(self.job.ranks.gather(requests.orphaned())) and not any(asked):
            cause = f"the launcher was killed; saved at step {step} of {total}; resume goes on from there"
            return Outcome("failed", cause, self.progress, self.results)
        cause = f"stopped by {who} at step {step} of {total}; its checkpoint is saved; resume goes on from there"
        return Outcome("stopped", cause, self.progress, self.results)

    def _leave_unsaved(self) -> Outcome:
        self._until(self.job.checkpoints.written)
        self._publish()
        self._until(self.job.checkpoints.copied)
        kept = self.job.checkpoints.published()
        rest = f"the last checkpoint is {kept[-1].name}" if kept else "there is no checkpoint"
        cause = f"stopped without saving at step {self.progress.step} of {self.job.plan.total_steps}; {rest}"
        return Outcome("stopped", cause, self.progress, self.results)

    def _finish(self, cause: str | None) -> Outcome:
        job, progress = self.job, self.progress
        if job.eval_rows is not None and self.evaluated_at != progress.step:
            self._evaluate()
        self._save(wait=True)
        self._until(self.job.checkpoints.copied)
        best = progress.best_step
        if job.config.load_best_model_at_end and best is not None and job.checkpoints.intact(best):
            self.results |= {"exported_step": best, **progress.best_results}
        else:
            self.results["exported_step"] = progress.step
        return Outcome("done", cause, progress, self.results)
