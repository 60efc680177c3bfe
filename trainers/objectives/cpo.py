"""Contrastive preference optimization (https://arxiv.org/abs/2401.08417): DPO with a uniform reference."""

from __future__ import annotations

import torch

from trainers.objectives.pairs import PairLoss, Pairs, smoothed


class Cpo(PairLoss):
    """Compares log-probabilities; `nll_weight` adds the supervised loss on the chosen answers."""

    def losses(self, pairs: Pairs) -> torch.Tensor:
        """See `PairLoss`."""
        difference = pairs.chosen - pairs.rejected
        if self.options["loss_type"] == "ipo":
            return (difference - 1 / (2 * self.beta)) ** 2
        if self.options["loss_type"] == "hinge":
            return torch.relu(1 - self.beta * difference)
        return smoothed(self.beta * difference, self.options["label_smoothing"])

    def rewards(self, pairs: Pairs) -> tuple[torch.Tensor, torch.Tensor]:
        """See `PairLoss`."""
        return self.beta * pairs.chosen, self.beta * pairs.rejected
