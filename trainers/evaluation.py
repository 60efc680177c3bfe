"""Loss and metrics on the evaluation data, and the log-probabilities of the initial model."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch

from trainers.data.batches import Rows, evaluation_batches
from trainers.parallel.backend import Backend
from trainers.parallel.ranks import Ranks
from trainers.strategy.mesh import Mesh


@torch.no_grad()
def evaluate(
    rows: Rows, backend: Backend, mesh: Mesh, ranks: Ranks, batch_size: int, beat: Callable[..., None]
) -> dict[str, float]:
    """Mean loss and metrics of the objective over the evaluation data and all ranks. Collective.

    Args:
        rows: the evaluation data.
        backend: the wrapped model.
        mesh: this rank's position in the mesh.
        ranks: all ranks.
        batch_size: rows of each batch on this rank.
        beat: called with the section while it works.
    """
    micro_batches = evaluation_batches(rows, batch_size, mesh.data_rank, mesh.sizes.data)
    backend.model.eval()
    sums = backend.evaluate(micro_batches, beat)
    backend.model.train()
    by_rank = ranks.gather((sums if mesh.contributes_loss else torch.zeros_like(sums)).tolist())
    count = max(rows.divisor(), 1)
    mean, *metrics = (sum(values) / count for values in zip(*by_rank, strict=True))
    scores = {"eval_loss": mean}
    if rows.objective.divisor == "tokens":
        scores["eval_perplexity"] = math.exp(mean) if mean < 700 else math.inf
    return scores | {f"eval_{name}": value for name, value in zip(rows.objective.metrics, metrics, strict=True)}


@torch.no_grad()
def reference_log_probs(
    rows: Rows, backend: Backend, mesh: Mesh, ranks: Ranks, batch_size: int, beat: Callable[..., None]
) -> torch.Tensor:
    """Log-probability of each document under the model as it is now, before the first step. Collective.

    The arguments are those of `evaluate`.

    Returns:
        `[documents]` fp32 in host memory, equal on every rank.
    """
    micro_batches = evaluation_batches(rows, batch_size, mesh.data_rank, mesh.sizes.data)
    log_probs = torch.zeros(len(rows.documents.lengths), dtype=torch.float32)
    backend.model.eval()
    for numbers, values in backend.log_probs(micro_batches, beat):
        if mesh.contributes_loss:
            log_probs[numbers.astype(np.int64)] = values
    backend.model.train()
    # Each document is on one data rank; ranks with shards of its row add what their labels contribute.
    return ranks.sum(log_probs.to(ranks.device)).cpu()
