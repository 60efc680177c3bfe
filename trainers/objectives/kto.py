"""Kahneman-Tversky optimization (https://arxiv.org/abs/2402.01306): single answers with a label."""

from __future__ import annotations

from typing import Any

import torch

from trainers.data.layout import ScoredDocuments


class Kto:
    """Wants desirable answers to be more likely than under the initial model, and undesirable ones less likely.

    How much more is measured from the KL divergence of the global batch, `documents.kl`, which has no gradient.
    `loss_type`: `kto`; `apo_zero_unpaired`, the same without the divergence (https://arxiv.org/abs/2408.06266).
    `options` are the values of `TrainConfig.objective_options`.
    """

    def __init__(self, **options: Any):
        self.beta: float = options["beta"]
        self.weights: tuple[float, float] = (options["desirable_weight"], options["undesirable_weight"])
        self.needs_kl = options["loss_type"] == "kto"

    def __call__(self, log_probs: torch.Tensor, documents: ScoredDocuments) -> tuple[torch.Tensor, torch.Tensor]:
        """Loss and metrics, summed over the examples of a micro-batch.

        Args:
            log_probs: `[documents]`, summed over the trained tokens of each.
            documents: the documents.

        Returns:
            The loss (a scalar), and `[metrics]` in the order of `ObjectiveSpec.metrics`. For mismatched documents,
            which have no label: the sum of their log-ratios, and no metrics.
        """
        assert documents.reference is not None, "the reference was not computed"
        ratios = log_probs - documents.reference.to(log_probs.dtype)
        if documents.desirable is None:
            return ratios.sum(), ratios.new_zeros(0)
        kl = ratios.new_zeros(())
        if self.needs_kl:
            assert documents.kl is not None, "the divergence of the global batch was not computed"
            kl = documents.kl.to(ratios.dtype)
        distances = self.beta * torch.where(documents.desirable, ratios - kl, kl - ratios)
        # Filled and masked on the device: a tensor from host memory, or an index by a mask, would synchronize.
        desirable_weight, undesirable_weight = (ratios.new_full((), weight) for weight in self.weights)
        weights = torch.where(documents.desirable, desirable_weight, undesirable_weight)
        loss = (weights * torch.sigmoid(-distances)).sum()
        with torch.no_grad():
            rewards = self.beta * ratios
            desirable = (rewards * documents.desirable).sum() * documents.scales.desirable
            undesirable = (rewards * ~documents.desirable).sum() * documents.scales.undesirable
            metrics = [(distances > 0).to(ratios.dtype).sum(), desirable - undesirable, desirable, undesirable]
            metrics += [kl * len(ratios)] if self.needs_kl else []
            return loss, torch.stack(metrics)
