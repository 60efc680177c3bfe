"""Group relative policy optimization (https://arxiv.org/abs/2402.03300) and its kin: sampled answers with rewards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from trainers.data.layout import ScoredDocuments

SumByDocument = Callable[[torch.Tensor], torch.Tensor]


class Grpo:
    """Makes answers more likely that are better than others of their prompt, and worse ones less likely.

    How much, `documents.advantages`, is known before the step. A change beyond `epsilon` in the direction of the
    advantage is clipped. `loss_type` says how the tokens of an answer count:

    - `grpo`: their mean;
    - `dr_grpo`: their sum over `max_completion_length` (https://arxiv.org/abs/2503.20783);
    - `dapo`: one mean over the trained tokens of the global batch (https://arxiv.org/abs/2503.14476);
    - `gspo`: one ratio per answer, of means per token (https://arxiv.org/abs/2507.18071);
    - `rloo`: one ratio per answer, of its probability (https://arxiv.org/abs/2402.14740).

    A ratio compares with the weights that sampled: it is 1 for answers that the same step sampled, and for those of
    earlier steps it needs the `old` log-probabilities, which were computed then. Either way each token is weighted by
    what the sampler's probability differs from ours by, up to `importance_sampling_cap`. Recorded answers without `old`
    are compared with the probabilities of their sampler.

    With `beta`, each token also loses `beta` times an estimate of its KL divergence from the initial model.

    Probabilities are those at `temperature`, at which answers are sampled.

    `options` are the values of `TrainConfig.objective_options`.
    """

    of_tokens = True

    def __init__(self, **options: Any):
        self.kind: str = options["loss_type"]
        self.most_tokens: int = options["max_completion_length"]
        self.cap: float = options["importance_sampling_cap"]
        self.temperature: float = options["temperature"]
        self.beta: float = options["beta"]
        high = options["epsilon_high"]
        self.low, self.high = 1 - options["epsilon"], 1 + (options["epsilon"] if high is None else high)

    def __call__(
        self, log_probs: torch.Tensor, documents: ScoredDocuments, of_documents: SumByDocument
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Loss and metrics, summed over the answers of a micro-batch.

        Args:
            log_probs: `[labels]` of the labels on this rank.
            documents: the answers.
            of_documents: sums `[labels]` to `[documents]`, over all ranks with labels of the same documents.

        Returns:
            The loss (a scalar), and `[metrics]` in the order of `ObjectiveSpec.metrics`.
        """
        assert documents.advantages is not None, "the answers have no rewards"
        assert documents.sampled is not None
        lengths = documents.tokens.to(log_probs.dtype).clamp(min=1)
        sampled, advantages = documents.sampled.to(log_probs.dtype), documents.advantages.to(log_probs.dtype)
        before = log_probs.detach() if documents.is_fresh else sampled
        if documents.old is not None:
            before = documents.old.to(log_probs.dtype)
        changes, gaps = log_probs - before, before - sampled  # gaps of recorded answers without `old` are 0
        divergences = None if documents.initial is None else _divergences(log_probs, documents.initial)
        if self.kind in ("gspo", "rloo"):
            changes, gaps = of_documents(changes), of_documents(gaps)
            if self.kind == "gspo":
                changes, gaps = changes / lengths, gaps / lengths
            losses, clipped = self._clipped(changes, advantages)
            losses = losses * gaps.exp().clamp(max=self.cap) * (documents.tokens > 0)
            if divergences is not None:
                losses = losses + self.beta * of_documents(divergences) / lengths
        else:
            of_tokens, clipped_tokens = self._clipped(changes, advantages[documents.of_label])
            of_tokens = of_tokens * gaps.exp().clamp(max=self.cap)
            of_tokens = of_tokens if divergences is None else of_tokens + self.beta * divergences
            losses = of_documents(of_tokens) * self._weights(documents, lengths)
            clipped = of_documents(clipped_tokens) / lengths
        with torch.no_grad():
            differences = of_documents(((log_probs if documents.old is None else before) - sampled).abs()) / lengths
            metrics = [clipped.sum(), differences.sum()]
            metrics += [] if divergences is None else [(of_documents(divergences) / lengths).sum()]
        return losses.sum(), torch.stack(metrics)

    def _clipped(self, changes: torch.Tensor, advantages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Losses of changes in log-probability, and which of them were clipped, as 0 or 1."""
        ratios = changes.exp()
        plain, bounded = ratios * advantages, ratios.clamp(self.low, self.high) * advantages
        return -torch.minimum(plain, bounded), (bounded < plain).to(ratios.dtype)

    def _weights(self, documents: ScoredDocuments, lengths: torch.Tensor) -> torch.Tensor:
        """`[documents]` weight of each token of an answer."""
        if self.kind == "grpo":
            return 1 / lengths
        return torch.full_like(lengths, documents.scales.nll if self.kind == "dapo" else 1 / self.most_tokens)


def _divergences(log_probs: torch.Tensor, initial: torch.Tensor) -> torch.Tensor:
    """`[labels]` estimates of KL(model, initial model), never negative (http://joschu.net/blog/kl-approx.html: k3)."""
    changes = initial.to(log_probs.dtype) - log_probs
    return changes.exp() - changes - 1
