"""Loss and metrics on the evaluation data, and the log-probabilities of the initial model."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch

from trainers.data.batches import evaluation_batches
from trainers.data.rows import Rows
from trainers.objectives.global_terms import divergence
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

    def summed(rows: Rows, kl: torch.Tensor | None = None, source: int | None = None) -> list[float]:
        micro_batches = evaluation_batches(rows, batch_size, mesh.data_rank, mesh.sizes.data, source)
        sums = backend.evaluate(micro_batches if kl is None else (part.with_kl(kl) for part in micro_batches), beat)
        by_rank = ranks.gather((sums if mesh.contributes_loss else torch.zeros_like(sums)).tolist())
        return [sum(values) for values in zip(*by_rank, strict=True)]

    backend.model.eval()
    kl, count = None, max(rows.divisor(), 1)
    if rows.mismatched is not None:  # the divergence is a mean over all of the data, as the other values are
        kl = divergence(torch.tensor(summed(rows.mismatched)[0], dtype=torch.float64), count)
    names = () if rows.mixed is None else rows.mixed.mix.names
    by_source = [summed(rows, kl, source) for source in range(len(names))] or [summed(rows, kl)]
    backend.model.train()
    mean, *metrics = (sum(totals) / count for totals in zip(*by_source, strict=True))
    scores = {"eval_loss": mean}
    for source, name in enumerate(names):
        if examples := rows.divisor(np.arange(*rows.bounds[source : source + 2])):
            scores[f"eval_loss/{name}"] = by_source[source][0] / examples
    if rows.objective.loss_of == "labels":
        scores["eval_perplexity"] = math.exp(mean) if mean < 700 else math.inf
    by_name = zip(rows.objective.metrics, metrics, strict=True)
    # A mean over no example is not a number, such as over the desirable ones where all are undesirable.
    return scores | {f"eval_{name}": value for name, value in by_name if not math.isnan(value)}


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
