"""Contrastive preference optimization (https://arxiv.org/abs/2401.08417): DPO with a uniform reference."""

from __future__ import annotations

import torch

from trainers.objectives.pairs import PairLoss, Pairs, smoothed


class Cpo(PairLoss):
    """Compares log-probabilities (`ipo`: means per token). `nll_weight` adds the supervised loss on chosen answers."""

    def losses(self, pairs: Pairs) -> torch.Tensor:
        """See `PairLoss`."""
        if self.options["loss_type"] == "ipo":
            means = pairs.chosen / pairs.chosen_tokens, pairs.rejected / pairs.rejected_tokens
            return (means[0] - means[1] - 1 / (2 * self.beta)) ** 2
        difference = pairs.chosen - pairs.rejected
        if self.options["loss_type"] == "hinge":
            return torch.relu(1 - self.beta * difference)
        return smoothed(self.beta * difference, self.options["label_smoothing"])

    def rewards(self, pairs: Pairs) -> tuple[torch.Tensor, torch.Tensor]:
        """See `PairLoss`."""
        return self.beta * pairs.chosen, self.beta * pairs.rejected
