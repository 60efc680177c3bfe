"""Odds ratio preference optimization (https://arxiv.org/abs/2403.07691)."""

from __future__ import annotations

import math

import torch
from torch.nn import functional

from trainers.objectives.pairs import PairLoss, Pairs

_LARGEST = -1e-6
"""Mean log-probabilities nearer to 0 count as this: the odds of a certain answer are infinite."""


class Orpo(PairLoss):
    """The supervised loss on the chosen answers, and `beta` times the loss of the odds ratio, on means per token."""

    def losses(self, pairs: Pairs) -> torch.Tensor:
        """See `PairLoss`."""
        chosen, rejected = pairs.chosen / pairs.chosen_tokens, pairs.rejected / pairs.rejected_tokens
        return -self.beta * functional.logsigmoid(_log_odds(chosen) - _log_odds(rejected))

    def rewards(self, pairs: Pairs) -> tuple[torch.Tensor, torch.Tensor]:
        """See `PairLoss`."""
        return self.beta * pairs.chosen / pairs.chosen_tokens, self.beta * pairs.rejected / pairs.rejected_tokens


def _log_odds(log_prob: torch.Tensor) -> torch.Tensor:
    """`log(p / (1 - p))` of `p = exp(log_prob)`; `1 - p` is computed in the form that is exact for its size."""
    log_prob = log_prob.clamp(max=_LARGEST)
    near_one = log_prob > -math.log(2)
    # Each form gets only arguments that it can take, so that no gradient is 0 times infinity.
    small = torch.log(-torch.expm1(log_prob.where(near_one, log_prob.new_tensor(-1.0))))
    large = torch.log1p(-torch.exp(log_prob.where(~near_one, log_prob.new_tensor(-1.0))))
    return log_prob - small.where(near_one, large)
