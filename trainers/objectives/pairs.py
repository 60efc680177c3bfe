"""What objectives have in common that learn from pairs of a chosen and a rejected document."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from trainers.data.layout import ScoredDocuments


class Pairs(NamedTuple):
    """Log-probabilities of the pairs of a micro-batch, each `[pairs]`, in fp32 or wider.

    Attributes:
        chosen, rejected: Summed over the trained tokens of the document.
        chosen_tokens, rejected_tokens: Numbers of those tokens.
        chosen_reference, rejected_reference: The same sums under the initial model; None without a reference.
    """

    chosen: torch.Tensor
    rejected: torch.Tensor
    chosen_tokens: torch.Tensor
    rejected_tokens: torch.Tensor
    chosen_reference: torch.Tensor | None = None
    rejected_reference: torch.Tensor | None = None


class PairLoss(ABC):
    """A loss of pairs; `options` are the values of `TrainConfig.objective_options`."""

    def __init__(self, **options: Any):
        self.options = options
        self.beta: float = options["beta"]

    @abstractmethod
    def losses(self, pairs: Pairs) -> torch.Tensor:
        """`[pairs]` loss of each pair."""

    @abstractmethod
    def rewards(self, pairs: Pairs) -> tuple[torch.Tensor, torch.Tensor]:
        """`[pairs]` rewards of the chosen and of the rejected document, for the metrics."""

    def __call__(self, log_probs: torch.Tensor, documents: ScoredDocuments) -> tuple[torch.Tensor, torch.Tensor]:
        """Loss and metrics, summed over the pairs of a micro-batch.

        Args:
            log_probs: `[documents]`, summed over the trained tokens of each; chosen and rejected in turn.
            documents: the documents.

        Returns:
            The loss (a scalar), and `[metrics]` in the order of `ObjectiveSpec.metrics`.
        """
        per_document = [log_probs, documents.tokens.to(log_probs.dtype)]
        if documents.reference is not None:
            per_document.append(documents.reference.to(log_probs.dtype))
        pairs = Pairs(*(part for values in per_document for part in values.view(-1, 2).unbind(1)))
        loss = self.losses(pairs).sum()
        if weight := self.options["nll_weight"]:
            loss = loss - pairs.chosen.sum() * (weight * documents.scales.nll)
        with torch.no_grad():
            return loss, reward_metrics(*self.rewards(pairs))


def reward_metrics(chosen: torch.Tensor, rejected: torch.Tensor) -> torch.Tensor:
    """`[metrics]` in the order of `ObjectiveSpec.metrics`, summed over pairs with these rewards `[pairs]`."""
    metrics = [(chosen > rejected).to(chosen.dtype), chosen - rejected, chosen, rejected]
    return torch.stack([metric.sum() for metric in metrics])


def smoothed(logits: torch.Tensor, smoothing: float) -> torch.Tensor:
    """`-log sigmoid(logits)`, where a share `smoothing` of the pairs counts the other way round."""
    if smoothing == 0:
        return -functional.logsigmoid(logits)
    return -(1 - smoothing) * functional.logsigmoid(logits) - smoothing * functional.logsigmoid(-logits)
