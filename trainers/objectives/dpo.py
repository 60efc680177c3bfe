"""Direct preference optimization (https://arxiv.org/abs/2305.18290) and its variants."""

from __future__ import annotations

import torch
from torch.nn import functional

from trainers.objectives.pairs import PairLoss, Pairs, smoothed


class Dpo(PairLoss):
    """Compares how much more likely than under the initial model the chosen and the rejected answer are.

    `loss_type`: `sigmoid`; `hinge` (https://arxiv.org/abs/2305.10425); `ipo`, on means per token
    (https://arxiv.org/abs/2310.12036); `robust`, unbiased under a known share of wrong labels
    (https://arxiv.org/abs/2403.00409); `sigmoid_norm`, on means per token (https://arxiv.org/abs/2411.15124).
    """

    def losses(self, pairs: Pairs) -> torch.Tensor:
        """See `PairLoss`."""
        loss_type, smoothing = self.options["loss_type"], self.options["label_smoothing"]
        chosen, rejected = _log_ratios(pairs)
        if loss_type in ("ipo", "sigmoid_norm"):
            chosen, rejected = chosen / pairs.chosen_tokens, rejected / pairs.rejected_tokens
        difference = chosen - rejected
        if loss_type == "ipo":
            return (difference - 1 / (2 * self.beta)) ** 2
        logits = self.beta * difference
        if loss_type == "hinge":
            return torch.relu(1 - logits)
        if loss_type == "robust":
            right, wrong = functional.logsigmoid(logits), functional.logsigmoid(-logits)
            return (smoothing * wrong - (1 - smoothing) * right) / (1 - 2 * smoothing)
        return smoothed(logits, smoothing)

    def rewards(self, pairs: Pairs) -> tuple[torch.Tensor, torch.Tensor]:
        """See `PairLoss`."""
        chosen, rejected = _log_ratios(pairs)
        return self.beta * chosen, self.beta * rejected


def _log_ratios(pairs: Pairs) -> tuple[torch.Tensor, torch.Tensor]:
    """`[pairs]` log of the probability over that of the initial model, of the chosen and of the rejected document."""
    assert pairs.chosen_reference is not None, "the reference was not computed"
    assert pairs.rejected_reference is not None
    return pairs.chosen - pairs.chosen_reference, pairs.rejected - pairs.rejected_reference
