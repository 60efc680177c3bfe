"""What objectives have in common that learn from pairs of a chosen and a rejected document."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from trainers.config.mistakes import ConfigError
from trainers.data.layout import ScoredDocuments


class Pairs(NamedTuple):
    """Log-probabilities of the pairs of a micro-batch, each `[pairs]`, in fp32 or wider.

    Attributes:
        chosen, rejected: Summed over the trained tokens of the document.
        chosen_tokens, rejected_tokens: Numbers of those tokens.
        chosen_reference, rejected_reference: The same sums under the initial model; None without a reference.
        columns: The numeric columns that `spec` of a class of one's own names, by name.
    """

    chosen: torch.Tensor
    rejected: torch.Tensor
    chosen_tokens: torch.Tensor
    rejected_tokens: torch.Tensor
    chosen_reference: torch.Tensor | None = None
    rejected_reference: torch.Tensor | None = None
    columns: Mapping[str, torch.Tensor] = MappingProxyType({})


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

    def metrics(self, pairs: Pairs) -> Sequence[torch.Tensor]:
        """`[pairs]` values of each metric that `spec` of a class of one's own names, in its order."""
        return ()

    def __call__(self, log_probs: torch.Tensor, documents: ScoredDocuments) -> tuple[torch.Tensor, torch.Tensor]:
        """Loss and metrics, summed over the pairs of a micro-batch.

        Args:
            log_probs: `[documents]`, summed over the trained tokens of each; chosen and rejected in turn.
            documents: the documents.

        Returns:
            The loss (a scalar), and `[metrics]` in the order of `ObjectiveSpec.metrics`.

        Raises:
            ConfigError: if `losses` or `metrics` of a class of one's own returns tensors that are not `[pairs]`.
        """
        per_document = [log_probs, documents.tokens.to(log_probs.dtype)]
        if documents.reference is not None:
            per_document.append(documents.reference.to(log_probs.dtype))
        columns = {name: values[::2].to(log_probs.dtype) for name, values in documents.columns.items()}
        of_pairs: list[Any] = [part for values in per_document for part in values.view(-1, 2).unbind(1)]
        pairs = Pairs(*of_pairs)._replace(columns=columns)
        loss = self._of_pairs("losses", self.losses(pairs), pairs).sum()
        if weight := self.options["nll_weight"]:
            loss = loss - pairs.chosen.sum() * (weight * documents.scales.nll)
        with torch.no_grad():
            own = [self._of_pairs("metrics", values, pairs).sum() for values in self.metrics(pairs)]
            rewards = reward_metrics(*self.rewards(pairs))
            return loss, torch.cat([rewards, torch.stack(own).to(rewards)]) if own else rewards

    def _of_pairs(self, method: str, values: Any, pairs: Pairs) -> torch.Tensor:
        """Values that a method returned: a mean, say, would be summed up wrongly over micro-batches and ranks."""
        if isinstance(values, torch.Tensor) and values.shape == pairs.chosen.shape:
            return values
        got = f"of shape {list(values.shape)}" if isinstance(values, torch.Tensor) else f"a {type(values).__name__}"
        problem = f"returns a value {got} from {method}, not one number for each of {len(pairs.chosen)} pairs"
        raise ConfigError.about("objective", type(self).__name__, problem, "sum or average nothing there")


def reward_metrics(chosen: torch.Tensor, rejected: torch.Tensor) -> torch.Tensor:
    """`[metrics]` in the order of `ObjectiveSpec.metrics`, summed over pairs with these rewards `[pairs]`."""
    metrics = [(chosen > rejected).to(chosen.dtype), chosen - rejected, chosen, rejected]
    return torch.stack([metric.sum() for metric in metrics])


def smoothed(logits: torch.Tensor, smoothing: float) -> torch.Tensor:
    """`-log sigmoid(logits)`, where a share `smoothing` of the pairs counts the other way round."""
    if smoothing == 0:
        return -functional.logsigmoid(logits)
    return -(1 - smoothing) * functional.logsigmoid(logits) - smoothing * functional.logsigmoid(-logits)
