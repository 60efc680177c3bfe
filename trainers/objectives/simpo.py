"""Simple preference optimization (https://arxiv.org/abs/2405.14734): no reference, means per token, a margin."""

from __future__ import annotations

import torch

from trainers.objectives.pairs import PairLoss, Pairs, smoothed


class Simpo(PairLoss):
    """Wants the reward of the chosen answer to be `simpo_gamma` above that of the rejected one."""

    def losses(self, pairs: Pairs) -> torch.Tensor:
        """See `PairLoss`."""
        chosen, rejected = self.rewards(pairs)
        return smoothed(chosen - rejected - self.options["simpo_gamma"], self.options["label_smoothing"])

    def rewards(self, pairs: Pairs) -> tuple[torch.Tensor, torch.Tensor]:
        """See `PairLoss`."""
        return self.beta * pairs.chosen / pairs.chosen_tokens, self.beta * pairs.rejected / pairs.rejected_tokens
