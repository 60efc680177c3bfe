"""The training loop.

load a checkpoint, if resuming                                  -> START
evaluate, if eval_on_start
for step in steps:
    take the prefetched batch, set the learning rate            -> data  (the ranks compare a new window of a stream)
    sample and reward answers to its prompts, if the objective does   -> sampling, rewards
    sum what the loss needs of the global batch (routing, KL)   -> forward, all-reduce
    for each micro-batch:                                          (DDP reduces gradients in the last one only)
        loss = sum over trained tokens, or over examples        -> forward
        gradients of loss / their number in the global batch    -> backward
    sum loss and requests over the ranks, clip gradients        -> all-reduce  (every rank now decides alike)
    fail before the update, if a number is not finite           -> FAILED  (or skip the update)
    update                                                      -> step
    log a row, every logging_steps                              -> LOG
    roll back to an earlier checkpoint, if the loss spikes      -> FAILED  (the next attempt skips the batch)
    answer the fixed prompts, every eval_generate_steps         -> evaluation
    evaluate, every eval_steps; save if it is the best          -> evaluation, SAVE
    save, every save_steps, or if any rank was asked to         -> SAVE  (a copy, written by a thread of each rank)
    publish the checkpoint, once every rank has written its part
    at stop_at_step: answer, evaluate, save, leave              -> evaluation, SAVE, STOPPED
    if any rank was asked to stop: save (unless told not to), wait for the save, leave   -> SAVE, STOPPED
    leave, if evaluations stopped improving
answer, evaluate and save, unless the last step did; wait for the save
name the best checkpoint for export, if load_best_model_at_end  -> DONE
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from trainers.config.lr_schedule import learning_rate
from trainers.config.mistakes import ConfigError
from trainers.config.objectives import HIGHER_IS_BETTER
from trainers.evaluation import evaluate
from trainers.model.load import compute_dtype
from trainers.monitor import loss_guard
from trainers.monitor.metrics import RecentPace, Window, device_values, values_by_rank
from trainers.monitor.mfu import attention_width, peak_flops, step_flops
from trainers.monitor.stop_requests import Requests
from trainers.monitor.stragglers import slow_warning
from trainers.run.ending import Ending
from trainers.run.errors import RollBack, TrainingError
from trainers.run.manifest import Progress
from trainers.step import StepResult, TrainContext, train_step

SAVE_TIMEOUT = 0.5
"""Seconds to wait for a save before training continues; small checkpoints are thus published before the next step."""
WAIT = 5.0
"""Seconds between heartbeats while waiting for a save or a copy."""


@dataclass
class Outcome:
    """How the loop ended, with final progress and results for the model card."""

    ending: Ending
    progress: Progress
    results: dict[str, Any] = field(default_factory=dict)


class TrainLoop:
    """The state of one execution of the loop; `run()` executes it.

    Args:
        resumed_from: the checkpoint whose weights are already loaded; None for a new start.
    """

    def __init__(self, context: TrainContext, progress: Progress, resumed_from: Path | None):
        self.context, self.window, self.recent, self.results = context, Window(), RecentPace(), dict[str, Any]()
        self.progress, self.evaluated_at, self.saved_at = progress, -1, -1
        self.stalled, self.warned_slow = 0.0, set[int]()
        self.attention_width = attention_width(getattr(context.bare, "config", None))
        peak = peak_flops(context.ranks.device, compute_dtype(context.config))
        self.peak = peak * context.ranks.world if peak else None
        if resumed_from is not None:
            self._resume_from(resumed_from)
            context.clock.ended("resume")

    def _resume_from(self, folder: Path) -> None:
        """Restores everything but the weights from a checkpoint. Collective.

        Raises:
            TrainingError: on every rank, if the checkpoint is past the last step or does not fit this optimizer.
        """
        context, progress, total = self.context, self.progress, self.context.plan.total_steps
        context.checkpoints.restore(folder, context.backend, context.config.seed)
        context.plan.restore(progress.step, progress.stream)
        if progress.step > total:
            raise TrainingError(f"{folder} is at step {progress.step}, past the {total} of this run; raise max_steps")
        self.saved_at = progress.step if folder.parent == context.checkpoints.folder else -1
        if progress.loss_scale and context.scaler is not None:
            context.scaler.load_state_dict(progress.loss_scale)
        best = progress.best_step
        if context.config.load_best_model_at_end and best is not None and not context.checkpoints.intact(best):
            progress.best_step = progress.best_score = None
            if context.ranks.is_main:
                print(f"the best checkpoint, of step {best}, is not in this run; the search starts over", flush=True)
        if context.ranks.is_main:
            changed = [f"warning: {line}" for line in context.checkpoints.differences(folder)]
            print("\n".join([f"resumed from {folder} at step {progress.step}", *changed]), flush=True)

    def run(self) -> Outcome:
        """Trains from the current progress to the end, or until requested to stop."""
        try:
            outcome = self._steps()
            self.context.profiler.finish()
            self.context.backend.finish()
            return outcome
        except TrainingError:  # raised on every rank: finish the pending checkpoint together
            with contextlib.suppress(TrainingError):
                self._until(self.context.checkpoints.written)
                self._publish()
            raise

    def _steps(self) -> Outcome:
        context, plan = self.context, self.context.plan
        requests = Requests(context.run, context.ranks.is_main, context.launcher)
        context.backend.model.train()
        context.report(state="running", step=self.progress.step, total_steps=plan.total_steps)
        if context.config.eval_on_start and context.eval_rows is not None and self.progress.step == 0:
            self._answer_prompts()
            self._evaluate()
            context.clock.ended("evaluation")
        batches = plan.batches(context.mesh.data_rank, self.progress.step)
        self.window.reset()
        for step in range(self.progress.step, plan.total_steps):
            if step >= (context.config.stop_at_step or math.inf):
                batches.close()
                return self._stop_as_planned()
            if self._stopped_improving():
                batches.close()
                metric, stale = context.config.metric_for_best_model, self.progress.stale_evaluations
                return self._finish(
                    f"no better {metric} in {stale} evaluations; stopped early at step {self.progress.step}"
                )
            context.heartbeat.at("data", step)
            context.profiler.begin(step + 1)
            with self.window.waiting(), context.stragglers.local_work(), context.profiler.data():
                self._agree_on_data(step)
                batch = next(batches)
            if step + 1 in self.progress.skipped_steps:
                self._skip(step)
                continue
            result = train_step(context, batch, step, requests)
            context.clock.first_step_ended(report=context.ranks.is_main)
            context.profiler.end(step + 1, self.window.pause(), context.heartbeat, context.ranks)
            self._after_step(result)
            if result.stop:
                batches.close()
                return self._leave_unsaved() if result.discard else self._stop(requests)
        return self._finish(None)

    def _agree_on_data(self, step: int) -> None:
        """Saves what is trained before a run ends because the next rows of a stream cannot be used. Collective."""
        try:
            self.context.plan.agree(step, self.context.ranks, partial(self.context.heartbeat.at, "data", step))
        except (ConfigError, TrainingError):
            if step > 0:
                self._save(wait=True)
            raise

    def _after_step(self, result: StepResult) -> None:
        config, progress, batch = self.context.config, self.progress, result.batch
        progress.step += 1
        if not result.updated:
            loss_guard.record_skipped_step(progress, progress.step)
        progress.tokens += batch.tokens
        flops = step_flops(batch.tokens, self.context.matmul_parameters, self.attention_width, batch.squared_lengths)
        self.window.count(batch.tokens, batch.trained_tokens, flops)
        ends = result.stop or not result.updated
        ends |= progress.step in (1, config.stop_at_step, self.context.plan.total_steps)
        if ends or progress.step % config.logging_steps == 0:
            self._log(result)
        if spike := loss_guard.detect_loss_spike(progress, result.loss, config.loss_spike_factor):
            self._roll_back(spike)
        # `writing` was summed over ranks, so that all of them publish at the same step.
        if self.context.checkpoints.pending and not result.writing:
            self.context.heartbeat.at("save", progress.step)
            with self.window.pause():
                self._publish()
        self._evaluate_and_save(result.save)

    def _roll_back(self, spike: loss_guard.LossSpike) -> NoReturn:
        """Sets aside checkpoints trained on the spike, and raises RollBack on every rank. Collective."""
        context, step = self.context, self.progress.step
        context.heartbeat.at("save", step)
        context.checkpoints.finish()
        if context.ranks.is_main:
            context.run.write_skipped_steps(spike.skipped_steps)
        context.checkpoints.forget_after(step - 2)
        published = ["the beginning", *(path.name for path in context.checkpoints.published())]
        target = context.ranks.broadcast(published[-1])
        batches = f"the batches of steps {max(step - 1, 1)} and {step}"
        raise RollBack(f"step {step}: {spike.description}; it rolls back to {target} and skips {batches}")

    def _evaluate_and_save(self, save_asked: bool = False) -> None:
        """Evaluates and saves if due at this step; `save_asked` saves in any case."""
        config, step = self.context.config, self.progress.step
        # First: a checkpoint of this step must not be older than its answers, which a resume from it does not repeat.
        if config.eval_generate_steps and step % config.eval_generate_steps == 0:
            self._answer_prompts()
        if config.eval_steps and step % config.eval_steps == 0 and self.context.eval_rows is not None:
            self._evaluate()
        if save_asked or (config.save_steps and step % config.save_steps == 0):
            self._save()

    def _skip(self, step: int) -> None:
        """Counts a step without training on its batch, and writes it to the metrics."""
        self.progress.step += 1
        rate = learning_rate(self.context.config, step, self.context.plan.total_steps)
        self._emit({"step": step + 1, "skipped": True, "loss": None, "grad_norm": None, "learning_rate": rate})
        self._evaluate_and_save()

    def _log(self, result: StepResult) -> None:
        context, window, progress = self.context, self.window, self.progress
        seconds = window.seconds()
        self.recent.add(window)
        progress.elapsed_s += seconds
        devices = context.ranks.gather(device_values(context.ranks.device))
        samples = context.ranks.gather(context.stragglers.sample(seconds))
        slow = context.stragglers.verdict(samples)
        row = {
            "step": progress.step,
            "epoch": context.plan.epochs(progress.step),
            "loss": result.loss,
            "grad_norm": result.grad_norm,
            **result.extra,
            "learning_rate": result.rate,
            **window.rates(self.peak),
            **values_by_rank(devices),
            "local_work_by_rank": [round(sample.local / sample.training, 4) for sample in samples],
            "tokens": progress.tokens,
            **context.plan.source_metrics(progress.step),
            "elapsed_s": progress.elapsed_s,
            "recent_tokens_per_second": self.recent.tokens_per_second,
            "eta_s": (context.plan.total_steps - progress.step) * self.recent.step_seconds,
            **({"slow_ranks": sorted(slow)} if slow else {}),
            **context.backend.extra_metrics(seconds),
            **({} if result.updated else {"skipped": True}),
        }
        self._warn_slow(slow)
        self._emit(row)
        self.results |= {"train_loss": result.loss, "tokens_per_second": row["recent_tokens_per_second"]}
        context.report(state="stopping" if result.stop else "running", step=progress.step)
        window.reset()

    def _warn_slow(self, slow: dict[int, float]) -> None:
        """Warns about each slow rank, once per attempt."""
        for rank in slow.keys() - self.warned_slow if self.context.ranks.is_main else ():
            self.warned_slow.add(rank)
            print(slow_warning(rank, slow[rank]), flush=True)

    def _emit(self, row: dict[str, Any]) -> None:
        if self.context.metrics is not None:
            self.context.metrics.write(row)
            self.context.show(row)

    def _answer_prompts(self) -> None:
        """Answers the fixed prompts, if there are any. Collective."""
        context, step = self.context, self.progress.step

        def beat(_: str, allowed: float) -> None:
            context.heartbeat.at("evaluation", step, allowed)  # no part of the next step, as other sampling is

        if context.answers is not None:
            with self.window.pause(), context.backend.evaluated_weights():
                context.answers.answer(step, beat)

    def _score(self) -> dict[str, float]:
        """Evaluates, and writes the result to the metrics."""
        context, step = self.context, self.progress.step
        beat, size = partial(context.heartbeat.at, step=step), context.config.per_device_eval_batch_size
        assert context.eval_rows is not None
        with self.window.pause(), context.backend.evaluated_weights():
            if context.sampler is not None:  # what it scores depends on how it samples, too: of no data alone
                scores, evaluated = context.sampler.evaluate(beat), {}
            else:
                scores = evaluate(context.eval_rows, context.backend, context.mesh, context.ranks, size, beat)
                evaluated = {"evaluation_data": context.eval_rows.documents.fingerprint[:16]}
        self.evaluated_at = step
        self.results |= scores
        self._emit({"step": step, **scores, **evaluated})
        return scores

    def _evaluate(self) -> None:
        context, progress, scores = self.context, self.progress, self._score()
        name = context.config.metric_for_best_model
        better = scores[name] if name in HIGHER_IS_BETTER else -scores[name]
        before = progress.best_score
        enough = before is None or better > before + context.config.early_stopping_threshold
        progress.stale_evaluations = 0 if enough else progress.stale_evaluations + 1
        if before is None or better > before:
            progress.best_score, progress.best_step, progress.best_results = better, progress.step, scores
            self.saved_at = -1  # a checkpoint of this step, if any, does not record it as the best
            if context.config.load_best_model_at_end:
                self._save()

    def _stopped_improving(self) -> bool:
        patience = self.context.config.early_stopping_patience
        return patience is not None and self.progress.stale_evaluations >= patience

    def _save(self, wait: bool = False) -> None:
        """Begins a checkpoint of this step, unless it has one. Collective.

        Args:
            wait: wait until it is published; otherwise for at most `SAVE_TIMEOUT`, then training continues.
        """
        context, step = self.context, self.progress.step
        context.heartbeat.at("save", step)
        began, elapsed = time.perf_counter(), self.progress.elapsed_s + self.window.seconds()
        with self.window.pause():
            # Only one checkpoint is written at a time: publish the previous one first.
            if self.saved_at != step:
                self._until(context.checkpoints.written)
                self._publish()
                self._begin_saving(elapsed)
            if wait:
                self._until(context.checkpoints.written)
            done = all(context.ranks.gather(context.checkpoints.written(SAVE_TIMEOUT)))
            self.stalled += time.perf_counter() - began
            if done:
                self._publish()

    def _begin_saving(self, elapsed: float) -> None:
        context, self.stalled = self.context, 0.0
        if context.scaler is not None:
            self.progress.loss_scale = context.scaler.state_dict()
        position = context.plan.position(self.progress.step)
        so_far = replace(self.progress, elapsed_s=elapsed, stream=position)
        buffers = {name: context.bare.get_buffer(name) for name in context.buffers}
        context.checkpoints.begin(context.backend, buffers, so_far)
        self.saved_at = self.progress.step

    def _until(self, done: Callable[[float], bool]) -> None:
        """Waits until `done` is True on every rank; each poll sends a heartbeat, so that it is not taken for a hang."""
        while not all(self.context.ranks.gather(done(WAIT))):
            self.context.heartbeat.at("save", self.progress.step)

    def _publish(self) -> None:
        """Publishes the pending checkpoint, if any, after waiting until it is written. Collective."""
        began = time.perf_counter()
        saved = self.context.checkpoints.finish()
        if saved is None or self.context.metrics is None:
            return
        stalled = self.stalled + time.perf_counter() - began
        print(saved.line(stalled), flush=True)
        self.context.metrics.write(saved.row(stalled))

    def _stop(self, requests: Requests) -> Outcome:
        self._save(wait=True)
        self._until(self.context.checkpoints.copied)
        step, total = self.progress.step, self.context.plan.total_steps
        if (source := requests.stopped_by(self.context.ranks)) is None:
            cause = f"the launcher was killed; saved at step {step} of {total}"
            return Outcome(Ending("failed", cause, retry="again", step=step), self.progress, self.results)
        cause = f"stopped by {source} at step {step} of {total}; its checkpoint is saved; resume goes on from there"
        return Outcome(Ending("stopped", cause, step=step), self.progress, self.results)

    def _stop_as_planned(self) -> Outcome:
        """Ends at `stop_at_step`. The evaluation decides nothing here, so that the run goes on as if never stopped."""
        self._answer_prompts()
        if self.context.eval_rows is not None and self.evaluated_at != self.progress.step:
            self._score()
        self._save(wait=True)
        self._until(self.context.checkpoints.copied)
        cause = f"stop_at_step={self.context.config.stop_at_step} is reached; resume goes on from there"
        return Outcome(Ending("stopped", cause, step=self.progress.step), self.progress, self.results)

    def _leave_unsaved(self) -> Outcome:
        self._until(self.context.checkpoints.written)
        self._publish()
        self._until(self.context.checkpoints.copied)
        published = self.context.checkpoints.published()
        last = f"the last checkpoint is {published[-1].name}" if published else "there is no checkpoint"
        cause = f"stopped without saving at step {self.progress.step} of {self.context.plan.total_steps}; {last}"
        return Outcome(Ending("stopped", cause, step=self.progress.step), self.progress, self.results)

    def _finish(self, cause: str | None) -> Outcome:
        context, progress = self.context, self.progress
        self._answer_prompts()
        if context.eval_rows is not None and self.evaluated_at != progress.step:
            self._evaluate()
        self._save(wait=True)
        self._until(self.context.checkpoints.copied)
        best = progress.best_step
        if context.config.load_best_model_at_end and best is not None and context.checkpoints.intact(best):
            self.results |= {"exported_step": best, **progress.best_results}
        else:
            self.results["exported_step"] = progress.step
        return Outcome(Ending("done", cause, step=progress.step), progress, self.results)
