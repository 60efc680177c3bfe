"""Loss, perplexity and token accuracy on the evaluation data."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from trainers.data.batches import Rows, evaluation_batches
from trainers.parallel.backend import Backend
from trainers.parallel.ranks import Ranks
from trainers.strategy.mesh import Mesh


@torch.no_grad()
def evaluate(
    rows: Rows, backend: Backend, mesh: Mesh, ranks: Ranks, batch_size: int, beat: Callable[..., None]
) -> dict[str, float]:
    """Loss, perplexity and token accuracy over all trained tokens of the evaluation data and all ranks. Collective.

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
    by_rank = ranks.gather(sums.tolist() if mesh.contributes_loss else [0.0, 0.0])
    loss_sum, correct_sum = (sum(values) for values in zip(*by_rank, strict=True))
    count = max(int(rows.trained.sum()), 1)
    mean = loss_sum / count
    return {
        "eval_loss": mean,
        "eval_perplexity": math.exp(mean) if mean < 700 else math.inf,
        "eval_token_accuracy": correct_sum / count,
    }
