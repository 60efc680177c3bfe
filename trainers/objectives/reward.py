"""Reward models: the Bradley-Terry likelihood that the chosen document is better (https://arxiv.org/abs/2203.02155)."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from trainers.data.layout import ScoredDocuments
from trainers.objectives.pairs import reward_metrics


class Reward:
    """Wants a higher score for the chosen document than for the rejected one, by the margin of the pair if it has one.

    `center_rewards_coefficient` holds the scores of both near 0 (https://arxiv.org/abs/2312.09244). `options` are the
    values of `TrainConfig.objective_options`.
    """

    def __init__(self, **options: Any):
        self.centering: float = options["center_rewards_coefficient"]

    def __call__(self, scores: torch.Tensor, documents: ScoredDocuments) -> tuple[torch.Tensor, torch.Tensor]:
        """Loss and metrics, summed over the pairs of a micro-batch.

        Args:
            scores: `[documents]` score of each; chosen and rejected in turn.
            documents: the documents.

        Returns:
            The loss (a scalar), and `[metrics]` in the order of `ObjectiveSpec.metrics`.
        """
        chosen, rejected = scores.view(-1, 2).unbind(1)
        difference = chosen - rejected
        if "margin" in documents.columns:
            difference = difference - documents.columns["margin"].to(scores.dtype)[::2]
        loss = -functional.logsigmoid(difference).sum()
        if self.centering:
            loss = loss + self.centering * (chosen + rejected).square().sum()
        return loss, reward_metrics(chosen.detach(), rejected.detach())
