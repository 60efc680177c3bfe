"""`DocumentLoss`: what an objective computes from the log-probabilities of documents; and the one of a config."""

from __future__ import annotations

from collections.abc import Callable

import torch

from trainers.config.options import TrainConfig
from trainers.data.layout import ScoredDocuments
from trainers.objectives.cpo import Cpo
from trainers.objectives.dpo import Dpo
from trainers.objectives.kto import Kto
from trainers.objectives.orpo import Orpo
from trainers.objectives.simpo import Simpo

DocumentLoss = Callable[[torch.Tensor, ScoredDocuments], tuple[torch.Tensor, torch.Tensor]]
"""Summed loss (a scalar) and summed metrics `[metrics]` of the log-probabilities `[documents]` of a micro-batch."""
_LOSSES: dict[str, Callable[..., DocumentLoss]] = {"dpo": Dpo, "simpo": Simpo, "cpo": Cpo, "orpo": Orpo, "kto": Kto}


def document_loss(config: TrainConfig) -> DocumentLoss | None:
    """The loss of the config's objective; None if it is a sum over tokens, which `LossModule` computes itself."""
    if config.objective_spec.divisor == "tokens":
        return None
    return _LOSSES[config.objective](**config.objective_options())
