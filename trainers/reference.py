"""Log-probabilities of the data under the initial model, which some objectives compare with.

They are computed once, before the first step, under the run's own strategy: then the wrapped model is the initial one,
whether all weights are trained or adapters, and no second model is held. Checkpoints contain them, so that a resumed
run goes on with the same values.
"""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path

import torch

from trainers.data.batches import Rows
from trainers.evaluation import reference_log_probs
from trainers.run.errors import TrainingError
from trainers.step import TrainContext


def set_reference(context: TrainContext, folder: Path | None) -> None:
    """Sets the `reference` of training and evaluation rows, and hands it to the checkpoints. Collective.

    Args:
        context: the run; its model has the initial weights unless `folder` is given.
        folder: the checkpoint that the run resumes from; None for a new run.

    Raises:
        TrainingError: on every rank, if the checkpoint lacks the values of this data.
    """
    saved = context.checkpoints.extra_tensors(folder) if folder else {}
    of_splits = [(context.plan.rows, "dataset_name"), (context.eval_rows, "eval_dataset_name")]
    of_splits += [(rows.mismatched, option) for rows, option in of_splits if rows is not None]
    for rows, option in of_splits:
        if rows is None:
            continue
        name = f"reference.{rows.documents.fingerprint[:16]}"
        if folder and name not in saved:
            raise TrainingError(
                f"{folder} holds no log-probabilities of this data under the initial model, and its own model is "
                f"trained: {option} must be what the run started with"
            )
        values = saved[name] if folder else _computed(context, rows)
        context.checkpoints.extra[name] = values
        rows.reference = values.numpy()


def _computed(context: TrainContext, rows: Rows) -> torch.Tensor:
    began, config = time.perf_counter(), context.config
    beat = partial(context.heartbeat.at, step=0)
    values = reference_log_probs(
        rows, context.backend, context.mesh, context.ranks, config.per_device_eval_batch_size, beat
    )
    if context.ranks.is_main:
        seconds = time.perf_counter() - began
        print(f"log-probabilities of {len(values):,} documents under the initial model: {seconds:.1f} s", flush=True)
    return values
